"""`shaketable guide` as its users meet it: a diagnosis on disk, a file and a table, or one line and exit 2."""

import json
import re
from pathlib import Path

import pytest
import yaml

from shaketable.cli.guide import guide
from tests import ROOT


def layer(index, gain=1.0, kurtosis=800.0, instability=0.0):
    return {"layer": index, "statistics": {"gain": gain, "kurtosis": kurtosis, "instability": instability}}


DIAGNOSIS = {
    "schema": 1,
    "kind": "diagnosis",
    "model": "tiny[red]",
    "num_layers": 5,
    "device": "cpu",
    "date": "2026-11-15T06:00:00+00:00",
    "verdict": "FAULT",
    "layer": 3,
    "fault_class": "saturation",
    "probes": [layer(0), layer(1, gain=0.5), layer(2, instability=0.2), layer(3), layer(4, kurtosis=4000.0), {"layer": None}],
}


@pytest.fixture
def run(command_of):
    """The verb in a folder with a diagnosis."""
    go = command_of(guide)
    Path("d.json").write_text(json.dumps(DIAGNOSIS))
    return go


def test_a_diagnosis_becomes_an_aqn_file_and_a_table(run):
    code, out, err = run("d.json", "-o", "aqn.yaml")
    assert (code, err) == (0, "")
    aqn = yaml.safe_load(Path("aqn.yaml").read_text())["aqn"]
    assert aqn["layer_sigmas"] == {0: 0.05, 1: 0.05 * 1.5, 2: 0.025, 3: 0.05 * 1.5, 4: 0.05 * 1.5}
    assert aqn["high_priority_layers"] == [1, 3, 4]
    assert out.splitlines()[0] == "tiny[red] on cpu, 5 layers, 2026-11-15T06:00:00+00:00: FAULT at layer 3 (saturation)"


HEALTHY = json.dumps(DIAGNOSIS | {"verdict": "HEALTHY", "layer": None, "fault_class": None})


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("{", (), "the diagnosis d.json is not JSON"),
        (json.dumps(DIAGNOSIS | {"schema": 9}), (), "has schema 9; this version reads schema 1"),
        (HEALTHY, ("--target", "fault"), "--target fault needs a located layer"),
        (HEALTHY, ("-o", "absent/a.yaml"), "cannot write absent/a.yaml: its folder does not exist"),
        (HEALTHY, ("--json", "d.json"), "cannot write d.json: this command reads or writes it already"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(run, content, words, message):
    Path("d.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run("d.json", "-o", "a.yaml", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert [p.name for p in Path().iterdir()] == ["d.json"]


def test_the_page_shows_what_the_verb_prints(run):
    page = (ROOT / "docs/guide.md").read_text()
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    Path("diagnosis.json").write_text(json.dumps(DIAGNOSIS | {"model": "tiny"}))
    _, out, _ = run("diagnosis.json", "-o", "aqn.yaml")
    assert out.split() == shown.split()
