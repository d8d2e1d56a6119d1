"""How a plan meets the models of a process: which are its own, which are left alone, and what is noted of each."""

import copy
import gc
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.launch import process, process_identity
from shaketable.launch.process import ByTask, ProcessInjection, Seen, unmatched_clauses
from shaketable.plan import Plan
from shaketable.sites.phases import phase
from tests.launch.test_process_identity import Process

GAIN = "gain:1@module.linear"
X = torch.ones(2, 4)


def linear():
    return nn.Linear(4, 4, bias=False)


def in_task(monkeypatch, number):
    monkeypatch.setattr(process_identity, "current_task", lambda: number)


# ---- tasks


def moments(calls, n=2):
    return [calls.new_key(1, "train") for _ in range(n)]


def test_moments_of_a_task_are_its_own_and_begin_anew(monkeypatch):
    calls = ProcessInjection(Plan.parse(GAIN)).calls
    plain = moments(calls)
    in_task(monkeypatch, 7)
    seven = moments(calls)
    in_task(monkeypatch, 8)
    eight = moments(calls)
    assert len({*plain, *seven, *eight}) == 6 and all(0 <= m < 2**64 for m in seven)
    in_task(monkeypatch, 7)
    assert moments(calls) == seven
    in_task(monkeypatch, 0)
    assert moments(calls) == plain


def test_a_task_goes_on_counting_while_it_lasts(monkeypatch):
    calls = ProcessInjection(Plan.parse(GAIN)).calls
    in_task(monkeypatch, 7)
    assert len(set(moments(calls, 4))) == 4
    calls.models = 5
    calls.follow()
    assert calls.models == 5


def test_another_task_leaves_the_step_as_it_is(monkeypatch):
    calls = ByTask(ProcessInjection(Plan.parse(GAIN)), step=6)
    assert calls.step == 6
    in_task(monkeypatch, 7)
    calls.follow()
    assert (calls.step, calls.task, calls.models) == (6, 7, 0)


def test_clauses_that_match_are_noted_of_each_model_also_when_tasks_number_them_anew(monkeypatch):
    with Process("gain:1@module.linear;gain:1@module.rmsnorm") as injection:
        in_task(monkeypatch, 1)
        nn.Sequential(linear())(X)
        in_task(monkeypatch, 2)
        nn.Sequential(nn.RMSNorm(4))(X)
        nn.Sequential(linear(), nn.RMSNorm(4))(X)
        assert injection.inert_check.matched == {0: {0}, 1: {1}, 2: {0, 1}}
        assert injection.calls.models == 2 and injection.names == ["Sequential"] * 3


# ---- what is met


def test_a_hook_of_the_program_runs_once_in_the_first_call_too():
    model, seen = nn.Sequential(linear()), []
    model.register_forward_pre_hook(lambda module, args: seen.append(1))
    with Process(GAIN):
        model(X)
        assert seen == [1]
        model(X)
        assert seen == [1, 1]


def test_a_wrapper_around_a_model_that_was_met_does_not_shake_it_again():
    model = nn.Sequential(linear())
    clean = model(X).detach()
    with Process(GAIN) as injection:
        assert torch.allclose(model(X), 2 * clean)
        wrapper = nn.Sequential(model)
        assert torch.allclose(wrapper(X), 2 * clean) and injection.ledger.forward == 2
        assert injection.names == ["Sequential"] and list(injection.roots) == [model]


def test_a_part_that_is_new_in_a_wrapper_is_shaken():
    model, new = nn.Sequential(linear()), linear()
    with Process(GAIN) as injection:
        model(X)
        wrapper = nn.Sequential(model, new)
        expected = 4 * X @ model[0].weight.T @ new.weight.T
        assert torch.allclose(wrapper(X), expected, atol=1e-6) and injection.ledger.forward == 3
        assert injection.names == ["Sequential", "Sequential"]


def test_a_copy_of_a_model_that_was_met_is_met_by_itself():
    model = nn.Sequential(linear())
    with Process(GAIN) as injection:
        model(X)
        twin = copy.deepcopy(model)
        assert torch.allclose(twin(X), 2 * X @ twin[0].weight.T)
        assert injection.names == ["Sequential"] * 2 and injection.ledger.forward == 2


@pytest.mark.parametrize("plan", [GAIN, "gain:1@op.matmul"])
def test_a_model_that_has_lost_its_mark_is_still_known(plan):
    model = nn.Sequential(linear())
    clean = model(X).detach()
    with Process(plan) as injection:
        model(X)
        del model.__dict__["_shaketable_seen"]
        assert torch.allclose(model(X), 2 * clean)
        assert injection.names == ["Sequential"] and injection.ledger.forward == 2


@pytest.mark.parametrize("mark", [None, "something of another program"])
def test_only_our_own_mark_says_that_a_module_was_met(mark):
    model = linear()
    if mark:
        model.__dict__["_shaketable_seen"] = mark
    with Process(GAIN) as injection:
        model(X)
        assert injection.names == ["Linear"] and isinstance(model.__dict__["_shaketable_seen"], Seen)


def test_parts_of_a_model_that_is_left_alone_are_left_alone_too():
    model = nn.Sequential(nn.Sequential(linear()))
    clean = model(X).detach()
    with Process(GAIN) as injection:
        injection.leave_alone(model)
        for part in (model, model[0], model[0][0]):
            assert torch.equal(part(X), clean)
            assert part in injection.seen and isinstance(part.__dict__["_shaketable_seen"], Seen)
        assert (injection.names, injection.ledger.forward, injection.unmatched) == ([], 0, [])


@pytest.mark.parametrize(
    ("plan", "fires"),
    [
        ("gain:1@module.linear,point=weight", 1),
        ("gain:1@module.linear,point=input", 1),
        ("gain:1@op.matmul", 1),
        ("gain:1@module.rmsnorm", 0),
    ],
)
def test_a_model_is_ours_where_a_clause_is_on_its_outputs_weights_or_operators(plan, fires):
    model = nn.Sequential(linear())
    clean = model(X).detach()
    with Process(plan) as injection:
        assert torch.allclose(model(X), (1 + fires) * clean)
        assert injection.names == ["Sequential"] * fires and injection.calls.models == fires
        assert list(injection.roots) == [model] * fires and injection.ledger.forward == fires
        assert injection.unmatched_models == (set() if fires else {("Sequential", "train")})


def test_a_module_with_neither_parts_nor_parameters_is_not_looked_into():
    with Process("gain:1@module.rmsnorm") as injection:
        for module in (nn.LayerNorm(4, elementwise_affine=False), nn.GELU(), nn.Linear(4, 4)):
            assert injection.unmatched == []
            module(X)
        assert len(injection.unmatched) == 1 and injection.unmatched_models == {("Linear", "train")}


def test_a_module_inside_of_a_part_is_late_where_it_was_added_to_the_whole_model():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.more = linear(), []

        def forward(self, x):
            x = self.inner(x)
            for more in self.more:
                x = more(x)
            return x

    model = nn.Sequential(nn.Sequential(Part()), nn.ReLU())
    with Process(GAIN) as injection:
        model(X)
        model[1].extra = linear()
        model[0][0].more.append(model[1].extra)
        model(X)
        assert injection.late == {"a Linear came into a model after its first call and is not shaken"}
        assert injection.names == ["Sequential"] and injection.ledger.forward == 2


def test_a_model_that_is_called_inside_of_another_is_its_own_and_not_late():
    tower = nn.Sequential(linear())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return self.inner(x) + tower(x)

    model = Model()
    with Process(GAIN) as injection:
        model(X)
        assert injection.late == set() and injection.names == ["Model", "Sequential"] and injection.ledger.forward == 2


def test_a_model_that_is_first_called_while_a_graph_is_compiled_is_met_outside_of_it(monkeypatch):
    injection, met = ProcessInjection(Plan.parse(GAIN)), []
    injection.meet = met.append
    model = linear()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert injection.on_call(model, (X,)) is None
    assert met == [model]


def test_a_call_without_arguments_is_left_as_it_is_and_one_with_some_is_given_on():
    injection = ProcessInjection(Plan.parse("gain:1@module.rmsnorm"))
    assert injection.on_call(nn.Sequential(linear()), ()) is None
    args = (X, 3)
    found = injection.on_call(nn.Sequential(linear()), args)
    assert found is None or (found[0] is X and found[1] == 3)


def test_other_arguments_of_a_first_call_stay_where_they_are():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, scale, x, more=None):
            return scale * self.inner(x) + more

    model = Model()
    with Process("gain:1@module.Model,point=input"):
        for _ in range(2):
            assert torch.allclose(model(3.0, X, more=1.0), 6 * X @ model.inner.weight.T + 1)


class Bare(nn.Module):
    """Can be called without an argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = linear()

    def forward(self, x=X):
        return self.inner(x)


def test_a_first_call_without_a_tensor_is_a_pass_like_any_other():
    model = Bare()
    with Process("gain:1@module.inner") as injection:
        for n in (1, 2):
            model()
            assert injection.inert_check.phases["train"] == n and injection.calls.stack == []


@pytest.mark.parametrize("plan", ["relative_gaussian:0.1@module.Bare,point=input", "relative_gaussian:0.1@module.linear"])
def test_the_first_call_of_a_model_is_one_pass_whether_it_was_met_before_or_in_it(plan):
    found = []
    for is_met in (False, True):
        model = Bare()
        with Process(plan) as injection:
            if is_met:
                injection.meet(model)
            found.append([model(X).detach() for _ in range(3)])
            assert injection.inert_check.phases["train"] == 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and not torch.equal(found[0][0], found[0][1])


# ---- what is noted


def test_a_phase_that_was_told_is_that_of_a_model_without_a_match():
    with Process("gain:1@module.rmsnorm") as injection:
        with phase("rollout"):
            nn.Sequential(linear())(X)
        nn.ModuleList([linear()]).eval()
        linear().eval()(X)
        assert injection.unmatched_models == {("Sequential", "rollout"), ("Linear", "eval")}


def test_a_model_in_which_one_clause_matches_is_not_one_without_a_match():
    with Process("gain:1@module.rmsnorm;gain:1@module.linear") as injection:
        nn.Sequential(linear())(X)
        assert injection.unmatched_models == set() and len(injection.unmatched) == 1


def test_a_wrapper_of_what_was_met_is_not_a_model_without_a_match():
    first = linear()
    with Process("gain:1@module.rmsnorm") as injection:
        first(X)
        told = []
        injection.notices = SimpleNamespace(on_model=lambda *a: told.append(a), on_hidden=lambda *a: told.append(a))
        nn.Sequential(first, linear())(X)
        assert injection.unmatched_models == {("Linear", "train")} and told == []
        injection.notices = None


def test_a_model_is_told_of_with_the_clauses_it_has_no_match_for_and_with_what_it_hides():
    told = {}
    with Process("gain:1@module.rmsnorm;gain:1@module.linear") as injection:
        injection.notices = SimpleNamespace(
            on_model=lambda *given: told.__setitem__("model", given), on_hidden=lambda *given: told.__setitem__("hidden", given)
        )
        model = nn.Sequential(linear())
        model(X)
        injection.notices = None
    (root, lost), (other, hidden) = told["model"], told["hidden"]
    assert root is other is model and list(lost) == [0] and lost[0].startswith("nothing in Sequential matches 'rmsnorm'")
    assert len(hidden) == 2


def test_modules_without_weights_are_told_of_to_nobody():
    told = []
    with Process("gain:1@module.rmsnorm") as injection:
        injection.notices = SimpleNamespace(on_model=lambda *a: told.append(a), on_hidden=lambda *a: told.append(a))
        nn.Sequential(nn.ReLU())(X)
        injection.notices = None
        assert told == [] and injection.unmatched_models == set() and len(injection.unmatched) == 1


def test_reasons_of_all_models_are_kept_in_the_order_of_their_calls():
    with Process("gain:1@module.rmsnorm") as injection:
        for model in (nn.Sequential(linear()), nn.ModuleDict({"a": linear()})["a"]):
            model(X)
        assert [line.split(" matches")[0] for line in injection.unmatched] == [
            "module.rmsnorm: nothing in Sequential",
            "module.rmsnorm: nothing in Linear",
        ]


@pytest.mark.parametrize(
    ("errors", "found"),
    [
        (["layer.1: no layer.2: here"], {0: "no layer.2: here"}),
        (["see layer.1: that"], {}),
        (["layer.11: out"], {}),
        (["layer.2,phase=train: a", "layer.2: b"], {1: "b", 2: "a"}),
        (["layer.1: first", "layer.1: last"], {0: "last"}),
    ],
)
def test_an_error_belongs_to_the_clause_whose_site_it_begins_with(errors, found):
    plan = Plan.parse("gain:1@layer.1;gain:1@layer.2;gain:1@layer.2,phase=train")
    assert unmatched_clauses(plan, errors) == found


# ---- operators, the switch, and standing aside


def test_what_stands_aside_comes_back_also_after_an_exception():
    with Process("gain:1@op.matmul") as injection:
        with pytest.raises(ZeroDivisionError), injection.standing_aside():
            raise ZeroDivisionError
        assert injection.aside == 0 and injection.operator_frame() is not None
        assert torch.equal(torch.eye(2) @ torch.eye(2), 2 * torch.eye(2))


def test_no_frame_is_there_for_operators_while_the_plan_is_off():
    injection = ProcessInjection(Plan.parse("gain:1@op.matmul"))
    assert injection.operator_frame() is None
    injection.enable()
    frame = injection.operator_frame()
    assert (frame.layer, frame.excluded, frame.recomputing) == (None, None, False) and frame.current.phase == "train"
    with torch.no_grad():
        assert injection.operator_frame().current.phase == "eval"
    injection.disable()
    assert injection.operator_frame() is None
    injection.close(check=False)


def test_operators_between_modules_have_other_noise_each_time():
    with Process("relative_gaussian:0.1@op.matmul"):
        first, second = (torch.eye(4) @ torch.ones(4, 4) for _ in range(2))
        assert not torch.equal(first, second)


def test_a_process_whose_models_are_all_gone_is_training():
    with Process(GAIN) as injection:
        model = linear().eval()
        model(X)
        assert injection.is_training is False
        del model
        gc.collect()
        assert injection.is_training is True


# ---- what is put around a whole process


def test_a_thread_that_raises_takes_our_mode_off(monkeypatch):
    seen = []

    def fails(self):
        seen.append("runs")
        raise ZeroDivisionError

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", fails)
    process._in_every_thread(
        SimpleNamespace(has_operators=True, push_mode=lambda: seen.append("on"), drop_mode=lambda: seen.append("off"))
    )
    with pytest.raises(ZeroDivisionError):
        threading.Thread()._bootstrap_inner()
    assert seen == ["on", "runs", "off"]


def test_a_torch_without_process_groups_has_no_group_to_leave(monkeypatch):
    leave = object()
    monkeypatch.setattr(process, "dist", SimpleNamespace(is_available=lambda: False, destroy_process_group=leave))
    process._note_rank_before_leaving(None)
    assert process.dist.destroy_process_group is leave


def test_the_function_by_which_ranks_leave_keeps_its_name(monkeypatch):
    def destroy_process_group(group=None):
        """Leave."""

    monkeypatch.setattr(
        process, "dist", SimpleNamespace(is_available=lambda: True, destroy_process_group=destroy_process_group)
    )
    process._note_rank_before_leaving(SimpleNamespace(note_rank=lambda: None))
    found = process.dist.destroy_process_group
    assert found is not destroy_process_group and (found.__name__, found.__doc__) == ("destroy_process_group", "Leave.")


@pytest.fixture
def activated(monkeypatch, tmp_path):
    """A process in which a plan was made active, with nothing put around it."""
    monkeypatch.setattr(process, "_active", None)
    monkeypatch.setattr(process_identity, "before_an_answer", int)
    monkeypatch.setenv("SHAKETABLE_PLAN", GAIN)
    monkeypatch.setenv("SHAKETABLE_LEDGER", str(tmp_path))
    names = ("_in_every_thread", "register_module_forward_pre_hook", "_flush_before_exit", "_note_rank_before_leaving")
    for name in names:
        monkeypatch.setattr(process, name, lambda given: None)
    monkeypatch.setattr(process, "_write_before_answers", lambda: None)
    monkeypatch.setattr(process.atexit, "register", lambda given: None)
    monkeypatch.setattr(process.os, "register_at_fork", lambda **given: None)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        process.activate()
        yield process.active(), heard
    process.active().close()
    process.active().injection.close(check=False)


def test_torch_does_not_warn_of_a_hook_that_is_ours_and_of_the_rest_it_does(activated):
    _, heard = activated
    warnings.warn("Using `torch.compile(module)` when there are global hooks on modules is slow", stacklevel=1)
    warnings.warn("Using something else when there are global hooks", stacklevel=1)
    assert [str(w.message)[:20] for w in heard] == ["Using something else"]


def test_a_plan_whose_ledger_cannot_be_written_is_not_active(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_active", None)
    monkeypatch.setenv("SHAKETABLE_PLAN", GAIN)
    monkeypatch.setenv("SHAKETABLE_LEDGER", str(tmp_path / "gone"))
    monkeypatch.setattr(process, "register_module_forward_pre_hook", lambda given: None)
    with warnings.catch_warnings(), pytest.raises(OSError, match="No such file"):
        process.activate()
    assert process.active() is None


def test_an_operator_of_a_graph_that_no_model_is_in_belongs_to_the_process():
    injection = ProcessInjection(Plan.parse("gain:1@op.matmul"))
    entry = injection.operators.tracing_entry()
    assert (entry.layer, entry.excluded, entry.owner) == (None, None, -1)
    assert [tap.name for tap in injection.operators.of("matmul", entry)] == ["matmul"]
