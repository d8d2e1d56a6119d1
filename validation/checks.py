"""What is asked of one small model: plans at three levels, locate in three modes, and one planted fault.

A row `fails` when something happens that must not: a count that is not the one found without us, another bit when a plan is
off, FAULT for a healthy model, a planted fault that is called HEALTHY or blamed on somebody else, an error that is not one
line of ours. What locate calls INCONCLUSIVE is no failure: it says what it cannot judge, and the row repeats it.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import shaketable as st
from counting import Counted, counting, from_config
from shaketable.errors import ShaketableError
from zoo import Animal, TooLargeError

PLANS = {
    "module": "relative_gaussian:0.01@module.linear", "layer": "relative_gaussian:0.01@layer.all",
    "op": "relative_gaussian:0.01@op.matmul,direction=forward",
}  # fmt: skip
MODES = ("device", "host", "all")
TOKENS = 24


def check(animal: Animal, dtype: torch.dtype, attention: str) -> dict[str, Any]:
    """One row of the table."""
    start = time.monotonic()
    row: dict[str, Any] = {
        "name": animal.name, "kind": animal.kind, "dtype": str(dtype).removeprefix("torch."), "attention": attention,
        "refused": None, "fails": [], "counts": {}, "locate": {}, "planted": None,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = animal.build(dtype, attention)
            ids = _tokens(model)
            _logits(model, ids)
        except TooLargeError as error:
            row["refused"] = str(error)
        except Exception as error:
            row["refused"] = f"transformers: {_line(error)}"
        else:
            row["parameters"] = sum(p.numel() for p in model.parameters())
            _ask(animal, model, ids, attention, row)
    return row | {"seconds": round(time.monotonic() - start, 2)}


def _ask(animal: Animal, model: nn.Module, ids: Tensor, attention: str, row: dict[str, Any]) -> None:
    clean = _logits(model, ids)
    if not torch.equal(clean, _logits(model, ids)):
        row["refused"] = "two forwards of the clean model differ: nothing can be compared bit for bit"
        return
    with counting(model) as counted:
        _logits(model, ids)
    expected = {"module": counted.modules, "op": counted.products} | from_config(animal.kind, model.config, attention)
    for level, plan in PLANS.items():
        try:
            _inject(model, ids, plan, clean, level, expected[level], row)
        except Exception as error:
            _note(row, f"{level}: {_line(error)}", is_ours=isinstance(error, ShaketableError))
    for mode in MODES:
        try:
            row["locate"][mode] = _healthy(model, ids, mode, row)
        except Exception as error:
            row["locate"][mode] = f"refused: {_line(error)}"
            _note(row, f"locate {mode}: {_line(error)}", is_ours=isinstance(error, ShaketableError))
    try:
        row["planted"] = _plant(model, ids, counted, row)
    except Exception as error:
        _note(row, f"planted: {_line(error)}", is_ours=isinstance(error, ShaketableError))
    if not torch.equal(clean, _logits(model, ids)):
        row["fails"].append("the model is another one after all this")


def _inject(model: nn.Module, ids: Tensor, plan: str, clean: Tensor, level: str, expected: int, row: dict[str, Any]) -> None:
    """On, off inside of the context, and after it."""
    injection = st.inject(model, plan, seed=1)
    with injection as ledger:
        shaken = _logits(model, ids)
        fires = ledger.forward
        injection.disable()
        off = _logits(model, ids)
    row["counts"][level] = [fires, expected]
    if fires != expected:
        row["fails"].append(f"{level}: fired {fires} times instead of {expected}")
    if torch.equal(shaken, clean):
        row["fails"].append(f"{level}: changed nothing")
    if not (torch.equal(off, clean) and torch.equal(_logits(model, ids), clean)):
        row["fails"].append(f"{level}: off is not bit-identical")


def _healthy(model: nn.Module, ids: Tensor, mode: str, row: dict[str, Any]) -> str:
    found = st.locate(model, input_ids=ids, mode=mode)
    if found.verdict == "FAULT":
        row["fails"].append(f"locate {mode}, healthy: {found.sentence}")
    return "HEALTHY" if found.verdict == "HEALTHY" else found.sentence


def _plant(model: nn.Module, ids: Tensor, counted: Counted, row: dict[str, Any]) -> dict[str, Any] | None:
    """A gain of 5 % in one linear of the second layer, hidden from the probes."""
    names = [n for n in counted.called if ".1." in n and not n.endswith("experts") and counted.called.count(n) == 1]
    if not names:
        return None
    name = names[len(names) // 2]
    found = st.locate(model, input_ids=ids, mode="all", plan=f"gain:0.05@module.{name}")
    leaf = name.partition(".1.")[2]
    is_right = found.verdict == "FAULT" and found.layer == 1 and found.op == leaf
    if not is_right and found.verdict != "INCONCLUSIVE":
        row["fails"].append(f"planted in {name}: {found.sentence}")
    return {"leaf": leaf, "found": is_right, "sentence": "" if is_right else found.sentence}


def _note(row: dict[str, Any], text: str, *, is_ours: bool) -> None:
    """An error in one line of ours is a refusal; any other is a failure."""
    if is_ours:
        row.setdefault("notes", []).append(text)
    else:
        row["fails"].append(text)


def _tokens(model: nn.Module) -> Tensor:
    return torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, use_cache=False).logits
    return logits.clone()


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"
