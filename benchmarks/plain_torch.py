"""What plain torch costs where our kernels are not: every kind of fault on a CPU with `native.cpp` and without it.

    python benchmarks/plain_torch.py            # writes plain_torch.json and plain_torch.md

An accelerator that is not CUDA (an NPU) has neither the C++ nor the Triton kernels; there a fault is the plain torch code that
is timed here. How many operators that is, each of them a kernel and a pass over memory, does not depend on the device. The
ratio says about what it costs there against a fused kernel; what it costs on an NPU was not measured.

Processor time of one thread, processes of the two by turns (the kernels are chosen once in a process), the least of all turns:
what else the machine does only adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHAPE = (512, 1536)
SWITCHES = {"native": "1", "torch": "0"}
"""Of SHAKETABLE_NATIVE."""
FAULTS = (
    "relative_gaussian:0.05", "absolute_gaussian:0.05", "noise:0.05", "mxfp4", "nvfp4", "fp8_e4m3",
    "dead_zone:0.05,scope=token", "saturation:0.5",
    "spike:8,rate=1e-3", "bit_flip:1e-3,bit=3", "stuck_bit:3", "truncation:4", "systematic_bias:0.01",
    "gain:0.01",
)  # fmt: skip


def one_process(rounds: int) -> dict[str, dict[str, float]]:
    """Nanoseconds for each value, and operators, of every fault with whatever this process has; and of a copy."""
    import torch

    from shaketable.faults import Draw
    from shaketable.plan import Plan

    torch.set_num_threads(1)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    faults = {text: Plan.parse(f"{text}@layer.0").clauses[0].fault for text in FAULTS}
    work = {text: (lambda fault=fault: fault.apply(x, Draw(7))) for text, fault in faults.items()} | {"copy": x.clone}
    operators = {name: _operators(call) for name, call in work.items()}
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            start = time.thread_time()
            call()
            found[name].append(time.thread_time() - start)
    each = {name: 1e9 * min(seconds) / x.numel() for name, seconds in found.items()}
    return {name: {"ns": each[name], "operators": operators[name]} for name in work}


def _operators(call: Any) -> int:
    """How many operators are called, views left out: they move no data."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.n += not func.is_view
            return func(*args, **(kwargs or {}))

    with Count() as count:
        call()
    return count.n


def page(facts: dict[str, Any]) -> str:
    """The table."""
    lines = ["# Faults in plain torch, against C++, on a CPU", ""]
    about = f"One thread, bfloat16, {SHAPE[0]} × {SHAPE[1]} values, processor time."
    lines += [f"{about} A copy takes {facts['native']['copy']['ns']:.2f} ns a value.", ""]
    lines += [
        "| fault | with C++, ns a value | plain torch, ns a value | ratio | operators of plain torch |",
        "|---|---|---|---|---|",
    ]
    for name in FAULTS:
        fast, plain = facts["native"][name], facts["torch"][name]
        lines.append(
            f"| `{name}` | {fast['ns']:.1f} | {plain['ns']:.1f} | {plain['ns'] / fast['ns']:.1f} | {plain['operators']} |"
        )
    return "\n".join(
        [*lines, "", "Where the ratio is about 1 there is no C++: such a fault is plain torch on every CPU too.", ""]
    )


def _child(rounds: int, switch: str) -> dict[str, Any]:
    command, env = [sys.executable, __file__, "--child", "--rounds", str(rounds)], {"SHAKETABLE_NATIVE": switch}
    done = subprocess.run(command, env=os.environ | env, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _least(turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: min((turn[name] for turn in turns), key=lambda found: found["ns"]) for name in turns[0]}


def main() -> None:
    """Processes of the two by turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of a process")
    parser.add_argument("--turns", type=int, default=5, help="processes of each of the two")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder for plain_torch.json and plain_torch.md")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(one_process(asked.rounds)))
        return
    turns = [{name: _child(asked.rounds, switch) for name, switch in SWITCHES.items()} for _ in range(asked.turns)]
    facts = {name: _least([turn[name] for turn in turns]) for name in SWITCHES}
    (asked.out / "plain_torch.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (asked.out / "plain_torch.md").write_text(page(facts), encoding="utf-8")
    print(page(facts))


if __name__ == "__main__":
    main()
