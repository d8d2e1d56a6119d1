"""What training a model of 7B needs: memory and FLOPs, from its shape. `roofline.py` writes the table into docs/scale.md.

A parameter that is trained by AdamW in mixed precision costs 16 bytes: float32 weight, gradient and two moments. One that
is only read costs two in bfloat16, four in float32. Activations are those of activation checkpointing: the input of every
layer is kept, one layer is there whole while its backward runs, and the logits are there in bfloat16 and in float32, with
their gradients.

Left out: what the allocator wastes, kernels' workspaces, the sampler's cache of keys and values, buffers of collectives. So
a sum here is a lower bound. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roofline import Model

TRAINED, LOGIT = 16, 16
"""Bytes of a trained parameter; bytes of a logit: bfloat16 and its gradient, float32, its log-softmax and their gradient."""
GIB = 2**30


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    rank: int = 0
    """Of LoRA adapters on all linears; 0 trains all weights."""
    base: int = 0
    """Bytes of a weight that is only read, with LoRA."""
    gpus: int = 1
    """Over which FSDP shards what is trained, and the reference."""
    copies: int = 0
    """Whole copies of the weights in bfloat16 on every GPU: the sampler's."""
    references: int = 0
    """Copies in bfloat16 that are sharded too. With LoRA the reference is the base with the adapters off."""


WAYS = (
    Way("all weights, one GPU", copies=1, references=1),
    Way("all weights, FSDP over 8, sampler on each (verl)", gpus=8, copies=1, references=1),
    Way("LoRA of rank 16, float32 base (`train --lora 16`)", rank=16, base=4),
    Way("LoRA of rank 16, bfloat16 base", rank=16, base=2),
)


def adapters(model: Model, rank: int) -> int:
    """Parameters of LoRA on the seven linears of every layer: rank × (inputs + outputs)."""
    return model.layers * rank * (9 * model.hidden + 2 * model.kv + 3 * model.inner)


def weights_bytes(model: Model, way: Way) -> float:
    """Weights, gradients and moments, on one GPU."""
    trained = adapters(model, way.rank) if way.rank else model.parameters
    sharded = TRAINED * trained + 2 * way.references * model.parameters
    return sharded / way.gpus + way.base * model.parameters + 2 * way.copies * model.parameters


def activation_bytes(model: Model, tokens: int, rank: int = 0) -> float:
    """The inputs of all layers, and with them one layer whole or the logits, whichever is more.

    What is counted of a layer is a little more than autograd keeps: 0.89 of it, counted on a small shape with saved-tensor
    hooks. Noise keeps nothing: its gradient draws it again from its key.
    """
    kept = 2 * model.hidden * model.layers
    layer = 2 * (8 * model.hidden + 2 * model.kv + 4 * model.inner)
    cast = 4 * (6 * model.hidden + model.inner) if rank else 0  # adapters are float32, and keep their inputs so
    return tokens * (kept + max(layer + cast, LOGIT * model.vocabulary))


def flops(model: Model, tokens: int, rank: int = 0) -> float:
    """Of a step: forward, forward again, and a backward, which has no gradients of frozen weights to make."""
    return 2 * model.weights * tokens * (3 if rank else 4) + 8 * adapters(model, rank) * tokens


def rows(model: Model, tokens: int) -> list[list[str]]:
    """A row for each way, for micro-batches of so many tokens."""
    found = []
    for way in WAYS:
        held, active = weights_bytes(model, way) / GIB, activation_bytes(model, tokens, way.rank) / GIB
        trained = adapters(model, way.rank) if way.rank else model.parameters
        work = flops(model, tokens, way.rank)
        found.append(
            [way.name, f"{trained / 1e6:,.0f}", f"{held:.1f}", f"{active:.1f}", f"{held + active:.1f}", f"{work / 1e12:.0f}"]
        )
    return found


HEAD = ["how", "trained, M", "weights and optimizer, GiB", "activations, GiB", "each GPU, GiB", "TFLOP a micro-batch and GPU"]
