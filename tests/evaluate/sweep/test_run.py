"""Sweeps of a small model that ships with the package: same problems, proven faults, and a record that survives a kill."""

import json
import shutil

import pytest
import torch

from shaketable.errors import InertError, ModelError, ShaketableError
from shaketable.evaluate.decoding import Decoder
from shaketable.evaluate.sweep.config import SweepConfig
from shaketable.evaluate.sweep.results import results
from shaketable.evaluate.sweep.run import Sweep, check
from shaketable.models import NANO, load_model
from shaketable.records.record import FILE, SEAL, RunRecord

NOISE = "relative_gaussian@op.matmul"
TIMES = ("seconds", "tokens_per_second")


def config(**fields):
    made = {
        "models": ("nano",),
        "task": "arithmetic,level=2",
        "plan": NOISE,
        "magnitudes": (0.1, 0.5),
        "n": 12,
        "seeds": 2,
        "seed": 3,
    }
    return SweepConfig.checked(**made | fields)


def new(folder, made):
    return RunRecord.create(folder, "sweep", made.model_dump(mode="json"), {})


def swept(folder, **fields):
    record = new(folder, config(**fields))
    Sweep(config(**fields), record).run()
    return record


def resumed(folder, **facts):
    record = RunRecord.open(folder, "sweep")
    if not record.events("finished"):
        record.append("resumed", step=0)
    Sweep(SweepConfig.checked(**record.config), record, **facts).run()
    return record


def numbers(record):
    """The points without the clock."""
    return [{k: v for k, v in p.items() if k not in TIMES} for p in results(record)["points"]]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished sweep of the default configuration; not to be changed."""
    return swept(tmp_path_factory.mktemp("sweep") / "run")


def test_the_measured_error_is_the_one_asked_for(done):
    points = done.events("point")
    assert [(p["magnitude"], p["seed"]) for p in points] == [(0.0, 3), (0.1, 3), (0.1, 4), (0.5, 3), (0.5, 4)]
    assert len({json.dumps([a["id"] for a in p["answers"]]) for p in points}) == 1
    assert [bool(p["ledger"]) for p in points] == [False, True, True, True, True]
    for point in results(done)["points"]:
        assert point["measured_error"] == pytest.approx(point["magnitude"], rel=0.05)
        assert (point["injections"] > 0) == (point["magnitude"] > 0)


def test_models_are_swept_alike_and_compared_with_their_own_clean(done, tmp_path):
    shutil.copytree(NANO, tmp_path / "copy")
    copy = str(tmp_path / "copy")
    points = numbers(swept(tmp_path / "run", models=("nano", copy)))
    family = ("model", "p_adjusted", "sentence")
    mine, theirs = (
        [{k: v for k, v in p.items() if k not in family} for p in points if p["model"] == m] for m in ("nano", copy)
    )
    assert mine == theirs == [{k: v for k, v in p.items() if k not in family} for p in numbers(done)]
    assert all(a["p_adjusted"] >= b["p_adjusted"] for a, b in zip(points[1:3], numbers(done)[1:], strict=True))


# --- a kill at any moment -------------------------------------------------------------------------------------------------


def cut_points(folder):
    """Bytes of the record after which a kill could have come: between events, and inside of them."""
    data = (folder / FILE).read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    return [end + more for end in ends[:-1] for more in (0, 1, 60)]


@pytest.mark.parametrize("share", [0.0, 0.55, 1.0])
def test_a_sweep_cut_off_anywhere_ends_in_the_same_numbers(done, tmp_path, share):
    cuts = cut_points(done.folder)
    cut = cuts[round(share * (len(cuts) - 1))]
    (tmp_path / "run").mkdir()
    kept = (done.folder / FILE).read_bytes()[:cut]
    (tmp_path / "run" / FILE).write_bytes(kept)
    record = resumed(tmp_path / "run")
    assert numbers(record) == numbers(done)
    written = (tmp_path / "run" / FILE).read_bytes()
    assert written.startswith(kept[: kept.rfind(b"\n") + 1])
    keys = [(p["model"], p["magnitude"], p["seed"]) for p in record.events("point")]
    assert len(keys) == len(set(keys)) == 5


def test_a_resumed_sweep_keeps_its_batch_size(tmp_path, monkeypatch):
    """The noise follows the batches, so what fits into memory now must not matter."""
    whole = swept(tmp_path / "whole")
    record = new(tmp_path / "run", config())
    decode, calls = Decoder.decode, []

    def dies(self, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(self, *args, **options)

    monkeypatch.setattr(Decoder, "decode", dies)
    with pytest.raises(KeyboardInterrupt):
        Sweep(config(), record).run()
    assert len(record.events("point")) == 2
    monkeypatch.setattr(Decoder, "decode", decode)
    monkeypatch.setattr("shaketable.evaluate.score.probe_batch_size", lambda *_: 1)
    assert numbers(resumed(tmp_path / "run")) == numbers(whole)


def test_other_weights_are_not_mixed_in(done, tmp_path):
    shutil.copytree(done.folder, tmp_path / "run")
    lines = (tmp_path / "run" / FILE).read_text().splitlines(keepends=True)
    (tmp_path / "run" / FILE).write_text("".join(lines[:5]))
    (tmp_path / "run" / SEAL).unlink()

    def load(name):
        model, tokenizer = load_model(name)
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1
        return model, tokenizer

    with pytest.raises(ShaketableError, match="the weights of nano have changed"):
        resumed(tmp_path / "run", load=load)


def test_other_problems_are_not_mixed_in(tmp_path):
    mine = tmp_path / "p.jsonl"
    mine.write_text("".join(f'{{"question": "{i}+1=", "answer": {i + 1}, "split": "test"}}\n' for i in range(4)))
    record = new(tmp_path / "run", config(task=str(mine), n=4))
    Sweep(config(task=str(mine), n=4), record)
    mine.write_text(mine.read_text().replace("3+1", "3+2"))
    with pytest.raises(ShaketableError, match="have changed since this sweep began"):
        resumed(tmp_path / "run")


# --- no silent no-op ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "plan", "magnitudes", "message"),
    [("arithmetic", NOISE, (1e-12,), "changed no value"), ("text", "gain@op.gelu", (0.1,), "never fired")],
)
def test_a_plan_that_does_nothing_is_an_error_and_no_point(tmp_path, task, plan, magnitudes, message):
    made = config(task=task, plan=plan, magnitudes=magnitudes, n=4)
    record = new(tmp_path / "run", made)
    with pytest.raises(InertError, match=rf"nano at .*{message}.*no point is written"):
        Sweep(made, record).run()
    assert [p["magnitude"] for p in record.events("point")] == [0.0]
    assert not record.events("finished")
    assert not results(record)["complete"]


# --- what is looked at before anything runs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"models": ("nano", "no/such/model/here")}, ModelError, "does not exist"),
        ({"task": "text", "n": 54}, ShaketableError, "cannot draw 54 texts: there are 53"),
    ],
)
def test_what_cannot_work_is_found_before_anything_runs(fields, error, message):
    with pytest.raises(error, match=message):
        check(config(**fields))
