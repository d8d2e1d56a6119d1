"""Records that somebody changed: marked where they have no chain, found where they have one, and by the digest else."""

import json
import shutil
import subprocess

import pytest
import torch
import yaml
from typer.testing import CliRunner

from shaketable.cli import app
from shaketable.models import NANO
from shaketable.records.record import FILE, SEAL, RunRecord, link, linked, parted
from shaketable.study.cells import cells_of
from shaketable.study.file import load_study
from shaketable.study.run_cell import do
from shaketable.study.store import asked_digest, define, digest, summaries, verify
from tests.study.small_studies import data

pytestmark = pytest.mark.attack("tampered records")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A study of two models that are only scored, its file and its store."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(NANO, folder / "twin")
    small = data(
        seeds=2,
        evaluate={"n": 4, "mechanism": False, "conditions": {"noise": "relative_gaussian:0.2@op.matmul"}},
        arms={"as it comes": {"train": False}, "twin": {"train": False, "model": str(folder / "twin")}},
        compare={"primary": {"a": "twin", "b": "as it comes", "condition": "noise"}},
    )
    (folder / "small.yaml").write_text(yaml.safe_dump(small, sort_keys=False))
    asked = load_study(folder / "small.yaml")
    define(asked, folder / "store")
    for cell in cells_of(asked):
        do(cell, "small", folder / "store" / "small" / "runs", "test")
    return folder


@pytest.fixture
def store(made, tmp_path):
    shutil.copytree(made / "store", tmp_path / "store")
    return tmp_path / "store"


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.output, done.exception


def run_of(store, arm="twin"):
    return min(store.glob(f"small/runs/{arm}-s0-*"))


def bodies(folder):
    return [parted(line)[0] for line in (folder / FILE).read_bytes().splitlines(keepends=True)]


def write_rechained(folder):
    """Better scores under a whole new chain, and a seal that fits."""
    sha, out = "", b""
    for body in bodies(folder):
        body = body.replace(b'"correct": false', b'"correct": true')
        sha = link(sha, body)
        out += linked(body, sha)
    (folder / FILE).write_bytes(out)
    seal = json.loads((folder / SEAL).read_text()) | {"bytes": len(out), "sha": sha}
    (folder / SEAL).write_text(json.dumps(seal))


# ---- malformed seals and heads

BAD_SEALS = ['{"lines":1,"bytes":2,"sha":[]}', "", "[" * 5000]


@pytest.mark.parametrize("seal", BAD_SEALS, ids=range(len(BAD_SEALS)))
def test_a_malformed_seal_is_named_and_hides_no_good_run(store, seal):
    (run_of(store) / SEAL).write_text(seal)
    code, out, error = command("study", "list", "--store", store)
    assert (code, error) == (0, None)
    assert "3 done" in out and "1 damaged" in out
    code, out, _ = command("study", "verify", store)
    assert code == 1
    assert out.count("bad: ") == 1
    assert f"bad: small/runs/{run_of(store).name}: record.seal is damaged: it is not a seal" in out


@pytest.mark.slow
@pytest.mark.parametrize("value", [5, "x"], ids=str)
@pytest.mark.parametrize(
    "key", ["about", "config", "id", "verb", "started", "schema", "event", "study", "arm", "seed", "steps"]
)
def test_no_head_of_a_record_hides_the_others(store, key, value):
    folder = store / "small" / "runs" / "made-up"
    RunRecord.create(folder, "train", {"steps": 1}, {}, {"study": "small", "arm": "a", "seed": 1, "key": "k"})
    head = json.loads(bodies(folder)[0])
    inner = {"study": "about", "arm": "about", "seed": "about", "steps": "config"}.get(key)
    (head[inner] if inner else head)[key] = value
    body = json.dumps(head).encode()
    (folder / FILE).write_bytes(linked(body, link("", body)))
    code, out, error = command("study", "list", "--store", store)
    assert code == 0, error
    assert "4 done" in out
    assert command("study", "verify", store)[0] in (0, 1)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ('{"event": ["x"]}', "damaged"),
        ('{"event": "resumed"}', "damaged"),
        ('{"event": "warning", "time": "x"}', "partial"),
        ('{"event": "added"}', "partial"),
    ],
)
def test_no_event_of_a_record_hides_the_others(store, event, status):
    folder = store / "small" / "runs" / "made-up"
    record = RunRecord.create(folder, "train", {}, {})
    record.append("step", step=1)
    before = parted((folder / FILE).read_bytes().splitlines(keepends=True)[-1])[1]
    with (folder / FILE).open("ab") as file:
        file.write(linked(event.encode(), link(before, event.encode())))
    found = {run.folder: run.status for run in summaries(store)}
    assert found["small/runs/made-up"] == status
    assert list(found.values()).count("done") == 4


# ---- verify


def test_an_unchanged_store_is_verified_and_says_its_digests(made, store):
    code, out, _ = command("study", "verify", store)
    assert code == 0
    asked = asked_digest(load_study(made / "small.yaml"))
    assert out.splitlines() == [
        f"small: records sha256:{digest(store / 'small')}",
        f"small: asked   sha256:{asked}",
        "5 records, unchanged as far as their chains can tell",
    ]
    assert verify(store / "small")["studies"][0] == {"study": "small", "digest": digest(store / "small"), "asked": asked}


def test_the_digest_is_what_sha256sum_says(store):
    shutil.copytree(run_of(store), run_of(store, "as-it-comes") / "reinforce")  # a run within a run
    line = "find * -name record.jsonl | LC_ALL=C sort | xargs sha256sum | sha256sum"
    done = subprocess.run(line, shell=True, cwd=store / "small", capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == digest(store / "small")


def test_an_edit_is_one_line_with_its_place(store, tmp_path):
    path = run_of(store) / FILE
    path.write_bytes(path.read_bytes().replace(b'"correct": false', b'"correct": true ', 1))
    code, out, _ = command("study", "verify", store, "--json", tmp_path / "out.json")
    assert code == 1
    [line] = [line for line in out.splitlines() if line.startswith("bad: ")]
    assert line.startswith(f"bad: small/runs/{path.parent.name}: record.jsonl was changed at line ")
    assert out.splitlines()[-1] == "1 of 5 records cannot be trusted"
    assert json.loads((tmp_path / "out.json").read_text())["bad"] == 1


def test_a_new_chain_is_accepted_and_another_digest_tells(store):
    before = digest(store / "small")
    write_rechained(run_of(store))
    assert command("study", "verify", store)[0] == 0, "by design: nothing in the store says otherwise"
    assert digest(store / "small") != before


# ---- code in a study file


def test_code_of_a_study_file_runs_only_when_it_is_allowed(made, tmp_path):
    body = (
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nfrom shaketable.evaluate.tasks import Arithmetic\n"
    )
    (tmp_path / "mine.py").write_text(body + "class Mine(Arithmetic):\n    name = 'mine'\n")
    content = yaml.safe_load((made / "small.yaml").read_text())
    task = f"{tmp_path}/mine.py:Mine,level=2"
    content["arms"], content["compare"] = {"mine": {"train": False, "task": task}}, {}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    words = ["study", "run", tmp_path / "study.yaml", "--store", tmp_path / "new", "--set", "seeds=0"]
    for more in ([], ["--dry-run"]):
        error = command(*words, *more)[2]
        assert "mine.py:Mine, which runs Python code; read it, and allow it with --allow-code" in str(error)
    assert not (tmp_path / "ran").exists()
    assert "allow-code" not in str(command(*words, "--allow-code", "--dry-run")[2])
    code, _, error = command(*words, "--allow-code", "--json", tmp_path / "out.json")
    assert code == 0, error
    assert json.loads((tmp_path / "out.json").read_text())["study"]["command"].endswith(" --allow-code")


def test_a_record_of_the_schema_without_a_chain_is_refused(store):
    path = run_of(store) / FILE
    lines = [body.replace(b"shaketable.run/2", b"shaketable.run/1") + b"\n" for body in bodies(path.parent)]
    path.write_bytes(b"".join(lines))
    code, out, _ = command("study", "verify", store)
    assert code == 1 and "is of another version: schema 'shaketable.run/1'" in out
