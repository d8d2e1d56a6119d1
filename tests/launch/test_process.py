"""A plan in a whole process, without starting one: what is met, what is left alone, and what is put around the exits."""

import gc
import multiprocessing
import os
import re
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.errors import PlanError
from shaketable.integrations import ray, vllm
from shaketable.launch import import_hooks, process, process_identity, run
from shaketable.launch.import_hooks import WATCHED
from shaketable.launch.inert_notices import PASSES, Notices
from shaketable.launch.process import ProcessInjection, unmatched_clauses
from shaketable.plan import Plan
from tests.launch.test_process_identity import Process

GAIN = "gain:1@module.linear"
X = torch.ones(2, 4)


def linear():
    return nn.Linear(4, 4, bias=False)


def fires(injection):
    return injection.ledger.forward


def test_a_model_is_shaken_from_its_very_first_call_on_and_what_is_inside_of_it_once():
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    clean = model(X).detach()
    with Process(GAIN) as injection:
        assert torch.allclose(model(X), 4 * clean) and fires(injection) == 2
        assert torch.allclose(model(X), 4 * clean) and fires(injection) == 4
        assert injection.names == ["Sequential"] and list(injection.roots) == [model]
        assert torch.allclose(model[0](X), 2 * X @ model[0].weight.T), "a part that is called alone is known already"
    assert torch.equal(model(X), clean)


def test_a_fault_on_the_input_acts_in_the_first_call_too():
    model = linear()
    with Process("gain:1@module.linear,point=input") as injection:
        assert torch.allclose(model(X), 2 * X @ model.weight.T) and fires(injection) == 1


def test_models_without_a_match_are_told_with_their_phase_and_modules_without_weights_are_not():
    with Process("gain:1@module.rmsnorm") as injection:
        nn.Sequential(linear()).eval()(X)
        nn.Sequential(linear())(X)
        nn.Sequential(nn.ReLU())(X)
        nn.ReLU()(X)
        assert injection.unmatched_models == {("Sequential", "eval"), ("Sequential", "train")}
        assert injection.names == [] and list(injection.roots) == []
        assert injection.unmatched[0].startswith("module.rmsnorm: nothing in Sequential matches 'rmsnorm'")


def test_a_module_that_came_into_a_model_after_its_first_call_is_named_and_not_shaken():
    model = nn.Sequential(linear())
    with Process(GAIN) as injection:
        model(X)
        model.append(linear())
        model(X)
        assert injection.late == {"a Linear came into a model after its first call and is not shaken"}
        assert fires(injection) == 2 and injection.names == ["Sequential"]


def test_a_model_of_another_injection_is_left_alone_and_so_is_all_while_an_engine_runs():
    model = nn.Sequential(linear())
    clean = model(X).detach()
    with Process(GAIN) as injection:
        injection.leave_alone(model)
        assert torch.equal(model(X), clean) and fires(injection) == 0 and injection.names == []
        with injection.standing_aside():
            assert injection.aside == 1 and injection.operator_frame() is None
            with injection.standing_aside():
                assert injection.aside == 2
        assert injection.aside == 0


@pytest.mark.parametrize(("training", "expected"), [((), True), ((False,), False), ((True, False), True)])
def test_a_process_trains_if_one_of_its_models_does_or_there_is_none(training, expected):
    models = [linear().train(mode) for mode in training]
    with Process(GAIN) as injection:
        for model in models:
            model(X)
        assert injection.is_training is expected


def test_operators_outside_of_modules_are_of_the_phase_that_gradients_tell():
    with Process("gain:1@op.matmul") as injection:
        _ = X @ X.T
        with torch.no_grad():
            _ = X @ X.T
        assert injection.ledger.sites[0].by("phase") == {
            "train": {"forward": 1, "backward": 0},
            "eval": {"forward": 1, "backward": 0},
        }


def test_a_clause_is_known_by_the_site_that_its_error_begins_with():
    plan = Plan.parse("gain:1@layer.1;gain:1@module.linear;bias:1@layer.1;gain:1@layer.11")
    errors = ["layer.1: out of range", "module.linear: nothing"]
    assert unmatched_clauses(plan, errors) == {0: "out of range", 1: "nothing", 2: "out of range"}
    assert unmatched_clauses(plan, []) == {}


def test_threads_that_start_later_meet_operators_and_only_where_there_are_some(monkeypatch):
    start, seen = threading.Thread._bootstrap_inner, []
    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", start)
    told = SimpleNamespace(has_operators=False, push_mode=lambda: seen.append("on"), drop_mode=lambda: seen.append("off"))
    process._in_every_thread(told)
    assert threading.Thread._bootstrap_inner is start
    told.has_operators = True
    process._in_every_thread(told)
    thread = threading.Thread(target=lambda: seen.append("runs"))
    thread.start()
    thread.join()
    assert seen == ["on", "runs", "off"]


def test_who_leaves_in_a_hurry_writes_first_and_leaves_with_the_same_status(monkeypatch):
    seen = []
    monkeypatch.setattr(os, "_exit", lambda status: seen.append(status))
    process._flush_before_exit(SimpleNamespace(flush=lambda: seen.append("written")))
    os._exit(7)
    assert seen == ["written", 7]


def test_a_rank_that_leaves_its_group_is_noted_before(monkeypatch):
    seen = []
    monkeypatch.setattr(process.dist, "destroy_process_group", lambda *args, **kwargs: seen.append((args, kwargs)))
    process._note_rank_before_leaving(SimpleNamespace(note_rank=lambda: seen.append("noted")))
    process.dist.destroy_process_group(1, group=2)
    assert seen == ["noted", ((1,), {"group": 2})]


@pytest.mark.parametrize(("parent", "written"), [(None, []), (object(), ["written"])])
def test_what_a_child_of_multiprocessing_sends_is_written_before_and_what_others_send_is_not(monkeypatch, parent, written):
    seen = []
    pickler = process.ForkingPickler
    monkeypatch.setattr(pickler, "__init__", pickler.__init__)
    monkeypatch.setattr(process_identity, "before_an_answer", lambda: seen.append("written"))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    process._write_before_answers()
    assert pickler.loads(bytes(pickler.dumps([1, 2]))) == [1, 2] and seen == written


def test_nothing_is_active_in_a_process_that_no_plan_was_given_to():
    assert process.active() is None


def test_every_module_that_is_watched_gets_what_is_meant_for_it(monkeypatch):
    told = {}

    def note(home, name):
        monkeypatch.setattr(home, name, lambda given: told.__setitem__(name, given) or "wrapped")

    for name in ("adopt_workers", "guard_cache", "check_config", "tell_reasons", "end_quietly", "with_a_name"):
        note(vllm, name)
    note(ray, "follow")
    monkeypatch.setattr(process, "activate", lambda: told.__setitem__("activate", None))
    names = ("WorkerBase", "EngineCore", "VllmConfig", "MPClient", "Executor", "main")
    module = SimpleNamespace(**{name: f"the {name}" for name in names})
    for name, tell in WATCHED.items():
        if name != "transformers.generation.utils":
            tell(module)
    assert told == {
        "activate": None, "follow": module, "with_a_name": "the main", "check_config": "the VllmConfig",
        "tell_reasons": "the MPClient", "end_quietly": "the Executor", "adopt_workers": "the WorkerBase",
        "guard_cache": "the EngineCore",
    }  # fmt: skip
    assert module.main == "wrapped"
    assert {name: tell.__name__ for name, tell in WATCHED.items()} == {
        "torch": "_on_torch", "transformers.generation.utils": "_on_generate", "ray": "_on_ray",
        "vllm.entrypoints.cli.main": "_on_vllm_command", "vllm.config": "_on_vllm_config",
        "vllm.v1.engine.core_client": "_on_vllm_client", "vllm.v1.executor.abstract": "_on_vllm_executor",
        "vllm.v1.worker.worker_base": "_on_vllm_worker", "vllm.v1.engine.core": "_on_vllm_engine",
    }  # fmt: skip


def test_generate_of_transformers_is_a_rollout_once_it_is_imported():
    from shaketable.sites.phases import current_phase

    class GenerationMixin:
        def generate(self):
            return current_phase(True)

    import_hooks._on_generate(SimpleNamespace(GenerationMixin=GenerationMixin))
    assert GenerationMixin().generate() == "rollout" and current_phase(True) == "train"


@pytest.mark.parametrize(
    ("place", "rank", "label", "here"),
    [(None, 0, "", ""), ("5:Sampler#2", 5, "Sampler#2", "child of Sampler#2"), ("7:", 7, "", ""), ("3:a:b", 3, "a:b", "child of a:b")],
)  # fmt: skip
def test_a_place_is_a_rank_and_a_label(monkeypatch, place, rank, label, here):
    monkeypatch.delenv("SHAKETABLE_PLACE", raising=False)
    if place is not None:
        monkeypatch.setenv("SHAKETABLE_PLACE", place)
    assert (process_identity.rank_here(), process_identity.label_here()) == (rank, label)
    assert process_identity.current_place() == process_identity.Place(here) and process_identity.current_task() == 0


# ---- what is told while a program runs


def notices(plan, folder, **more):
    return Notices(SimpleNamespace(plan=Plan.parse(plan), **{"roots": [], **more}), folder)


def said(capfd):
    lines = capfd.readouterr().err.splitlines()
    end = f" (process {os.getpid()}; the program goes on)"
    assert all(line.startswith("shaketable: ") and line.endswith(end) for line in lines)
    return [line.removeprefix("shaketable: ").removesuffix(end) for line in lines]


def test_a_clause_without_a_match_is_told_of_models_and_not_of_single_layers(tmp_path, capfd):
    told = notices("gain:1@module.a;gain:1@module.b", tmp_path)
    told.on_model(linear(), {0: "no a", 1: "no b"})
    assert said(capfd) == []
    told.on_model(nn.Sequential(linear()), {0: "no a", 1: "no b"})
    assert said(capfd) == [f"gain:1@module.{x} does nothing in Sequential: no {x}" for x in "ab"]
    told.on_model(nn.Sequential(linear()), {0: "no a", 1: "no b"})
    assert said(capfd) == [], "once"


def test_what_a_model_hides_is_told_of_each_clause_once(tmp_path, capfd):
    told = notices("gain:1@op.matmul;gain:1@op.softmax", tmp_path)
    for _ in range(2):
        told.on_hidden(nn.Sequential(), [["one", "two"], ["one"]])
    assert said(capfd) == [f"gain:1@op.{n} in Sequential: {line}" for n, line in (("matmul", "one"), ("matmul", "two"), ("softmax", "one"))]  # fmt: skip


def test_what_is_looked_at_is_judged_after_two_passes_and_by_whether_something_was_trained(tmp_path, capfd):
    asked = []
    check = SimpleNamespace(inert=lambda **options: asked.append(options) or {1: "the second does nothing"})
    told = notices("gain:1@module.a;gain:1@module.b", tmp_path, inert_check=check)
    told.look(["sites"])
    told.trained = True
    told.look(["sites"])
    assert asked == [{"trained": trained, "passes": 2, "sites": ["sites"]} for trained in (False, True)] and PASSES == 2
    assert said(capfd) == ["the second does nothing"]
    told.after_fork()
    assert told.trained is False


def test_an_optimizer_that_steps_tells_that_a_model_of_ours_was_trained(tmp_path):
    ours, others = linear(), linear()
    told = notices("gain:1@module.linear,direction=backward", tmp_path, roots=[ours])
    for model, trained in ((others, False), (ours, True)):
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert told.trained is trained
    told.trained = False
    torch.optim.SGD(ours.parameters(), lr=0.1).step()
    assert told.trained is False, "it looks no more once it knows"


def test_no_optimizer_is_watched_where_no_clause_needs_it(tmp_path):
    assert not hasattr(notices("gain:1@module.linear;gain:1@op.matmul", tmp_path), "_hook")
    watched = notices("gain:1@module.linear;gain:1@layer.1,direction=backward", tmp_path)
    watched._hook.remove()


def test_a_line_is_told_where_no_mark_can_be_left(tmp_path, capfd):
    notices("gain:1@module.a", tmp_path / "gone")._tell(0, "a line")
    assert said(capfd) == ["a line"]
    first, second = (notices("gain:1@module.a", tmp_path) for _ in range(2))
    first._tell(0, "a line")
    second._tell(0, "a line")
    assert said(capfd) == ["a line"], "another process has told it"
    assert [path.suffix for path in tmp_path.iterdir()] == [".mark"] and sys.stderr is not None


def test_a_process_injection_begins_with_nothing():
    injection = ProcessInjection(Plan.parse(GAIN))
    assert (injection.names, injection.late, injection.unmatched, injection.unmatched_models) == ([], set(), [], set())
    assert (injection.aside, injection.notices, injection.allow_inert, injection.calls.models, injection.calls.task) == (
        0, None, True, 0, 0,
    )  # fmt: skip


def test_a_thread_of_a_task_belongs_to_the_task_that_was_noticed_last(monkeypatch):
    monkeypatch.setattr(process_identity, "current_task", lambda: 7)
    injection = ProcessInjection(Plan.parse(GAIN))
    thread = threading.Thread(target=injection.calls.follow)
    thread.start()
    thread.join()
    assert injection.calls.task == 0
    injection.calls.models = 3
    injection.calls.follow()
    assert (injection.calls.task, injection.calls.models) == (7, 0)


def test_a_first_call_without_a_tensor_is_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x=None):
            return self.inner(X)

    model = Model()
    with Process("gain:1@module.Model,point=input;gain:1@module.inner") as injection:
        assert torch.allclose(model(), 2 * X @ model.inner.weight.T) and fires(injection) == 1


def test_a_plan_is_made_active_once(monkeypatch):
    monkeypatch.setattr(process, "_active", "already")
    monkeypatch.delenv("SHAKETABLE_PLAN", raising=False)
    process.activate()
    assert process.active() == "already"


def test_a_folder_of_ledgers_has_the_time_in_its_name_and_is_another_one_each_time():
    first, second = run.default_folder(), run.default_folder()
    assert first.parent == second.parent == Path("ledgers") and first != second
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", first.name)


def test_what_cannot_be_run_or_written_is_told_in_one_line(tmp_path):
    with pytest.raises(PlanError, match=r"^cannot run 'no-such-program': No such file or directory$"):
        run.run_command(["no-such-program"], dict(os.environ))
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=f"^cannot use {tmp_path / 'file' / 'l'} for ledgers: Not a directory$"):
        run.new_folder(tmp_path / "file" / "l")


def test_reasons_of_engines_are_told_once_each():
    processes = [{"refused": why} for why in ("b", None, "a", "b")] + [{}]
    assert run.RunResult([], 0, None, None, processes).refused == ["b", "a"]


@pytest.mark.parametrize("seed", [None, "5"])
def test_the_plan_of_the_environment_is_made_active_with_all_that_belongs_to_it(monkeypatch, tmp_path, seed):
    done = {}
    monkeypatch.setattr(process, "_active", None)
    monkeypatch.setattr(process_identity, "before_an_answer", int)
    monkeypatch.setenv("SHAKETABLE_PLAN", "gain:1@op.matmul")
    monkeypatch.setenv("SHAKETABLE_LEDGER", str(tmp_path))
    monkeypatch.delenv("SHAKETABLE_SEED", raising=False)
    if seed:
        monkeypatch.setenv("SHAKETABLE_SEED", seed)
    for home, name in (
        (process, "_in_every_thread"), (process, "register_module_forward_pre_hook"), (process.atexit, "register"),
        (process, "_flush_before_exit"), (process, "_note_rank_before_leaving"),
    ):  # fmt: skip
        monkeypatch.setattr(home, name, lambda given, name=name: done.__setitem__(name, given))
    monkeypatch.setattr(process, "_write_before_answers", lambda: done.__setitem__("_write_before_answers", None))
    monkeypatch.setattr(os, "register_at_fork", lambda **given: done.update(given))
    process.activate()
    file = process.active()
    injection = file.injection
    try:
        assert injection.enabled and injection.plan == Plan.parse("gain:1@op.matmul", seed=int(seed or 0))
        assert file.folder == tmp_path == injection.notices.folder and len(list(tmp_path.glob("process-*.json"))) == 1
        assert done == {
            "_in_every_thread": injection, "register_module_forward_pre_hook": injection.on_call, "register": file.flush,
            "_flush_before_exit": file, "_note_rank_before_leaving": file, "_write_before_answers": None,
            "before": process_identity.count_fork, "after_in_child": file.after_fork,
        }  # fmt: skip
        assert process_identity.before_an_answer == file.catch_up
        done.clear()
        process.activate()
        assert process.active() is file and done == {}, "the second time it does nothing"
    finally:
        file.close()
        injection.close(check=False)


def test_a_model_that_the_program_has_let_go_is_not_kept():
    """A program may make a thousand models; the plan must not hold the memory of all of them."""
    model = nn.Sequential(linear())
    with Process(GAIN) as injection:
        model(X)
        seen = weakref.ref(model)
        assert list(injection.roots) == [model]
        del model
        gc.collect()
        assert seen() is None and list(injection.roots) == []
