"""The findings of a study as the report reads them: every key there, every string safe to show.

Findings are JSON, and JSON has holes: an arm that never ran has no scores, an old record no cost. The report is drawn by
templates that stop at an unknown name, so that a misspelt one is found by the first test; hence the holes are filled once,
here, from the shape that is also the documentation of the format. A number that is not known stays None and is shown as a
dash: it must not look like 0.

Strings come from models and from disks. A character that a reader cannot see but a screen obeys (a control, a change of
writing direction, half of a surrogate pair, which no file can hold) is replaced by its code: ⟨U+202E⟩. Markup is not
touched here; escaping belongs to whoever writes the format.
"""

from __future__ import annotations

import re
from typing import Any

from shaketable.errors import ShaketableError

SCHEMA = "shaketable.study/1"
_ACTS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069\\ufeff\\ud800-\\udfff"
    "\\U000e0000-\\U000e007f]"
)
"""Controls but tab and line break, marks of writing direction, lone surrogates, and tags, which spell text that nobody sees."""

_PLACE = {
    "where": "",
    "fault": "",
    "site": "",
    "asked": None,
    "measured": None,
    "error": None,
    "changed": None,
    "survival": None,
}
_LAYER = {
    "layer": 0,
    "rms": None,
    "kurtosis": None,
    "zeros": None,
    "survival": None,
    "survival_inside": None,
    "grad_norm": None,
}
_SEED = {"seed": 0, "value": None}
_BAND = {"mean": None, "low": None, "high": None}
_SCORE = {"condition": "", "endpoint": "accuracy", "unit": "", "mean": None, "ci_low": None, "ci_high": None, "method": ""}
_ARM: dict[str, Any] = {
    "name": "",
    "description": "",
    "settings": [],
    "kind": "",
    "model": "",
    "task": "",
    "plan": None,
    "plan_in": None,
    "aqn": None,
    "guided": None,
    "seeds": [],
    "scores": [_SCORE | {"n": None, "per_seed": [_SEED], "first": None}],
    "curves": [{"name": "", "band": "", "points": [_BAND | {"step": 0}]}],
    "sigma": [{"label": "", "points": []}],
    "proof": [_PLACE | {"forward": None, "backward": None, "verdict": "", "remark": None}],
    "mechanism": [{"condition": "", "loss": None, "layers": [_LAYER]}],
    "cost": dict.fromkeys(("seconds_per_step", "sampling_share", "injection_share", "aqn_share", "evaluation_seconds")),
    "samples": [{"condition": "", "id": "", "question": "", "answer": "", "text": "", "correct": None}],
}
_COMPARISON: dict[str, Any] = {
    "a": "",
    "b": "",
    "condition": "",
    "endpoint": "",
    "unit": "",
    "scale": 1,
    "difference": None,
    "ci_low": None,
    "ci_high": None,
    "p": None,
    "p_holm": None,
    "detectable": None,
    "seeds": None,
    "problems": None,
    "per_seed": [_SEED],
    "mcnemar": [],
    "p_seeds": None,
    "primary": False,
    "verdict": "nothing",
    "sentence": "",
    "method": "",
}
_RECOVERED: dict[str, Any] = {
    "arm": "",
    "condition": "",
    "share": None,
    "interval": {"low": None, "high": None},
    **dict.fromkeys(("taken", "returned", "before", "after", "clean", "clean_after", "seeds", "problems", "seconds")),
    "sentence": "",
}
_RUN: dict[str, Any] = {
    "name": "",
    "arm": "",
    "seed": None,
    "status": "missing",
    "id": "",
    "sha": "",
    "folder": "",
    "attempts": None,
}
_DIAGNOSIS: dict[str, Any] = {
    "plan": None,
    "model": "",
    "verdict": "INCONCLUSIVE",
    "sentence": "",
    "layer": None,
    "layers": [{"layer": 0, "results": {}, "statistics": {}}],
    "sigmas": [{"layer": 0, "sigma": None, "label": "", "why": []}],
    "folder": "",
}
SHAPE: dict[str, Any] = {
    "schema": SCHEMA,
    "study": {
        "name": "",
        "question": "",
        "origin": "",
        "model": "",
        "task": "",
        "seeds": [],
        "key": "",
        "steps": None,
        "options": "",
        "n": None,
        "conditions": [{"name": "", "plan": None}],
        "primary": None,
        "engine": "",
        "command": "",
        "named_before": False,
        "digest": "",
    },
    "kind": "study",
    "complete": False,
    "runs": [_RUN | {"resumed": None, "seconds": None, "error": None, "warnings": []}],
    "verdict": {"kind": "nothing", "headline": "", "sentence": ""},
    "arms": [_ARM],
    "comparisons": [_COMPARISON],
    "recovered": [_RECOVERED],
    "robustness": [{"arm": "", "points": [_BAND | {"label": "", "x": None, "condition": ""}]}],
    "diagnoses": [_DIAGNOSIS],
    "environments": [{"runs": None, "facts": {}}],
    "notes": [],
}
"""Objects with what stands for a missing value; a list holds the shape of its items, an empty one takes any."""


def complete(findings: dict[str, Any]) -> dict[str, Any]:
    """The findings with no hole and no invisible character; another schema is refused."""
    if findings.get("schema", SCHEMA) != SCHEMA:
        raise ShaketableError(f"a report reads findings of the schema {SCHEMA}, not {findings['schema']!r}")
    found: dict[str, Any] = _fill(_visible(findings), SHAPE)
    return found


def visible(text: str) -> str:
    """The text with every character that acts without being seen replaced by its code; line breaks and tabs stay."""
    return _ACTS.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def _visible(value: Any) -> Any:
    if isinstance(value, dict):
        return {_visible(key): _visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_visible(item) for item in value]
    return visible(value) if isinstance(value, str) else value


def _fill(found: Any, shape: Any) -> Any:
    if isinstance(shape, dict):
        known = found or {}
        return {**known, **{key: _fill(known.get(key), part) for key, part in shape.items()}}
    if isinstance(shape, list):
        return [_fill(item, shape[0]) for item in found or []] if shape else list(found or [])
    return shape if found is None else found
