"""`shaketable sweep` as its users meet it: files and a table, one line and exit 2, and a kill in the middle."""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from shaketable.cli.sweep import sweep
from shaketable.records.record import FILE
from tests import ROOT
from tests.cli.command_server import shaketable

NOISE = ("nano", "--task", "arithmetic,level=2", "--plan", "relative_gaussian@op.matmul")
SMALL = (*NOISE, "--magnitudes", "0,0.1,0.5", "--limit", "12", "--seeds", "2", "--out", "run")


@pytest.fixture
def run(command_of):
    return command_of(sweep)


def numbers(file):
    points = json.loads(Path(file).read_text())["points"]
    return [{k: v for k, v in p.items() if k not in ("seconds", "tokens_per_second")} for p in points]


def test_a_sweep_writes_points_a_curve_a_table_and_a_record(run):
    code, out, err = run(*SMALL, "--json", "a.json", "--png", "a.png")
    assert code == 0, err
    assert "recording in run" in err and "error" not in err
    points = json.loads(Path("a.json").read_text())["points"]
    assert [p["magnitude"] for p in points] == [0.0, 0.1, 0.5]
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    cells = [re.split(r"  +", line.strip()) for line in out.splitlines() if line.startswith("nano")]
    assert [row[1] for row in cells] == ["clean", "0.1", "0.5"]
    for row, point in zip(cells, points, strict=True):
        assert row[2].startswith(f"{100 * point['accuracy']:.1f} % ({100 * point['ci_low']:.1f} to ")
    assert cells[2][8] == f"{points[2]['injections']:,}" and float(cells[2][7]) == pytest.approx(0.5, rel=0.05)
    assert all(f"{m}: {p['sentence']}\n" in out for m, p in zip(("0.1", "0.5"), points[1:], strict=True))
    assert "\x1b" not in out and max(map(len, out.splitlines()[:5])) < 160
    assert json.loads(Path("run", FILE).read_text().partition("\n")[0])["config"]["n"] == 12


KILL_AT_THE_THIRD_POINT = """
import os, signal
from shaketable.records.record import RunRecord
append, points = RunRecord.append, []
def patched(self, event, **facts):
    append(self, event, **facts)
    points.extend([event] * (event == "point"))
    if len(points) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
RunRecord.append = patched
"""


@pytest.mark.slow
def test_kill_9_in_the_middle(tmp_path):
    words = ["sweep", *SMALL[:-6], "--limit", "60", "--seeds", "4"]
    whole = shaketable(tmp_path, *words, "--out", "whole", "--json", "whole.json")
    assert whole.code == 0, whole.stderr
    assert shaketable(tmp_path, *words, "--out", "run", first=KILL_AT_THE_THIRD_POINT).code == -signal.SIGKILL
    record = tmp_path / "run" / FILE
    kept = record.read_bytes()
    assert kept.count(b'"event": "point"') == 3
    done = shaketable(tmp_path, "sweep", "--resume", "run", "--json", "run.json")
    assert done.code == 0, done.stderr
    assert numbers(tmp_path / "run.json") == numbers(tmp_path / "whole.json")
    assert record.read_bytes().startswith(kept)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a sweep needs MODEL and --task and --plan (or --resume DIR)"),
        (NOISE, "leaves a magnitude open"),
        (("nano", "--task", "arithmetic", "--plan", "gain:1@layer.0", "--magnitudes", "1"), "drop them"),
        (("--resume", "absent"), "there is no run to resume in absent"),
        (("nano", "--resume", "absent", "--batch-size", "2", "--out", "x"), "drop MODEL, --batch-size, --out"),
    ],
)
def test_a_usage_error_is_one_line_and_leaves_nothing(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not list(Path().iterdir())


def test_an_inert_plan_is_one_line_and_no_curve(run):
    code, out, err = run(*NOISE, "--magnitudes", "1e-12", "--limit", "4", "--json", "a.json", "--png", "a.png")
    assert (code, out) == (2, "")
    assert "nano at 1e-12" in err and "changed no value" in err and not list(Path().glob("a.*"))


def test_the_page_runs(run, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/sweep.md").read_text()
    first, _, second = (shlex.split(block) for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    code, _, err = run(*first[2:])
    assert code == 0, err
    Path(second[3]).parent.mkdir(exist_ok=True)
    next(Path("runs").iterdir()).rename(second[3])
    assert run(*second[2:], "--force")[0] == 0
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    assert "points (95 % CI" in capsys.readouterr().out


def test_formats_stand_side_by_side_in_one_table_and_one_figure(run, tmp_path):
    plans = ["mxfp4@module.linear", "gain:0.5@op.silu"]
    words = [w for plan in plans for w in ("--plan", plan)]
    code, out, err = run(
        "nano", "--task", "text", *words, "--json", "a.json", "--png", "a.png", "--html", "a.html", "--out", "run"
    )
    assert code == 0, err
    found = json.loads((tmp_path / "a.json").read_text())
    assert [p["name"] for p in found["points"]] == ["clean", *plans]
    assert all(p["loss"] > 0 and p["kl"] > 0 for p in found["points"][1:])
    assert all(plan in out and plan in (tmp_path / "a.html").read_text() for plan in plans)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert run("--resume", "run")[0] == 0
