"""How often a plan must fire in one forward, found without the code that is judged.

Three ways. From the configuration: as many layers as it says; for dense families whose layer everybody knows, as many
products in a layer (`PER_LAYER`), and two more in attention that is written out. By hooks of torch on modules, for all
others. And by a torch function mode that counts products by name, for operators. What plans leave out by default is known
here by its own rule: the head is what `get_output_embeddings` returns, a router is a module with a matrix that is called
gate or router where there are experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PER_LAYER = {
    7: (
        "llama qwen2 qwen3 mistral ministral ministral3 gemma gemma2 gemma3_text cohere cohere2 olmo olmo2 olmo3 granite "
        "smollm3 stablelm helium exaone4 seed_oss cwm hunyuan_v1_dense vaultgemma"
    ),
    6: "arcee nemotron starcoder2 phi opt apertus",
    4: "gpt2 gpt_neox phi3 bloom",
}
_OF = {kind: n for n, kinds in PER_LAYER.items() for kind in kinds.split()}
_PRODUCTS = [
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "einsum",
    "inner",
    "tensordot",
    "grouped_mm",
    "_grouped_mm",
    "grouped_mm_fallback",
    "bilinear",
    "multi_dot",
    "chain_matmul",
    "addmm_",
    "baddbmm_",
    "addbmm_",
    "addmv_",
]


def from_config(kind: str, config: Any, attention: str) -> dict[str, int]:
    """What the configuration says: layers, and for known dense families linears and products."""
    text = config.get_text_config(decoder=True)
    layers = int(text.num_layers if kind == "longcat_flash" else text.num_hidden_layers)  # two attentions in each of its layers
    if kind not in _OF:
        return {"layer": layers}
    own = _OF[kind] + (0 if attention == "sdpa" else 2)
    return {"layer": layers, "module": layers * _OF[kind], "op": layers * own}


@dataclass
class Counted:
    """What happened in one clean forward."""

    modules: int = 0
    products: int = 0
    called: list[str] = field(default_factory=list)
    """Names of the linears that were called, in order."""


@contextmanager
def counting(model: nn.Module) -> Iterator[Counted]:
    """Count the calls of linears, and products, of what is run inside."""
    found = Counted()
    left_out = _left_out(model)
    handles = []

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            found.modules += 1
            found.called.append(name)

        return hook

    for name, module in model.named_modules():
        if _is_linear(module) and module not in left_out:
            handles.append(module.register_forward_hook(count(name)))
    products = _Products(found, left_out)
    for module in left_out:
        handles.append(module.register_forward_pre_hook(lambda *_: products.go(1)))
        handles.append(module.register_forward_hook(lambda *_: products.go(-1)))
    try:
        with products:
            yield found
    finally:
        for handle in handles:
            handle.remove()


def _left_out(model: nn.Module) -> set[nn.Module]:
    has_experts = any("expert" in name for name, _ in model.named_modules())
    head = model.get_output_embeddings()  # type: ignore[operator]
    routers = [m for n, m in model.named_modules() if has_experts and _is_router(n, m)]
    return {m for m in (head, *routers) if m is not None}


def _is_router(name: str, module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    called = name.rsplit(".", 1)[-1] in ("gate", "router", "shared_expert_gate")
    return "router" in type(module).__name__.lower() or (called and weight is not None and weight.dim() == 2)


def _is_linear(module: nn.Module) -> bool:
    name = type(module).__name__
    if name.endswith("Experts"):
        return any(p is not None and p.dim() == 3 for p in module._parameters.values())
    weight = module._parameters.get("weight")
    return (isinstance(module, nn.Linear) or name == "Conv1D" or "Linear" in name) and weight is not None and weight.dim() == 2


class _Products(TorchFunctionMode):
    def __init__(self, found: Counted, left_out: set[nn.Module]) -> None:
        super().__init__()
        self.found = found
        self.weights = {p.untyped_storage().data_ptr() for m in left_out for p in m.parameters()}
        self.inside = 0
        """How many modules that are left out are running."""

    def go(self, by: int) -> None:
        self.inside += by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside and getattr(func, "__name__", "") in _PRODUCTS:
            given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
            self.found.products += not any(x.untyped_storage().data_ptr() in self.weights for x in given)
        return result
