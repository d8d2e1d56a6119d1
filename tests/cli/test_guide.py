"""`shaketable guide` as its users meet it: a diagnosis on disk, a file and a table, or one line and exit 2."""

import json
import re
from pathlib import Path

import pytest
import yaml

from shaketable.cli.guide import guide
from tests import ROOT
from tests.cli.invoked import shaketable


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


def test_several_diagnoses_are_averaged_and_the_file_says_so(run):
    probes = [layer(0), layer(1, gain=1.5), layer(2, instability=0.2), layer(3), layer(4, kurtosis=4000.0), {"layer": None}]
    Path("e.json").write_text(json.dumps(DIAGNOSIS | {"probes": probes}))
    code, out, err = run("d.json", "e.json", "-o", "aqn.yaml")
    assert (code, err) == (0, "")
    made = yaml.safe_load(Path("aqn.yaml").read_text())
    assert made["srdd_metadata"]["diagnoses"] == 2
    assert made["aqn"]["layer_sigmas"][1] == 0.05, "a gain of 0.5 and one of 1.5 are 1.0"
    assert "the mean of 2 diagnoses" in out
    assert run("d.json", "d.json", "-o", "d.json")[0] == 2, "no input is overwritten"


def test_json_says_the_same_with_reasons(run):
    code, out, _ = run("d.json", "-o", "a.yaml", "--json", "a.json")
    assert code == 0 and "wrote a.json" in out
    facts = json.loads(Path("a.json").read_text())
    made = yaml.safe_load(Path("a.yaml").read_text())
    assert {int(k): v for k, v in facts["aqn"]["layer_sigmas"].items()} == made["aqn"]["layer_sigmas"]
    assert facts["srdd_metadata"] | {"fault_layers": {3: "saturation"}} == made["srdd_metadata"]
    assert facts["layers"][2] == {
        "layer": 2,
        "sigma": 0.025,
        "ratio": 0.5,
        "label": "LOW",
        "why": ["instability 0.2 is above 0.1: the hardware is noisy there already (×0.5)"],
    }
    assert facts["medians"] == {"gain": 1.0, "kurtosis": 800.0}


HEALTHY = json.dumps(DIAGNOSIS | {"verdict": "HEALTHY", "layer": None, "fault_class": None})


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("{", (), "the diagnosis d.json is not JSON"),
        ("[" * 100_000, (), "the diagnosis d.json is not JSON"),
        ("\ud800".encode("utf-8", "surrogatepass"), (), "the diagnosis d.json is not JSON"),
        ("[1]", (), "d.json: expected what `shaketable locate --json FILE` writes"),
        (json.dumps(DIAGNOSIS | {"schema": 9}), (), "has schema 9; this version reads schema 1"),
        (json.dumps(DIAGNOSIS | {"probes": [{"layer": i} for i in range(5)]}), (), "was made without statistics"),
        (HEALTHY, ("--target", "fault"), "--target fault needs a located layer"),
        (HEALTHY, ("--target", "healthy"), "--target healthy needs a located layer"),
        (HEALTHY, ("--target", "faulty"), "unknown target 'faulty'"),
        (HEALTHY, ("--schedule", "epochaware"), "unknown schedule 'epochaware'; did you mean 'epoch_aware'"),
        (HEALTHY, ("--base-sigma", "nan"), "base sigma must be a positive number"),
        (HEALTHY, ("-o", "absent/a.yaml"), "cannot write absent/a.yaml: its folder does not exist"),
        (HEALTHY, ("-o", "d.json", "--force"), "cannot write d.json: this command reads or writes it already"),
        (HEALTHY, ("--json", "a.yaml"), "cannot write a.yaml: this command reads or writes it already"),
        (HEALTHY, ("-o", ".", "--force"), "cannot write .: it is not a plain file"),
        (HEALTHY, ("-o", "x" * 300), "File name too long"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(run, content, words, message):
    Path("d.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run("d.json", "-o", "a.yaml", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert [p.name for p in Path().iterdir()] == ["d.json"]


def test_files_that_are_not_there_and_options_that_are_gone(run, tmp_path):
    code, _, err = run("absent.json", "-o", "a.yaml")
    assert code == 2 and "cannot read the diagnosis absent.json: No such file or directory" in err
    gone = shaketable("guide", tmp_path / "d.json", "-o", tmp_path / "a.yaml", "--mapping", "m.yaml")
    assert str(gone.exception).endswith("; --mapping was removed")


def test_the_page_shows_what_the_verb_prints(run):
    page = (ROOT / "docs/guide.md").read_text()
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    Path("diagnosis.json").write_text(json.dumps(DIAGNOSIS | {"model": "tiny"}))
    _, out, _ = run("diagnosis.json", "-o", "aqn.yaml")
    assert out.split() == shown.split()
