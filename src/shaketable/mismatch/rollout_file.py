"""Rollouts from a file: one JSON object a line, with token ids and the log-probability that the engine gave each of them.

The names of fields are those that trainers have for them, and each may be padded, with a mask beside it:

    ours    prompt          completion        logprobs
    TRL     prompt_ids      completion_ids    logprobs, or sampling_per_token_logps     prompt_mask, completion_mask
    verl    prompts         responses         rollout_log_probs                         attention_mask, response_mask
    vLLM    prompt_token_ids token_ids        logprobs, as a list or by token           of a request, or in its `outputs`
    NeMo-RL token_ids, of both                generation_logprobs                       token_loss_mask

NeMo-RL's `train_data_step*.jsonl` is read as it is: a row holds the whole sequence. `append_batch` writes rows in a job.

TRL's `logprobs` may hold a list for each token, the most likely ones of vLLM, with `logprob_token_ids` beside it: then the
token's own is taken. What TRL writes with `log_completions` and verl into `rollout_data_dir` is text: text does not say which
tokens were drawn, so such a file is refused in a line that says what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.mismatch.engine import Rollout

PROMPT = ("prompt_ids", "prompts", "prompt_token_ids", "prompt")
COMPLETION = ("completion_ids", "responses", "token_ids", "completion")
LOGPROBS = ("sampling_per_token_logps", "rollout_log_probs", "logprobs")
WANTED = "write prompt_ids, completion_ids and logprobs, a list of each on every line"


def read_rollouts(path: Path, limit: int | None = None) -> list[Rollout]:
    """The rollouts of a file, the first `limit` of them."""
    if path.suffix == ".parquet":
        raise ShaketableError(f"{path} is a table of texts, without token ids and log-probabilities; {WANTED}, as .jsonl")
    found = []
    for number, line in _lines(path):
        found.append(_rollout(line, f"{path}, line {number}"))
        if limit is not None and len(found) == limit:
            break
    if not found:
        raise ShaketableError(f"{path} holds no rollouts; {WANTED}")
    return found


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ShaketableError(f"cannot read {path}: {error}") from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ShaketableError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ShaketableError(f"{where} is no JSON object; {WANTED}")
    return found


def _rollout(line: dict[str, Any], where: str) -> Rollout:
    if "token_loss_mask" in line:
        line = _from_whole_sequence(line, where)
    if isinstance(outputs := line.get("outputs"), list) and outputs and isinstance(outputs[0], dict):
        line = line | outputs[0]  # a request of vLLM's: its first completion
    prompt, completion, logprobs = (_field(line, names, where) for names in (PROMPT, COMPLETION, LOGPROBS))
    prompt, completion = _ids(prompt, where, "prompt"), _ids(completion, where, "completion")
    told = _own_logprobs(logprobs, line.get("logprob_token_ids"), completion, where)
    if len(told) != len(completion):
        raise ShaketableError(f"{where}: {len(told)} log-probabilities for {len(completion)} tokens of the completion")
    kept = _mask(line, "completion_mask", "response_mask", len(completion), where)
    whole = line.get("attention_mask")
    start = line.get("prompt_mask") if whole is None else whole[: len(prompt)]
    prompt = _masked(prompt, start, where)
    finish = "stop" if line.get("finish") == "stop" else "length"
    return Rollout(prompt, _masked(completion, kept, where), _masked(told, kept, where), finish)  # type: ignore[arg-type]


def _from_whole_sequence(line: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of NeMo-RL's: tokens, mask and log-probabilities of prompt and completion together, each in a list of one."""
    names = ("token_ids", "token_loss_mask", "generation_logprobs")
    rows = {name: _field(line, (name,), where) for name in names}
    rows = {name: row[0] if len(row) == 1 and isinstance(row[0], list) else row for name, row in rows.items()}
    tokens, mask, logprobs = (rows[name] for name in names)
    if not len(tokens) == len(mask) == len(logprobs):
        raise ShaketableError(f"{where}: {', '.join(names)} are not of one length")
    start = next((i for i, m in enumerate(line.get("attention_mask") or []) if m), 0)
    drawn = [i for i, m in enumerate(mask) if m] or [len(mask)]
    first, part = drawn[0], slice(drawn[0], drawn[-1] + 1)
    row = {"prompt": tokens[start:first], "completion": tokens[part], "completion_mask": mask[part]}
    return row | {"logprobs": logprobs[part]}


def _field(line: dict[str, Any], names: Sequence[str], where: str) -> Any:
    name = next((n for n in names if line.get(n) is not None), None)
    if name is None or isinstance(line[name], str) or not isinstance(line[name], list):
        texts = [n for n in ("input", "output", "prompt", "completion") if isinstance(line.get(n), str)]
        what = f"holds text ({', '.join(texts)})" if texts else f"has no list {' or '.join(names)}"
        raise ShaketableError(f"{where} {what}; {WANTED}")
    return line[name]


def _ids(values: list[Any], where: str, what: str) -> list[int]:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ShaketableError(f"{where}: {value!r} in the {what} is no token id")
    return list(values)


def _own_logprobs(values: list[Any], tokens: Any, completion: list[int], where: str) -> list[float]:
    """One number for each token; of a list of candidates, that of the token itself."""
    found = []
    for i, value in enumerate(values):
        own = value
        if isinstance(value, dict):
            own = value.get(str(completion[i])) if i < len(completion) else None
            own = own.get("logprob") if isinstance(own, dict) else own
            if own is None:
                raise ShaketableError(f"{where}: token {i} has candidates, and it is not among them")
        elif isinstance(value, list):
            names = (
                tokens[i] if isinstance(tokens, list) and i < len(tokens) else [completion[i]] if i < len(completion) else []
            )
            place = names.index(completion[i]) if i < len(completion) and completion[i] in names else None
            if place is None or place >= len(value):
                raise ShaketableError(f"{where}: token {i} has candidates, and it is not among them")
            own = value[place]
        if not isinstance(own, int | float) or isinstance(own, bool):
            raise ShaketableError(f"{where}: {own!r} is no log-probability")
        found.append(float(own))
    return found


def _mask(line: dict[str, Any], one: str, two: str, length: int, where: str) -> Any:
    found = line.get(one) if line.get(one) is not None else line.get(two)
    if found is not None and (not isinstance(found, list) or len(found) != length):
        raise ShaketableError(f"{where}: the mask of the completion is not as long as the completion")
    return found


def _masked(values: list[Any], mask: Any, where: str) -> list[Any]:
    if mask is None:
        return values
    if not isinstance(mask, list) or len(mask) != len(values):
        raise ShaketableError(f"{where}: the mask of the prompt is not as long as the prompt")
    kept = [bool(m) for m in mask]
    inside = [i for i, m in enumerate(kept) if m]
    if inside and not all(kept[inside[0] : inside[-1] + 1]):
        raise ShaketableError(f"{where}: the mask has holes; turns of a tool cannot be compared as one completion")
    return [v for v, m in zip(values, kept, strict=True) if m]


def write_rollouts(rollouts: Sequence[Rollout]) -> str:
    """Rollouts as the lines of a file."""
    return "".join(json.dumps(vars(r)) + "\n" for r in rollouts)


def append_batch(path: Path | str, columns: Mapping[str, Iterable[Any]]) -> None:
    """Add the rows of a training batch to a file for `--rollouts`; columns are tensors by the trainer's names."""
    rows = zip(*([value.tolist() for value in column] for column in columns.values()), strict=True)
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
