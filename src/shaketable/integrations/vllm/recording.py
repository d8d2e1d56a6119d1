"""The recording of a vLLM worker: passes of a few tokens each become operators over a sequence.

The position of each row is counted here, from the request, and never taken from the engine: the positions that it gave its
rotary embedding may be wrong. The ids that its embedding read prove the count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shaketable.mismatch.engine import EngineError
from shaketable.numerics.decoder_operators import OperatorCall


@dataclass(frozen=True)
class WorkerRecording:
    """The recording of one sequence, which may span several passes and more than one request."""

    tokens: list[int]
    rows: list[dict[str, Any]]
    """The calls, with their tensors."""
    starts: dict[int, int]
    """The first token of every pass that counts."""
    routed: dict[tuple[int, int], Tensor]
    """Chosen experts by pass and layer."""

    @classmethod
    def load(cls, folder: Path, tokens: list[int], spans: Sequence[tuple[int, int]]) -> WorkerRecording:
        """Read what the worker wrote; `spans` are the tokens that each request computed."""
        from safetensors.torch import load_file

        written = json.loads((folder / "calls.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "tensors.safetensors")
        rows = [_with_tensors(i, call, tensors) for i, call in enumerate(written["calls"])]
        routed = {(int(a), int(b)): tensors[f"routed/{a}/{b}"] for a, b in (key.split("/") for key in written["routed"])}
        return cls(tokens, rows, _starts(rows, tokens, spans), routed)

    def calls(self, first: int) -> list[OperatorCall]:
        """Every operator on the tokens from `first` on, in the order of the calls."""
        groups: dict[str, list[dict[str, Any]]] = {}
        last = self._last_request()
        for row in self.rows:
            if row["pass"] in last and self.starts[row["pass"]] >= first:
                groups.setdefault(row["name"], []).append(row)
        return [self._joined(name, rows) for name, rows in groups.items()]

    def routing(self) -> dict[int, Tensor] | None:
        """Chosen experts (T, k) by layer; None without experts."""
        layers = sorted({layer for _, layer in self.routed})
        passes = sorted(self._last_request())
        return {layer: torch.cat([self.routed[number, layer] for number in passes]) for layer in layers} or None

    def _last_request(self) -> set[int]:
        """The passes of the last request: an earlier one only filled the cache."""
        numbers = sorted(self.starts)
        begins = [n for i, n in enumerate(numbers) if i == 0 or self.starts[n] <= self.starts[numbers[i - 1]]]
        return {n for n in numbers if n >= begins[-1]}

    def _joined(self, name: str, rows: list[dict[str, Any]]) -> OperatorCall:
        kind, layer = rows[0]["kind"], rows[0]["layer"]
        if kind == "lm_head":
            return self._head(name, rows)
        inputs = {key: torch.cat([row["inputs"][key] for row in rows]) for key in rows[0]["inputs"]}
        output = torch.cat([row["output"] for row in rows])
        if kind == "attention":
            inputs |= {key: self._made(name, key) for key in ("k", "v")}
        if kind in ("attention", "rotary"):
            inputs["positions"] = torch.cat([torch.arange(len(row["output"])) + self.starts[row["pass"]] for row in rows])
        return OperatorCall(name, kind, layer, inputs, output)

    def logits(self, start: int, end: int) -> Tensor:
        """The head's result for some tokens, from the passes of the last request."""
        last = self._last_request()
        _, made = self._head_rows([r for r in self.rows if r["kind"] == "lm_head" and r["pass"] in last])
        return torch.stack([made[i] for i in range(start, end)])

    def _head(self, name: str, rows: list[dict[str, Any]]) -> OperatorCall:
        read, made = self._head_rows(rows)
        x, output = (torch.stack([part[i] for i in sorted(part)]) for part in (read, made))
        return OperatorCall(name, "lm_head", None, {"x": x}, output)

    def _head_rows(self, rows: list[dict[str, Any]]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The head's inputs and results by token.

        In a pass vLLM asks first for the last row, to sample, and then for the front of a prompt.
        """
        read: dict[int, Tensor] = {}
        made: dict[int, Tensor] = {}
        seen: set[int] = set()
        for row in rows:
            number, count = row["pass"], len(row["output"])
            start = self.starts[number] + (0 if number in seen else self._length(number) - count)
            seen.add(number)
            read |= {start + i: row["inputs"]["x"][i] for i in range(count)}
            made |= {start + i: row["output"][i] for i in range(count)}
        return read, made

    def _length(self, number: int) -> int:
        """Tokens of a pass."""
        return next(len(row["output"]) for row in self.rows if row["pass"] == number)

    def _made(self, name: str, key: str) -> Tensor:
        """Keys or values of the whole sequence, as they were made, in any request."""
        pieces = [
            (self.starts[r["pass"]], r["inputs"][key]) for r in self.rows if r["name"] == name and r["pass"] in self.starts
        ]
        whole: Tensor = pieces[0][1].new_zeros(max(start + len(part) for start, part in pieces), *pieces[0][1].shape[1:])
        for start, part in pieces:
            whole[start : start + len(part)] = part
        return whole


def _with_tensors(number: int, call: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    inputs = {key: tensors[f"{number}/{key}"] for key in call["inputs"]}
    return {**call, "inputs": inputs, "output": tensors[f"{number}/output"]}


def _starts(rows: list[dict[str, Any]], tokens: list[int], spans: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The first token of every pass.

    Raises:
        EngineError: The engine read other tokens than it was given.
    """
    found: dict[int, int] = {}
    read = _passes(rows)
    for start, end in spans:
        while start < end:
            number, ids = next(read, (0, None))
            if ids is None or ids.tolist() != tokens[start : start + len(ids)]:
                raise EngineError(f"vLLM read other tokens than it was given, from token {start} on")
            found[number] = start
            start += len(ids)
    return found


def _passes(rows: list[dict[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    return ((row["pass"], row["inputs"]["ids"]) for row in rows if row["kind"] == "embedding")
