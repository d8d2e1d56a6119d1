"""Ray programs, on a cluster of their own and on one that somebody else has started."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.covers("Ray", "actors, tasks, restarts; own and running cluster", "eager")]

PROGRAMS = Path(__file__).with_name("ray_programs")
PLAN = "relative_gaussian:0.05,sparsity=0.5@module.linear"
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
"""`ray start` wants a token as soon as this machine has one, for whatever cluster; ours lives for a minute, on the loopback only."""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=800, env=os.environ | ENVIRONMENT)


def shaken(folder: Path, plan: str, *program: str) -> dict:
    """Run a program under a plan: its exit code, what it printed, its ledger, all that was said."""
    options = ["--plan", plan, "--seed", "3", "--ledger", str(folder)]
    done = run("-m", "shaketable", "run", *options, "--", sys.executable, *program)
    said = " ".join((done.stdout + done.stderr).split())
    seen = next((json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')), None)
    file = folder / "ledger.json"
    ledger = json.loads(file.read_text()) if file.exists() else None
    return {"code": done.returncode, "seen": seen, "said": said, "ledger": ledger}


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster whose raylet knows nothing of any plan; its own temporary folder hides it from `ray.init()`."""
    folder = tempfile.mkdtemp(prefix="st", dir="/tmp")
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2", "--port=0"]
    words += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
    words += ["--object-store-memory=100000000", f"--temp-dir={folder}"]
    head = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ENVIRONMENT)
    assert head.stdout is not None
    said = iter(head.stdout.readline, "")
    found = next(found for line in said if (found := re.search(r"--address='[\d.]+:(\d+)'", line)))
    yield f"127.0.0.1:{found[1]}"
    head.terminate()
    head.wait()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def on_its_own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return shaken(folder / "l", PLAN, str(PROGRAMS / "actors_and_tasks.py"), "local", str(folder))


@pytest.fixture(scope="module")
def as_guest(tmp_path_factory, cluster):
    folder = tmp_path_factory.mktemp("guest")
    return shaken(folder / "l", PLAN, str(PROGRAMS / "actors_and_tasks.py"), cluster, str(folder))


@pytest.fixture(params=["on_its_own", "as_guest"])
def done(request):
    return request.getfixturevalue(request.param)


def workers(done: dict, place: str) -> list[dict]:
    return [w for w in done["ledger"]["workers"] if w["place"] == place]


def lanes(errors: list[list[float]]) -> set[int]:
    return {i for row in errors for i, x in enumerate(row) if x}


def test_every_pass_of_actors_and_tasks_is_in_the_ledger(done):
    assert done["code"] == 0, done["said"]
    tasks, retried, samplers, lives, nested, own, last = 3 * 2, 2 * 2, 2 * 2, 2 * 2, 2, 1, 1
    assert done["ledger"]["forward"] == tasks + retried + samplers + lives + nested + own + last
    assert sum(w["forward"] for w in workers(done, "tasks")) == tasks + retried + last
    # a task's model is the first model of its task, whichever worker it ran in; bob alone met two models in one life
    assert done["ledger"]["sites"][0]["matched"] == 2


def test_two_actors_have_the_same_broken_lanes_and_other_noise(done):
    seen = done["seen"]
    assert seen["first"] != seen["second"] != seen["nested"] != seen["first"]
    everybody = [seen["first"], seen["second"], seen["nested"], *seen["tasks"], *seen["retried"], [seen["own"][0]]]
    assert all(lanes(errors) == lanes(seen["first"]) for errors in everybody)
    assert 0 < len(lanes(seen["first"])) < 16
    ranks = {w["rank"] for name in ("Sampler#1", "Sampler#2 bob", "Sampler#1/Sampler#1") for w in workers(done, name)}
    assert len(ranks) == 3


def test_an_actor_that_is_killed_keeps_its_place_and_meets_its_noise_again(done):
    first, second = workers(done, "Sampler#2 bob")
    assert (first["life"], second["life"]) == (1, 2)
    assert (first["forward"], second["forward"]) == (4, 2)
    assert first["pid"] != second["pid"]
    assert (first["actor"], first["rank"]) == (second["actor"], second["rank"])
    # its second life begins as the first one did, which was with `sample`
    assert done["seen"]["lives"][1] == done["seen"]["second"]
    assert done["seen"]["lives"][0] != done["seen"]["second"]
    assert "Sampler#2 bob, life 2" in done["said"]


def test_tasks_differ_and_a_task_that_is_tried_again_sees_its_noise_again(done):
    one, two, three = done["seen"]["tasks"]
    assert one != two != three != one
    first_try, second_try = done["seen"]["retried"]
    assert first_try == second_try


def test_an_actor_that_injected_nothing_is_named(done):
    assert workers(done, "Idle#1 resting")[0]["forward"] == 0
    assert "(Idle#1 resting) imported torch but injected nothing" in done["said"]


def test_actors_have_the_same_noise_on_every_cluster(on_its_own, as_guest):
    for who in ("first", "second", "lives", "nested", "own"):
        assert on_its_own["seen"][who] == as_guest["seen"][who], who


def test_nothing_leaves_a_worker_before_its_ledger_is_written(tmp_path, cluster):
    """By the clock alone a pass was lost on a busy machine; these workers have no clock."""
    done = shaken(tmp_path / "l", PLAN, str(PROGRAMS / "answers.py"), cluster)
    assert done["code"] == 0, done["said"]
    assert done["ledger"]["forward"] == done["seen"]["passes"] == 12


def own_runtime_env(address: str, ledger: Path, kind: str) -> dict:
    done = run(str(PROGRAMS / "own_runtime_env.py"), address, str(ledger), PLAN, kind)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_program_can_ask_for_the_plan_itself_and_has_the_noise_of_shaketable_run(tmp_path, on_its_own):
    seen = own_runtime_env("local", tmp_path / "l", "tasks")
    assert seen["tasks"] == on_its_own["seen"]["tasks"]
    # the program shuts Ray down right after its last task, and Ray then kills the workers: without a wait some of this is lost
    assert seen["forward"] == 6 + 200
    assert set(seen["places"]) == {"tasks"}


def test_a_worker_that_does_not_see_the_ledger_folder_stops(tmp_path, cluster):
    seen = own_runtime_env(cluster, tmp_path / "l", "unseen")
    assert f"does not see the driver's ledger folder {tmp_path / 'l'}" in seen["error"]
    assert seen["forward"] == 0


def test_two_plans_for_one_job_are_refused(tmp_path):
    program = "import ray; ray.init(address='local', runtime_env={'env_vars': {'SHAKETABLE_PLAN': 'gain:2@op.all'}})"
    done = shaken(tmp_path / "l", PLAN, "-c", program)
    assert done["code"] == 1
    assert "two plans for one Ray job: 'gain:2@op.all'" in done["said"]
