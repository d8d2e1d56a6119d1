"""The page of a diagnosis: complete, self-contained, well formed, and safe whatever the values are."""

import copy
import functools
import math

import pytest

from shaketable.locate.locate import locate
from shaketable.models import load_model
from shaketable.report.locate_html import page
from tests.report import html_reader

PLAN = "dead_zone:0.5,scope=token,sparsity=0.1@module.mlp.down_proj,layers=5"


def result(status="pass", score=0.0, op=None, reason=""):
    return {"status": status, "score": score, "op": op, "reason": reason}


@functools.cache
def _located(plan, mode):
    return locate(*load_model("nano"), tokens=64, plan=plan, mode=mode, source="nano").as_dict()


def located(plan=None, mode="all", layers=8, **changes):
    """The diagnosis of nano, its layers repeated or cut to a number."""
    made = copy.deepcopy(_located(plan, mode))
    *inside, outside = made["probes"]
    rows = [copy.deepcopy(inside[n % 8]) | {"layer": n, "name": f"model.layers.{n}"} for n in range(layers)]
    return made | {"num_layers": layers, "probes": [*rows, outside]} | changes


def fault():
    """Layer 5 of nano, three lanes of down_proj; a third example is no number."""
    made = located(PLAN, lanes=[3, 77, 410], lanes_of=576)
    examples = [
        {"token": 5, "channel": 77, "got": 0.0, "low": 0.01231, "high": 0.01232},
        {"token": 9, "channel": 410, "got": 0.0, "low": -0.00412345678, "high": -0.00412345601},
        {"token": 31, "channel": 3, "got": math.nan, "low": 0.00098, "high": 0.00099},
    ]
    made["evidence"][0]["examples"] = examples
    made["suspicions"] = [{"layer": 4, "probe": "causal", "text": "a later token changes an earlier one, 4.2 tolerances"}]
    return made


def broken_numbers():
    made = fault()
    for n, value in enumerate([math.nan, None, math.inf, -math.inf, -2.0, 0.0]):
        made["probes"][n]["statistics"] = dict.fromkeys(made["probes"][n]["statistics"], value)
        made["probes"][n]["results"]["replay"]["score"] = value
    return made


SAMPLES = {
    "fault": fault,
    "healthy": located,
    "device": lambda: located(mode="device", layers=28),
    "outside": lambda: located("gain:0.5@module.lm_head"),
    "numbers": broken_numbers,
}


class Reader(html_reader.Reader):
    def cells(self, status):
        return [a for tag, a in self.tags if tag == "td" and status in (a.get("class") or "").split()]


@pytest.fixture(params=SAMPLES)
def sample(request):
    return SAMPLES[request.param]()


def test_page_is_well_formed_and_loads_nothing(sample):
    text = page(sample)
    tags = Reader(text).tags
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    loads = [value for _, attrs in tags for key, value in attrs.items() if key in ("src", "href", "srcset", "data", "action")]
    assert loads == ["data:,"]
    assert not {"iframe", "object", "embed", "img"} & {tag for tag, _ in tags}
    assert any("default-src 'none'" in attrs.get("content", "") for _, attrs in tags)
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in tags if "aria-labelledby" in a} <= set(ids)
    assert [tag for tag, _ in tags].count("h1") == 1


def test_page_holds_every_section_and_every_cell(sample):
    reader = Reader(page(sample))
    assert sample["sentence"].split(": ", 1)[1].lower() in reader.words.lower()
    assert sample["assumption"] in reader.words
    for heading in ("Evidence", "Every layer", "Suspicions", "SRDD", "cannot see", "Notes", "never decide"):
        assert heading in reader.words
    for words in [*sample["not_covered"], *sample["notes"], *(s["text"] for s in sample["suspicions"])]:
        assert words in reader.words
    for status in ("pass", "fail", "suspect", "inconclusive"):
        want = sum(r["status"] == status for row in sample["probes"] for r in row["results"].values())
        assert len(reader.cells(status)) == want


def test_fault_page_shows_lanes_and_examples():
    words = Reader(page(fault())).words
    assert "Channels 3, 77, 410" in words
    assert "0.01231 below" in words and "not a number" in words
    assert "−0.00412345678" in words and "−0.00412345601" in words
    assert fault()["planted"]["plan"] in words


def test_a_fault_outside_of_the_layers_marks_that_row_only():
    reader = Reader(page(SAMPLES["outside"]()))
    blamed = [attrs for tag, attrs in reader.tags if tag == "tr" and "blamed" in (attrs.get("class") or "")]
    assert len(blamed) == 1
    assert "outside of the layers › lm_head" in reader.words


@pytest.mark.attack("hostile inputs")
def test_hostile_values_stay_text():
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7 * 7 }}"

    def poison(value):
        if isinstance(value, dict):
            return {k: v if k in ("date", "verdict", "status") else poison(v) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(v) for v in value]
        return evil if isinstance(value, str) else value

    made = poison(fault())
    made |= {"versions": {evil: evil}}
    made["probes"][3]["results"][evil] = result("fail", 1.0, evil, evil)
    made["evidence"][0]["examples"] = [{evil: evil}]
    text = page(made)
    reader = Reader(text)
    assert [tag for tag, _ in reader.tags].count("script") == 0
    assert not {"img"} & {tag for tag, _ in reader.tags}
    assert not any(key.startswith("on") for _, attrs in reader.tags for key in attrs)
    assert "{{ 7 * 7 }}" in reader.words


def test_the_page_says_what_was_judged_and_what_was_trusted():
    made = located(layers=2, foreign=["the hook <b>louder</b> of model.layers.1.self_attn"], strict=False)
    made["probes"][-1]["coverage"] = {}
    for row in made["probes"][:2]:
        row["coverage"] = {
            "mlp.down_proj": {"rows": 256, "replayed": 129, "agreed": 127},
            "add": {"rows": 256, "replayed": 256},
        }
    text = page(made)
    assert '<th scope="row" class="mono">mlp.down_proj</th>' in text
    assert all(f'<td class="n">{n}</td>' in text for n in (2, 512, 258, 254))
    assert '<th scope="row" class="mono">add</th>' not in text
    assert "not replayed at every row. The other operators (1) were." in text
    assert "and was trusted" in text and "&lt;b&gt;louder" in text
