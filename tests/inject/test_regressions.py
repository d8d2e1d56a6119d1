"""Bugs that users met, each through the public API."""

import threading

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError

X = torch.linspace(-2, 2, 8).view(2, 4)


class InPlace(nn.Module):
    """Uses an activation for what it does to its input, not for what it returns."""

    def __init__(self, act=None):
        super().__init__()
        self.proj, self.act = nn.Linear(4, 4), nn.SiLU(inplace=True) if act is None else act

    def forward(self, x):
        h = self.proj(x)
        self.act(h)
        return h


class WrittenOut(nn.Module):
    """A SiLU in Python."""

    inplace = True

    def forward(self, x):
        return x.mul_(torch.sigmoid(x))


def inside(kind):
    torch.manual_seed(0)
    return InPlace(WrittenOutSiLU() if kind == "written out" else None)


class WrittenOutSiLU(WrittenOut):
    pass


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("kind", ["torch", "written out"])
def test_an_activation_in_place_is_left_alone_when_off_and_hit_in_place_when_on(kind, direction, grad):
    model = inside(kind)
    with torch.set_grad_enabled(grad):
        clean = model(X).detach()
        injection = st.inject(model, f"gain:1@op.silu,direction={direction}", allow_inert=True).enable()
        on = model(X)
        assert torch.allclose(on, clean if direction == "backward" else 2 * clean)
        if grad:
            on.sum().backward()
            assert injection.ledger.backward == (direction != "forward")
        injection.disable()
        assert torch.equal(model(X), clean)
        injection.enable().set_magnitude(0)
        assert torch.equal(model(X), clean)
        injection.close()


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_an_activation_in_place_is_hit_in_place_when_compiled(backend, fresh_graphs):
    model = inside("torch")
    call = torch.compile(model, backend=backend)
    clean = call(X).detach()
    injection = st.inject(model, "gain:1@op.silu").enable()
    on = call(X)
    on.sum().backward()
    assert torch.allclose(on, 2 * clean) and (injection.ledger.forward, injection.ledger.backward) == (1, 1)
    injection.disable()
    assert torch.equal(call(X), clean)
    injection.close()


@pytest.mark.parametrize(
    ("plan", "twice"),
    [
        ("gain:1@module.linear,point=output+output", "point names output twice"),
        ("gain:1@op.matmul+silu+matmul", "matmul is named twice"),
        ("gain:1@module.linear+linear", "linear is named twice"),
        ("gain:1@module.linear,phase=train+train", "phase names train twice"),
    ],
)
def test_what_is_named_twice_is_refused(plan, twice):
    with pytest.raises(PlanError, match=twice):
        st.inject(nn.Linear(4, 4), plan)


def test_overlapping_names_hit_a_module_once():
    model = nn.Sequential()
    model.add_module("up_proj", nn.Linear(4, 4))
    with st.inject(model, "gain:1@module.linear+up_proj") as ledger:
        y = model(X)
    assert ledger.forward == 1 and torch.allclose(y, 2 * model(X))


def test_a_clause_that_is_not_there_has_no_magnitude_to_set():
    injection = st.inject(nn.Linear(4, 4), "gain:1@module.linear;mxfp4@module.linear", allow_inert=True)
    with pytest.raises(PlanError, match="no clause 7; this plan has clauses 0 to 1"):
        injection.set_magnitude(0.1, clause=7)
    with pytest.raises(PlanError, match="clause 1, mxfp4, has no magnitude"):
        injection.set_magnitude(0.1, clause=1)
    injection.set_magnitude(0.5)
    assert injection.ledger.sites[0].asked == 0.5


@pytest.mark.parametrize(
    ("plan", "magnitude", "message"),
    [
        ("mxfp4@module.linear", 0.1, "no clause of this plan has a magnitude"),
        ("gain:1@module.linear", -1, "gain: magnitude: Input should be greater than or equal to 0"),
        ("gain:1@module.linear", float("nan"), "gain: magnitude: Input should be a finite number"),
        ("gain:1@module.linear;bit_flip:0.1@module.linear", 2, "bit_flip: magnitude: Input should be less than or equal to 1"),
    ],
)
def test_a_magnitude_that_cannot_be_set_changes_nothing(plan, magnitude, message):
    injection = st.inject(nn.Linear(4, 4), plan, allow_inert=True)
    before = list(injection.faults)
    with pytest.raises(PlanError, match=message):
        injection.set_magnitude(magnitude)
    assert injection.faults == before


def test_a_plan_that_another_thread_closed_leaves_no_mode_on():
    modes = torch.overrides._get_current_function_mode_stack
    first = st.inject(nn.Linear(4, 4), "gain:1@op.matmul", allow_inert=True).enable()
    thread = threading.Thread(target=first.close)
    thread.start()
    thread.join()
    model = nn.Linear(4, 4)
    second = st.inject(model, "gain:1@module.linear").enable()
    assert modes() == []
    model(X)
    second.close()


def test_a_model_with_an_open_injection_is_named_when_it_is_injected_again():
    model = nn.Linear(4, 4)
    first = st.inject(model, "gain:1@module.linear").enable()
    with pytest.warns(RuntimeWarning, match=r"already has an open injection \(gain:1@module.linear\).*close\(\)"):
        second = st.inject(model, "gain:2@module.linear").enable()
    model(X)
    first.close(), second.close()
    st.inject(model, "gain:1@module.linear", allow_inert=True)


def test_a_plan_within_the_with_of_another_is_meant(recwarn):
    model = nn.Linear(4, 4)
    with st.inject(model, "gain:1@module.linear"), st.inject(model, "gain:2@module.linear"):
        model(X)
    assert not recwarn


def test_the_ledger_names_a_magnitude_that_was_set_beside_the_one_of_the_plan():
    model = nn.Linear(4, 4)
    injection = st.inject(model, "gain:1@module.linear").enable()
    model(X), model(X)
    assert "now" not in str(injection.ledger)
    injection.set_magnitude(0.25)
    assert "gain:1, now 0.25" in str(injection.ledger) and "gain:1, now 0.25" in injection.ledger.sites[0].summary()
    assert "asked for 0.25, measured 1: the magnitude was changed in between" in str(injection.ledger)
    injection.close()


@pytest.mark.parametrize("moved", [False, True])
def test_the_head_of_a_second_model_is_left_alone(moved):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.lm_head = nn.Linear(4, 4), nn.Linear(4, 6)

        def forward(self, x):
            return torch.nn.functional.linear(self.body(x), self.lm_head.weight)

    first, second = Net(), Net()
    injection = st.inject(first, "gain:1@op.matmul,direction=forward").enable()
    first(X)
    injection.attach(second)
    if moved:
        second(X)
        second.lm_head.weight = nn.Parameter(second.lm_head.weight.clone())
    before = injection.ledger.forward
    second(X)
    assert injection.ledger.forward == before + 1
    injection.close()


PRODUCTS_WITH_A_HEAD = {
    "transposed": lambda x, weight: x @ weight.t(),
    "as an attribute": lambda x, weight: x @ weight.T,
    "a tile": lambda x, weight: x @ weight[:3].t(),
    "cast": lambda x, weight: torch.nn.functional.linear(x, weight.to(torch.float64).float()),
    "a tile, cast": lambda x, weight: x @ weight[:3].double().float().t(),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("product", PRODUCTS_WITH_A_HEAD.values(), ids=PRODUCTS_WITH_A_HEAD)
def test_a_view_or_a_cast_of_a_head_is_the_head(product, is_compiled, grad, fresh_graphs):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.lm_head = nn.Linear(4, 4), nn.Linear(4, 6)

        def forward(self, x):
            return product(self.body(x), self.lm_head.weight)

    model = Net()
    with st.inject(model, "gain:1@op.matmul,direction=forward") as ledger, torch.set_grad_enabled(grad):
        (torch.compile(model, backend="aot_eager") if is_compiled else model)(X)
    assert ledger.forward == 1


class ReadsOutside(nn.Linear):
    """Multiplies in a function that dynamo leaves out of its graphs."""

    @torch._dynamo.disable
    def product(self, x):
        return torch.nn.functional.linear(x, self.weight)

    def forward(self, x):
        return self.product(x) + self.product(2 * x)


def test_a_weight_that_is_read_between_the_graphs_of_a_compiled_model_is_faulty():
    torch._dynamo.reset()
    model, x = nn.Sequential(ReadsOutside(4, 4, bias=False)), torch.ones(1, 4)
    clean = model(x).detach()
    with st.inject(model, "gain:1@module.ReadsOutside,point=weight") as ledger:
        compiled = torch.compile(model, backend="eager")
        for fires in (1, 2):
            assert torch.allclose(compiled(x), 2 * clean) and ledger.forward == fires
    assert torch.equal(torch.compile(model, backend="eager")(x), clean)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "environments",
    [
        [{"SLURM_PROCID": "0"}, {"SLURM_PROCID": "1"}],
        [{"SLURM_PROCID": "0", "LOCAL_RANK": "0"}, {"SLURM_PROCID": "0", "LOCAL_RANK": "1"}],
        [{"SLURM_PROCID": "1", "SHAKETABLE_PLACE": "5:Sampler#1"}, {"SLURM_PROCID": "1", "SHAKETABLE_PLACE": "6:Sampler#2"}],
        [{"OMPI_COMM_WORLD_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "1"}],
    ],
    ids=["slurm", "one slurm task", "ray under slurm", "mpi"],
)
def test_ranks_of_a_launcher_that_makes_no_process_group_have_noise_of_their_own(monkeypatch, environments):
    monkeypatch.delenv("RANK", raising=False)
    found = []
    for environment in environments:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        with st.inject(model, "relative_gaussian:0.1@module.linear"):
            found.append(model(X))
    assert not torch.equal(*found)
