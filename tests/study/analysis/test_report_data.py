"""The shape that fills the holes of findings: what is not known is not a number, and what is known stays."""

import copy

import pytest

from shaketable.errors import ShaketableError
from shaketable.study.analysis.report_data import SCHEMA, SHAPE, complete, visible

COUNTED = ("layer", "seed", "step", "scale")
"""Places and units, which are never missing where their row is there."""


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, member in value.items():
            yield from leaves(member, (*path, key))
    elif isinstance(value, list):
        for member in value:
            yield from leaves(member, (*path, "0"))
    else:
        yield path, value


def test_no_hole_is_filled_with_a_number():
    numbers = {(p[-1], v) for p, v in leaves(SHAPE) if isinstance(v, int | float) and not isinstance(v, bool)}
    assert numbers == {("layer", 0), ("seed", 0), ("step", 0), ("scale", 1)} and {name for name, _ in numbers} == set(COUNTED)
    assert {p[-1]: v for p, v in leaves(SHAPE) if isinstance(v, bool)} == {
        "named_before": False, "complete": False, "unverified": False, "primary": False, "verified": True,
    }  # fmt: skip
    words = {v for _, v in leaves(SHAPE) if isinstance(v, str) and v}
    assert words == {SCHEMA, "study", "nothing", "missing", "accuracy", "INCONCLUSIVE"}


def whole(shape, number=1):
    """Findings in which everything is there, each value another one."""
    if isinstance(shape, dict):
        return {key: whole(member, number * 31 + i) for i, (key, member) in enumerate(shape.items())}
    return [whole(shape[0], number * 37)] if isinstance(shape, list) and shape else [number] if shape == [] else number


def test_what_is_known_stays_and_whatever_is_missing_has_its_place():
    full = whole(SHAPE) | {"schema": SCHEMA}
    assert complete(copy.deepcopy(full)) == full
    for path, default in leaves(SHAPE):
        holed = copy.deepcopy(full)
        home = holed
        for key in path[:-1]:
            home = home[int(key) if key == "0" else key]
        if path[-1] in ("0", "schema"):
            continue
        del home[path[-1]]
        filled = complete(holed)
        for key in path:
            filled = filled[int(key) if key == "0" else key]
        assert filled == default, path
    assert complete({})["arms"] == [] and complete({})["study"]["primary"] is None


def test_another_schema_is_refused_and_named():
    with pytest.raises(ShaketableError, match=r"findings of the schema shaketable\.study/1, not 'other/2'$"):
        complete({"schema": "other/2"})


ACTS = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F)]
ACTS += [*range(0x2066, 0x206A), 0xFEFF, *range(0xD800, 0xE000), *range(0xE0000, 0xE0080)]


def test_every_character_that_acts_unseen_is_shown_and_no_other():
    changed = [code for code in range(0x110000) if visible(chr(code)) != chr(code)]
    assert changed == sorted(ACTS)
    assert visible("a\u202eb") == "a⟨U+202E⟩b" and complete({"notes": ["\x07"]})["notes"] == ["⟨U+0007⟩"]
    assert complete({"study": {"name": ("\x07",)}})["study"]["name"] == ["⟨U+0007⟩"]
