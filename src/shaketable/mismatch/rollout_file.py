"""Rollouts from a file: one JSON object a line, with token ids and the log-probability that the engine gave each of them.

The names of fields are those that trainers have for them (docs/mismatch.md has the table), and each may be padded, with a mask
beside it. NeMo-RL's `train_data_step*.jsonl` is read as it is: a row holds the whole sequence. vLLM's fields may be those of a
request, or in its `outputs`. `append_batch` writes rows in a job.

TRL's `logprobs` may hold a list for each token, the most likely ones of vLLM, with `logprob_token_ids` beside it: then the
token's own is taken. What TRL writes with `log_completions` and verl into `rollout_data_dir` is text: text does not say which
tokens were drawn, so such a file is refused in a line that says what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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
    found: list[Rollout] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if len(found) == limit:
                    break
                if text.strip():
                    found.append(_rollout(text, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ShaketableError(f"cannot read {path}: {error}") from None
    if not found:
        raise ShaketableError(f"{path} holds no rollouts; {WANTED}")
    return found


def _rollout(text: str, where: str) -> Rollout:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ShaketableError(f"{where} is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise ShaketableError(f"{where} is not a JSON object; {WANTED}")
    if "token_loss_mask" in line:
        line = _from_whole_sequence(line, where)
    if isinstance(outputs := line.get("outputs"), list) and outputs and isinstance(outputs[0], dict):
        line = line | outputs[0]  # a request of vLLM's: its first completion
    prompt, completion, logprobs = (_field(line, names, where) for names in (PROMPT, COMPLETION, LOGPROBS))
    for what, ids in (("prompt", prompt), ("completion", completion)):
        if (bad := next((x for x in ids if not isinstance(x, int) or isinstance(x, bool)), None)) is not None:
            raise ShaketableError(f"{where}: {bad!r} in the {what} is not a token id")
    if len(logprobs) != len(completion):
        raise ShaketableError(f"{where}: {len(logprobs)} log-probabilities for {len(completion)} tokens of the completion")
    candidates = line.get("logprob_token_ids") or [None] * len(completion)
    own = [
        _own_logprob(value, token, ids, f"{where}: token {i}")
        for i, (value, token, ids) in enumerate(zip(logprobs, completion, candidates, strict=False))
    ]
    kept = line.get("completion_mask") if line.get("completion_mask") is not None else line.get("response_mask")
    whole = line.get("attention_mask")
    prompt = _masked(prompt, line.get("prompt_mask") if whole is None else whole[: len(prompt)], "prompt", where)
    completion, own = (_masked(values, kept, "completion", where) for values in (completion, own))
    return Rollout(prompt, completion, own)


def _from_whole_sequence(line: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of NeMo-RL's: tokens, mask and log-probabilities of prompt and completion together, each in a list of one."""
    names = ("token_ids", "token_loss_mask", "generation_logprobs")
    rows = [_field(line, (name,), where) for name in names]
    tokens, mask, logprobs = (row[0] if len(row) == 1 and isinstance(row[0], list) else row for row in rows)
    if not len(tokens) == len(mask) == len(logprobs):
        raise ShaketableError(f"{where}: {', '.join(names)} are not of one length")
    start = next((i for i, m in enumerate(line.get("attention_mask") or []) if m), 0)
    drawn = [i for i, m in enumerate(mask) if m] or [len(mask)]
    first, part = drawn[0], slice(drawn[0], drawn[-1] + 1)
    row = {"prompt": tokens[start:first], "completion": tokens[part], "completion_mask": mask[part]}
    return row | {"logprobs": logprobs[part]}


def _field(line: dict[str, Any], names: Sequence[str], where: str) -> list[Any]:
    found = next((line[name] for name in names if line.get(name) is not None), None)
    if isinstance(found, list):
        return found
    texts = [n for n in ("input", "output", "prompt", "completion") if isinstance(line.get(n), str)]
    what = f"holds text ({', '.join(texts)})" if texts else f"has no list {' or '.join(names)}"
    raise ShaketableError(f"{where} {what}; {WANTED}")


def _own_logprob(value: Any, token: int, candidates: list[int] | None, where: str) -> float:
    """The number of a token; where there are those of candidates, by token or beside their ids, its own."""
    own = value
    if isinstance(value, dict):
        own = value.get(str(token))
        own = own.get("logprob") if isinstance(own, dict) else own
    elif isinstance(value, list):
        own = dict(zip([token] if candidates is None else candidates, value, strict=False)).get(token)
    if own is None and isinstance(value, dict | list):
        raise ShaketableError(f"{where} has candidates, and it is not among them")
    if not isinstance(own, int | float) or isinstance(own, bool):
        raise ShaketableError(f"{where}: {own!r} is not a log-probability")
    return float(own)


def _masked(values: list[Any], mask: Any, what: str, where: str) -> list[Any]:
    if mask is None:
        return values
    if not isinstance(mask, list) or len(mask) != len(values):
        raise ShaketableError(f"{where}: the mask of the {what} is not as long as the {what}")
    inside = [i for i, m in enumerate(mask) if m]
    if inside and inside != list(range(inside[0], inside[-1] + 1)):
        raise ShaketableError(f"{where}: the mask has holes; turns of a tool cannot be compared as one completion")
    return [values[i] for i in inside]


def write_rollouts(rollouts: Sequence[Rollout]) -> str:
    """Rollouts as the lines of a file."""
    return "".join(json.dumps(vars(r)) + "\n" for r in rollouts)


def append_batch(path: Path | str, columns: Mapping[str, Iterable[Any]]) -> None:
    """Add the rows of a training batch to a file for `--rollouts`; columns are tensors by the trainer's names."""
    rows = zip(*([value.tolist() for value in column] for column in columns.values()), strict=True)
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
