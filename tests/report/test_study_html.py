"""The page of a study: the verdict first, complete, self-contained, well formed, and safe whatever the findings hold."""

import functools
import json
import re
import subprocess
import sys

import pytest

from shaketable.report import study_html
from shaketable.report.figures import families
from shaketable.report.study_tables import proof_table
from shaketable.report.wording import METHOD
from shaketable.study.analysis.results import Findings, visible
from tests.report import html_reader
from tests.report.findings_sample import FAULT, SAMPLES, study
from tests.study.published import published

EVIL = "<script>alert(1)</script>\"'></style><img src=x onerror=alert(1)>{{ 7 * 7 }}{% raw %}"


def typed(found):
    return Findings.model_validate(found)


def page(found):
    return study_html.page(typed(found))


class Reader(html_reader.Reader):
    """Keeps the text of each section too."""

    silent = ("style", "script", "title")

    def __init__(self, text):
        self.sections = {}
        super().__init__(text)

    def handle_starttag(self, tag, attrs):
        super().handle_starttag(tag, attrs)
        if tag == "section":
            self.section = self.sections.setdefault(dict(attrs)["id"], [])

    def handle_data(self, data):
        super().handle_data(data)
        if "section" in self.open and self.open[-1] not in self.silent:
            self.section.append(data)

    def of(self, section):
        return " ".join("".join(self.sections[section]).split())


@functools.cache
def made(name):
    return page(SAMPLES[name]())


@functools.cache
def read(name):
    return Reader(made(name))


@pytest.mark.parametrize("name", SAMPLES)
def test_page_is_well_formed_small_and_loads_nothing(name):
    text, tags = made(name), read(name).tags
    assert len(text.encode()) < 2_000_000
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert not any(key in attrs for _, attrs in tags for key in ("src", "srcset", "data", "action", "ping", "background"))
    assert all(attrs["href"] == "data:," for tag, attrs in tags if tag == "link")
    assert not {"iframe", "object", "embed", "img", "base", "form"} & {tag for tag, _ in tags}
    assert any("default-src 'none'" in attrs.get("content", "") for _, attrs in tags)


@pytest.mark.parametrize("name", SAMPLES)
def test_drawings_have_a_text_ids_are_unique_and_links_lead_somewhere(name):
    tags = read(name).tags
    drawn = [a for tag, a in tags if tag == "svg" and a.get("class") != "pin" and a.get("aria-hidden") != "true"]
    assert all(a["role"] == "img" and a["aria-label"] for a in drawn)
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in tags if "aria-labelledby" in a} <= set(ids)
    anchors = [a["href"][1:] for tag, a in tags if tag == "a" and a["href"].startswith("#")]
    assert anchors and set(anchors) <= set(ids)
    assert [tag for tag, _ in tags].count("h1") == 1


@pytest.mark.parametrize("name", SAMPLES)
def test_drawings_hold_only_finite_coordinates_inside_of_their_frame(name):
    words = ("class", "aria-label", "role", "data-name", "preserveaspectratio")
    for tag, attrs in read(name).tags:
        if tag in ("rect", "circle", "polyline", "path", "text", "line", "svg"):
            shape = " ".join(v or "" for k, v in attrs.items() if k not in words)
            assert not re.search(r"nan|inf|None|undefined", shape, re.I), attrs
            for part in ("x", "x1", "x2", "cx"):
                if attrs.get(part, "").endswith("%"):
                    assert -0.01 <= float(attrs[part][:-1]) <= 100.01


@pytest.mark.parametrize(
    ("kind", "words"), [("shown", "✓ shown"), ("not shown", "○ not shown"), ("nothing", "? nothing can be concluded")]
)
def test_the_verdict_comes_before_everything_and_is_not_told_by_colour_alone(kind, words):
    found = study()
    found["verdict"] |= {"kind": kind, "headline": f"{words[2:].capitalize()}: so it is"}
    shown = Reader(page(found)).words
    order = [words, "So it is", found["verdict"]["sentence"], "Primary endpoint, named before the run"]
    assert [shown.index(one) for one in order] == sorted(shown.index(one) for one in order)


def test_a_comparison_that_was_not_named_before_the_run_is_not_called_so():
    late = study()
    late["study"]["named_before"] = False
    words = Reader(page(late)).of("design")
    assert "named before the run:" not in words and "not known to be named before the run" in words


def test_partial_names_what_is_missing_and_complete_says_nothing_of_it():
    words = read("partial").words
    names = [run["name"] for run in study()["runs"][1:4]]
    assert f"PARTIAL. 3 of 26 runs are not done: {names[0]} (failed), {names[1]} (running), {names[2]} (damaged)" in words
    assert words.index("PARTIAL") < words.index("nothing can be concluded")
    assert "PARTIAL" not in read("study").words
    runs = read("partial").of("runs")
    assert "OutOfMemoryError: tried to allocate 2.0 GiB" in runs and "record.jsonl: line 41 is not JSON" in runs


def test_every_section_is_there_and_holds_its_numbers():
    found, reader = study(), read("study")
    assert list(reader.sections) == [
        *("design", "scores", "comparisons", "curves", "steps", "diagnosis"),
        *("proof", "mechanism", "cost", "samples", "runs", "method"),
    ]
    for arm in found["arms"]:
        assert arm["name"] in reader.of("design") and arm["description"] in reader.of("design")
        for score in arm["scores"]:
            assert f"{100 * score['mean']:.1f}" in reader.of("scores")
            strip = "\n".join(f"seed {p['seed']}: {100 * p['value']:.1f}" for p in score["per_seed"])
            assert f"<title>{strip}" in made("study"), "every seed is told"
    for c in found["comparisons"]:
        assert c["sentence"] in reader.of("comparisons")
    assert all(sentence in reader.of("method") for sentence in METHOD)
    assert FAULT in reader.of("design") and found["diagnoses"][0]["sentence"].removeprefix("FAULT: ") in reader.of("diagnosis")
    assert "σ of AQN" in reader.of("curves") and "log scale" in reader.of("curves")
    assert found["arms"][0]["samples"][0]["question"] in reader.of("samples")


def test_a_robustness_curve_has_every_arm_at_every_magnitude():
    found = published("checkpoint-robustness")
    text = page(found)
    assert 'id="robustness"' in text and 'id="robustness"' not in made("study")
    for name, magnitude in (("clean", "0"), ("10 %", "0.1"), ("20 %", "0.2"), ("30 %", "0.3")):
        scores = [next(s for s in arm["scores"] if s["condition"] == name) for arm in found["arms"]]
        ends = [[f"{100 * s[key]:.1f}" for key in ("mean", "ci_low", "ci_high")] for s in scores]
        lines = [f"{arm['name']}: {m} ({a} to {b})" for arm, (m, a, b) in zip(found["arms"], ends, strict=True)]
        assert "<title>" + "\n".join([f"magnitude {magnitude}", *lines]) in text


def test_bare_findings_claim_nothing():
    words = read("bare").words
    assert "No comparison is possible" in words and "no injection was recorded" in words.lower()
    assert "No primary endpoint was named before the run" in words and "The study has not ended" in words


def test_the_primary_comparison_comes_first_and_units_do_not_share_an_axis():
    found = study()
    found["comparisons"].reverse()
    text = page(found)
    assert text.count('class="main-mark">◆ primary') == 1
    assert text.index("◆ primary") < text.index("<b>healthy − dead zone</b>")
    loss = found["comparisons"][0] | {"unit": "", "endpoint": "loss", "scale": 1, "difference": -0.4}
    found["comparisons"] = [loss, found["comparisons"][-1], loss | {"endpoint": "seconds_per_step", "condition": None}]
    assert [name for name, _ in families(typed(found).comparisons)] == ["points", "loss", "seconds_per_step"]
    words = Reader(page(found)).of("comparisons")
    assert "−0.4" in words and "healthy − dead zone seconds per step" in words, "no condition, for it is of the whole run"


def test_much_is_folded_binned_or_cut_and_none_is_lost_unsaid():
    text, reader = made("large"), read("large")
    assert text.count('<div class="what">') == 240
    assert "bins of" in reader.of("curves") and "Not drawn, but in the findings: dead zone 4 %" in reader.of("mechanism")
    assert "Texts are cut after 400 characters" in reader.of("samples") and "3 more in the findings" in reader.of("samples")


def test_proof_shows_asked_measured_and_what_is_wrong_first():
    words = read("partial").of("proof")
    assert "✕ inert" in words and "the site never fired" in words and "▲ differs" in words
    assert "No proof was recorded for: healthy" in words
    assert "1 differ, 1 inert, 1 arm without proof" in read("partial").words
    assert "Proof of injection: 15 of 15 places proven" in read("study").words
    found = study()
    places = found["arms"][2]["proof"]
    places += [
        places[1] | {"site": f"layer.{n}", "asked": 0.0132, "measured": 0.0131 + 0.0001 * n, "where": "x"} for n in range(4)
    ]
    places[0]["verdict"] = "inert"
    rows = [[cell.text for cell in row] for row in proof_table(typed(found)).rows if row[0].text == "global"]
    assert rows[0][1] == "inert" and {row[1] for row in rows[1:]} == {"agrees"}
    merged = next(row for row in rows if row[2] == "x")
    assert (merged[4], merged[5], merged[6]) == ("layer.0–3", "0.0132", "0.0131 … 0.0134")
    assert merged[9] == f"{4 * places[1]['forward']:,}"
    found["arms"][1]["proof"] = [p for p in found["arms"][1]["proof"] if p["where"].startswith("scored")]
    assert "No proof was recorded for: dead zone" in Reader(page(found)).of("proof")


def poison(value, keep=("schema", "kind", "status", "verdict")):
    if isinstance(value, dict):
        return {k: v if k in keep and isinstance(v, str) else poison(v) for k, v in value.items()}
    if isinstance(value, list):
        return [poison(v) for v in value]
    return EVIL if isinstance(value, str) else value


@pytest.mark.attack("hostile inputs")
def test_hostile_values_stay_text():
    found = poison(study())
    found["environments"][0]["facts"] = {EVIL: EVIL}
    found["runs"][0]["folder"], found["runs"][1]["folder"] = "javascript:alert(1)", "../runs/a b"
    found["diagnoses"][0]["layers"][2] |= {"statistics": {EVIL: 1.0}}
    reader = Reader(page(found))
    names = [tag for tag, _ in reader.tags]
    assert names.count("script") == 1 and names.count("style") == 1 and "img" not in names
    assert not any(key.startswith("on") for _, attrs in reader.tags for key in attrs)
    links = [attrs["href"] for tag, attrs in reader.tags if tag == "a"]
    assert "../runs/a%20b" in links and not any("javascript" in address for address in links)
    assert "{{ 7 * 7 }}" in reader.of("samples") and "{{ 7 * 7 }}" in reader.of("proof")


def test_characters_that_act_unseen_are_spelled_out():
    found = study()
    found["arms"][0]["samples"][0]["text"] = "a\u202eb\x00c\x1b[31m\ud800\u2066\nline two"
    text = page(found)
    assert "a⟨U+202E⟩b⟨U+0000⟩c⟨U+001B⟩[31m⟨U+D800⟩⟨U+2066⟩\nline two" in text
    text.encode("utf-8")
    assert visible("tab\tand 日本語 ✓") == "tab\tand 日本語 ✓"


def test_page_reads_what_json_gives_back_and_needs_no_torch(tmp_path):
    path = tmp_path / "findings.json"
    path.write_text(json.dumps(study()))
    program = (
        "import json, sys; from shaketable.report.study_html import page; from shaketable.report.study_markdown import markdown\n"
        "from shaketable.study.analysis.results import Findings\n"
        f"found = Findings.model_validate(json.load(open({str(path)!r}))); page(found); markdown(found)\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
