"""Shake a small random Llama with four faults at once, and print its ledger: `make example-ledger`."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import track

from shaketable.models import hush

PLAN = (
    "relative_gaussian:0.05@op.matmul;"
    "dead_zone:0.01,scope=token@layer.3;"
    "mxfp4@module.mlp.down_proj,layers=4-7;"
    "bit_flip:0.01,bit=20,sparsity=0.25@module.self_attn,phase=rollout"
)


def main(picture: str | None = None) -> None:
    """A few training steps and a rollout of a random 8-layer Llama under four faults at once.

    Args:
        picture: Also save what is printed as an SVG file.
    """
    import torch

    hush()
    from transformers import LlamaConfig, LlamaForCausalLM

    import shaketable as st
    from shaketable.ledger.table import build_table, remarks

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(3, 256, (4, 32))
    clean = model(input_ids=tokens, labels=tokens).loss.item()
    console = Console(record=picture is not None, width=112 if picture else None, highlight=False)
    console.print("[bold]Shaketable[/]  a random 8-layer Llama under four faults at once\n")
    for clause in st.Plan.parse(PLAN).clauses:
        console.print(f"  {clause.text()}", style="cyan", markup=False)
    console.print()
    with st.inject(model, PLAN, seed=0) as ledger:
        for _ in track(range(8), "training steps", console=console, transient=True):
            faulty = model(input_ids=tokens, labels=tokens).loss
            faulty.backward()
        model.generate(tokens[:, :8], max_new_tokens=8, do_sample=False)
    after = model(input_ids=tokens, labels=tokens).loss.item()
    console.print(build_table(ledger))
    for line in remarks(ledger):
        console.print(f"  ! {line}", style="yellow", markup=False)
    console.print(f"\nloss clean {clean:.4f} · shaken {faulty.item():.4f} · after {after:.4f}, bit-identical: {after == clean}")
    if picture is not None:
        console.save_svg(picture, title="make example-ledger")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
