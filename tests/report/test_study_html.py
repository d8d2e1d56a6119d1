"""The page of a study: the verdict first, complete, self-contained, well formed, and safe whatever the findings hold."""

import functools
import json
import math
import re
import subprocess
import sys

import pytest

from shaketable.report import study_html, study_markdown
from shaketable.report.figures import Line, curves
from shaketable.report.strips import axis_of, families, forest_row, proof_rows, scale_of, seed_strip
from shaketable.report.study_tables import link
from shaketable.report.wording import METHOD, amount, chance, duration, percent, signed
from shaketable.study.analysis.results import CurvePoint, Findings, visible
from tests.report import html_reader
from tests.report.findings_sample import NOISE, SAMPLES, one_run, partial, study

EVIL = "<script>alert(1)</script>\"'></style><img src=x onerror=alert(1)>{{ 7 * 7 }}{% raw %}"


def typed(found):
    return Findings.model_validate(found)


def page(found):
    return study_html.page(typed(found))


def markdown(found):
    return study_markdown.markdown(typed(found))


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
    for tag, attrs in read(name).tags:
        if tag in ("rect", "circle", "polyline", "path", "text", "line", "svg"):
            shape = " ".join(
                v or ""
                for k, v in attrs.items()
                if k not in ("class", "aria-label", "role", "data-name", "preserveaspectratio")
            )
            assert not re.search(r"nan|inf|None|undefined", shape, re.I), attrs
            for part in ("x", "x1", "x2", "cx"):
                if attrs.get(part, "").endswith("%"):
                    assert -0.01 <= float(attrs[part][:-1]) <= 100.01


def test_the_verdict_comes_before_everything_and_is_not_told_by_colour_alone():
    for kind, mark, words in (
        ("shown", "✓", "shown"),
        ("not shown", "○", "not shown"),
        ("nothing", "?", "nothing can be concluded"),
    ):
        found = study()
        found["verdict"] |= {"kind": kind}
        reader = Reader(page(found))
        start = reader.words.index(f"{mark} {words}")
        assert (
            start
            < reader.words.index("Targeted AQN did not beat global AQN")
            < reader.words.index(found["verdict"]["sentence"])
        )
        assert reader.words.index(found["verdict"]["sentence"]) < reader.words.index("Primary endpoint, named before the run")


def test_partial_names_what_is_missing_and_complete_says_nothing_of_it():
    words = read("partial").words
    assert "PARTIAL. 3 of 10 runs are not done: clean-1 (failed), fault-only-1 (running), global-AQN-1 (damaged)" in words
    assert words.index("PARTIAL") < words.index("nothing can be concluded")
    assert "PARTIAL" not in read("study").words
    runs = read("partial").of("runs")
    assert "OutOfMemoryError: tried to allocate 2.0 GiB" in runs and "record.jsonl: line 41 is not JSON" in runs


def test_every_section_is_there_and_holds_its_numbers():
    found, reader = study(), read("study")
    assert list(reader.sections) == [
        *("design", "scores", "comparisons", "curves", "robustness", "diagnosis", "schedules"),
        *("proof", "mechanism", "cost", "samples", "runs", "method"),
    ]
    for arm in found["arms"]:
        assert arm["name"] in reader.of("design") and arm["description"] in reader.of("design")
        for score in arm["scores"]:
            assert f"{100 * score['mean']:.1f}" in reader.of("scores")
    for c in found["comparisons"]:
        assert " ".join(c["sentence"].split()) in reader.of("comparisons")
    for sentence in METHOD:
        assert sentence in reader.of("method")
    assert NOISE in reader.of("design") and found["notes"][0] in reader.of("method")
    assert "HIGH: replay failed; gain fell to 0.71" in reader.of("diagnosis")
    assert "316+287=" in reader.of("samples")


def test_a_single_run_has_no_comparisons_and_claims_nothing():
    reader = read("run")
    assert not {"comparisons", "robustness", "diagnosis"} & set(reader.sections)
    assert "one run, no comparison" in reader.words and "Shaketable run" in reader.words
    assert "74.1 points, faulty" in reader.words


def test_bare_findings_say_what_is_not_there():
    words = read("bare").words
    assert "No comparison is possible" in words and "no injection was recorded" in words.lower()
    assert "No primary endpoint was named before the run" in words and "The study has not ended" in words


def test_every_seed_is_a_dot_and_the_strip_tells_it():
    found = typed(study())
    scores = [s for arm in found.arms for s in arm.scores]
    x = scale_of(scores)
    for score in scores:
        strip = str(seed_strip(score, 0, x))
        assert strip.count("<circle") == len(score.per_seed) == 5
        assert all(f"seed {p.seed}: {100 * p.value:.1f}" in strip for p in score.per_seed)
        ends = [float(v) for v in re.findall(r'class="ci" x1="([\d.]+)%" x2="([\d.]+)%"', strip)[0]]
        assert ends == pytest.approx([x(score.ci_low), x(score.ci_high)], abs=0.06)


def test_forest_row_places_estimate_interval_zone_and_seeds():
    c = next(c for c in typed(study()).comparisons if c.primary)
    x = axis_of([c])
    svg = str(forest_row(c, x))
    zone = [float(v) for v in re.findall(r'class="zone" x="([\d.]+)%" width="([\d.]+)%"', svg)[0]]
    assert zone == pytest.approx([x(-3.0), x(3.0) - x(-3.0)], abs=0.02)
    assert [float(v) for v in re.findall(r'class="cap" x="([\d.]+)%"', svg)] == pytest.approx([x(-0.45), x(4.05)], abs=0.02)
    assert float(re.findall(r'class="pin" x="([\d.]+)%"', svg)[0]) == pytest.approx(x(1.8), abs=0.02)
    assert svg.count("<circle") == 5 and "smallest detectable: 3.0 points" in svg
    assert x.low < -3.0 and x.high > 4.05


def test_primary_comparison_comes_first_and_is_marked():
    found = study()
    found["comparisons"].reverse()
    text = page(found)
    assert text.index("◆ primary") < text.index("<b>targeted AQN − healthy AQN</b>")
    assert text.count('class="main-mark">◆ primary') == 1
    assert 'd="M0-7L6 0L0 7L-6 0Z"' in text


def test_units_do_not_share_an_axis():
    found = study()["comparisons"]
    points = next(c for c in found if c["primary"])
    loss = found[0] | {"primary": False, "unit": "", "endpoint": "loss", "scale": 1, "difference": -0.4}
    both = study() | {"comparisons": [loss, points, loss | {"endpoint": "length"}]}
    assert [name for name, _ in families(typed(both).comparisons)] == ["points", "loss", "length"]
    assert "−0.4 " in page(both)


def test_more_than_fourteen_comparisons_are_folded_and_none_is_lost():
    text = made("large")
    assert "226 more comparisons" in text
    assert text.count('<div class="what">') == 240


def test_proof_shows_asked_measured_and_what_is_wrong_first():
    words = read("partial").of("proof")
    assert "✕ inert" in words and "the site never fired" in words and "▲ differs" in words
    assert "No proof was recorded for: healthy AQN" in words
    rows = proof_rows(typed(partial()).arms[2].proof)
    assert [row.verdict for row in rows] == ["inert", "agrees", "agrees"]
    aqn = next(row for row in rows if row.where == "training: AQN")
    assert (aqn.site, aqn.asked, aqn.measured) == ("layer.0–3", "0.0132", "0.0131 … 0.0134")
    assert aqn.forward == 4 * 123456


def test_the_banner_says_whether_the_proof_holds():
    assert "Proof of injection: 21 of 21 places proven" in read("study").words
    assert "1 differ, 1 inert, 1 arm without proof" in read("partial").words
    found = study()
    found["arms"][1]["proof"] = [p for p in found["arms"][1]["proof"] if p["where"].startswith("scored")]
    assert "No proof was recorded for: fault only" in Reader(page(found)).of("proof")


def test_a_measured_magnitude_as_asked_lies_on_the_middle_line():
    place = typed(study()).arms[1].proof[0]

    def drawn(measured):
        [row] = proof_rows([place.model_copy(update={"measured": measured})])
        return row.svg

    assert [re.findall(r'cx="([\d.]+)%"', drawn(m)) for m in (0.05, 0.1, 5.0)] == [["50.0"], ["98.0"], ["98.0"]]
    assert drawn(None) == ""


def test_missing_values_break_a_curve_and_log_scales_are_named():
    points = [CurvePoint(step=n, mean=v) for n, v in enumerate([1.0, 2.0, None, math.nan, 3.0])]
    assert curves("reward", [Line(0, "a", points)]).svg.count("<polyline") == 2
    steep = [CurvePoint(step=n, mean=10.0**-n) for n in range(4)]
    drawing = curves("KL", [Line(0, "a", steep)])
    heights = [float(y) for y in re.findall(r"translate\([\d.]+ ([\d.]+)\)", drawing.svg)]
    assert drawing.log and heights[1] - heights[0] == pytest.approx(heights[3] - heights[2], abs=0.11)
    assert "log scale" in read("study").of("curves")


def test_long_runs_are_binned_without_losing_their_extremes():
    points = [CurvePoint(step=n, mean=100.0 if n == 777 else 1.0 + n % 2) for n in range(1000)]
    drawing = curves("reward", [Line(0, "a", points)])
    assert drawing.per_bin == 9 and drawing.svg.count('class="hit"') == 112
    assert "to 100)" in drawing.svg


@pytest.mark.parametrize(
    ("folder", "address"),
    [
        ("runs/a b-0", "runs/a%20b-0"),
        ("../runs/x", "../runs/x"),
        ("javascript:alert(1)", ""),
        ("//evil.example/x", ""),
        ("/etc/passwd", ""),
        ("\\\\host\\x", ""),
        ('runs/"><script>', "runs/%22%3E%3Cscript%3E"),
        ("", ""),
    ],
)
def test_links_stay_beside_the_page(folder, address):
    assert link(folder) == address


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
    found["diagnoses"][0]["layers"][2]["results"] = {EVIL: EVIL}
    found["diagnoses"][0]["layers"][2]["statistics"] = {EVIL: 1.0}
    reader = Reader(page(found))
    names = [tag for tag, _ in reader.tags]
    assert names.count("script") == 1 and names.count("style") == 1 and "img" not in names
    assert not any(key.startswith("on") for _, attrs in reader.tags for key in attrs)
    assert "{{ 7 * 7 }}" in reader.of("samples") and "{{ 7 * 7 }}" in reader.of("proof")


def test_characters_that_act_unseen_are_spelled_out():
    found = study()
    found["arms"][0]["samples"][0]["text"] = "a\u202eb\x00c\x1b[31m\ud800\u2066\nline two"
    text = page(found)
    assert "a⟨U+202E⟩b⟨U+0000⟩c⟨U+001B⟩[31m⟨U+D800⟩⟨U+2066⟩\nline two" in text
    text.encode("utf-8")
    assert visible("tab\tand 日本語 ✓") == "tab\tand 日本語 ✓"


def test_long_and_many_samples_are_cut_and_it_says_so():
    words = read("large").of("samples")
    assert "Texts are cut after 375 characters" in words and "2 more in the findings" in words


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (signed(0.018, 100), "+1.8"),
        (signed(-0.0004, 100), "0.0"),
        (signed(-0.43, 1, ""), "−0.43"),
        (signed(None), "–"),
        (amount(0.8312, "points"), "83.1"),
        (amount(3.2, "s"), "3.2"),
        (chance(0.0004), "< 0.001"),
        (chance(0.089), "0.089"),
        (chance(1.0), "1"),
        (chance(None), "–"),
        (percent(0.6214), "62 %"),
        (percent(0.013), "1.3 %"),
        (duration(92.4), "1 min 32 s"),
        (duration(3.21), "3.2 s"),
        (duration(7384), "2 h 3 min"),
        (duration(None), "–"),
    ],
)
def test_numbers_read_well(got, text):
    assert got == text


def test_page_reads_what_json_gives_back_and_needs_no_torch(tmp_path):
    path = tmp_path / "findings.json"
    path.write_text(json.dumps(one_run()))
    program = (
        "import json, sys; from shaketable.report.study_html import page; from shaketable.report.study_markdown import markdown\n"
        "from shaketable.study.analysis.results import Findings\n"
        f"found = Findings.model_validate(json.load(open({str(path)!r}))); page(found); markdown(found)\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_named_before_the_run_is_claimed_only_when_nothing_speaks_against_it():
    assert "Primary endpoint, named before the run: targeted AQN − global AQN" in read("study").of("design")
    late = study()
    late["study"]["named_before"] = False
    words = Reader(page(late)).of("design")
    assert "named before the run:" not in words and "not known to be named before the run" in words


def test_an_endpoint_of_the_whole_run_has_no_condition():
    found = study()
    found["comparisons"][0] |= {"condition": None, "endpoint": "seconds_per_step", "unit": "s", "scale": 1}
    words = Reader(page(found)).of("comparisons")
    assert "targeted AQN − global AQN seconds per step" in words and ", seconds per step" not in words


def test_arms_that_lack_a_condition_keep_their_columns():
    found = study()
    del found["robustness"][1]["points"][0]
    table = page(found).split('id="robustness"')[1].split("<tbody>")[1]
    assert re.findall(r'<td class="n" data-v="([^"]*)">([^<]+)</td>', table.split("</tr>")[1])[0] == ("", "–")
