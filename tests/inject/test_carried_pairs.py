"""Modules of an engine that carry a residual beside their hidden states: what they take, hand on, and leave alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject import op, residual_pair
from shaketable.inject.injection import Injection
from shaketable.inject.passes import Entry
from shaketable.inject.residual_pair import PairTaps, carries_pair
from shaketable.plan import Plan

H, R = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[10.0, 20.0, 30.0, 40.0]])
SUM = H + R


def engine(kind):
    return type(kind.__name__, (kind,), {"__module__": "vllm.model_executor.models"})()


class Layer(nn.Module):
    """Takes and returns a pair."""

    def __init__(self):
        super().__init__()
        self.part, self.answer = nn.Identity(), None

    def forward(self, positions, hidden_states, residual, **more):
        self.seen = positions, hidden_states, residual, more
        return (hidden_states, residual) if self.answer is None else self.answer


class Norm(nn.Module):
    """Adds the residual, and hands the sum on beside what it normed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward_native(self, x, residual=None):
        self.seen = x, residual
        total = x if residual is None else x + residual
        return total / 10 if residual is None else (total / 10, total)

    def forward(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)


def on(block, plan, **options):
    model = nn.ModuleDict({"block": block})
    return st.inject(model, plan, allow_inert=True, **options)


@pytest.mark.parametrize(
    ("names", "carries"),
    [
        ("self, hidden_states, residual", True), ("self, positions, hidden_states, residual=None", True), ("self, x, residual", True),
        ("self, residual, x", True), ("self, hidden_states", False), ("self, residual", False), ("self, input, residual", False),
        ("self, *args, **kwargs", False), ("self", False),
    ],
)  # fmt: skip
def test_a_pair_is_hidden_states_and_a_residual_by_name(names, carries):
    scope = {}
    exec(f"def forward({names}): pass", scope)
    kind = type("Block", (nn.Module,), {"forward": scope["forward"]})
    assert carries_pair(engine(kind)) is carries and carries_pair(kind()) is False


def test_the_arguments_of_an_operator_that_takes_any_are_those_of_its_native_forward():
    assert residual_pair._arguments(engine(Norm)) == ["x", "residual"]
    bare = type("Bare", (nn.Module,), {"forward": lambda self, *args, **kwargs: None})
    assert residual_pair._arguments(bare()) == ["args", "kwargs"]
    named = type("Named", (Norm,), {"forward": lambda self, x, mask: None})
    assert residual_pair._arguments(named()) == ["x", "mask"], "its own names are its own"


CALLS = {
    "by place": lambda block: block("at", H, R),
    "by name": lambda block: block("at", hidden_states=H, residual=R),
    "mixed": lambda block: block("at", H, residual=R),
    "all by name": lambda block: block(positions="at", residual=R, hidden_states=H),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_layer_reads_the_faulty_sum_and_a_residual_of_zero_however_it_is_called(call):
    block = engine(Layer)
    with on(block, "gain:1@module.block,point=input") as ledger:
        found = CALLS[call](block)
    assert block.seen[0] == "at" and torch.equal(block.seen[1], 2 * SUM) and torch.equal(block.seen[2], torch.zeros(1, 4))
    assert block.seen[3] == {} and torch.equal(found[0], 2 * SUM) and ledger.forward == 1


def test_a_layer_that_is_called_without_a_residual_is_a_module_like_any_other():
    block = engine(Layer)
    with on(block, "gain:1@module.block,point=input") as ledger:
        block("at", H, None, more=3)
    assert torch.equal(block.seen[1], 2 * H) and block.seen[2] is None and block.seen[3] == {"more": 3} and ledger.forward == 1


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ((H, R), (2 * SUM, 0 * R)),
        ((H, R, "cache"), (2 * SUM, 0 * R, "cache")),
        ((H, R[:, :2]), (2 * H, R[:, :2])),
        ((H, None), (2 * H, None)),
        ((H,), (2 * H,)),
        (H, 2 * H),
        ([H, R], [2 * H, R]),
    ],
    ids=range(7),
)
def test_what_a_layer_returns_is_a_pair_where_it_is_a_tuple_of_two_that_are_alike(answer, wanted):
    block = engine(Layer)
    block.answer = answer
    with on(block, "gain:1@module.block") as ledger:
        found = block("at", H, R)
    assert type(found) is type(answer) and ledger.forward == 1
    pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else list(zip(found, wanted, strict=True))
    assert all(torch.equal(a, b) if isinstance(b, torch.Tensor) else a is b for a, b in pairs)


@pytest.mark.parametrize("point", ["input", "output"])
def test_backward_clauses_and_those_of_other_phases_leave_a_pair_as_it_is(point):
    for more in ("direction=backward", "phase=rollout"):
        block = engine(Layer)
        with on(block, f"gain:1@module.block,point={point},{more}") as ledger:
            found = block("at", H, R)
        assert found[0] is H and found[1] is R and block.seen[1] is H and block.seen[2] is R and ledger.forward == 0


@pytest.mark.parametrize("point", ["input", "output"])
def test_of_two_clauses_only_the_one_that_acts_touches_a_pair(point):
    block = engine(Layer)
    with on(block, f"gain:1@module.block,point={point},phase=rollout;gain:2@module.block,point={point}") as ledger:
        found = block("at", H, R)
    assert torch.equal(found[0], 3 * SUM) and torch.equal(found[1], 0 * R) and [s.forward for s in ledger.sites] == [0, 1]


# ---- norms


@pytest.mark.parametrize("call", [lambda n: n(H, R), lambda n: n(H, residual=R), lambda n: n(x=H, residual=R)])
def test_a_norm_reads_the_faulty_sum_and_hands_on_the_clean_one(call):
    norm = engine(Norm)
    with on(norm, "gain:1@module.block,point=input") as ledger:
        normed, stream = call(norm)
    assert torch.equal(norm.seen[0], 2 * SUM) and torch.equal(norm.seen[1], 0 * R)
    assert torch.equal(normed, 2 * SUM / 10) and torch.equal(stream, SUM) and ledger.forward == 1


def test_a_norm_that_no_fault_acts_on_hands_on_its_own_sum():
    norm = engine(Norm)
    with on(norm, "gain:1@module.block,point=input,phase=rollout"):
        seen = norm(H, R)
    assert norm.seen[0] is H and torch.equal(seen[1], SUM) and torch.equal(seen[0], SUM / 10)


def test_what_a_norm_is_to_hand_on_is_forgotten_after_it_and_when_no_fault_acts_the_next_time():
    norm = engine(Norm)
    with on(norm, "gain:1@module.block,point=input,phase=train+rollout") as ledger:
        (hook,) = {h for h in norm._forward_hooks.values() if isinstance(h, PairTaps)}
        norm(H, R)
        assert hook.total is None
        hook.total = 7 * SUM
        with st.phase("eval"):
            assert torch.equal(norm(H, R)[1], SUM)
    assert ledger.forward == 1


def test_a_norm_alone_hands_on_and_a_layer_does_not():
    for kind, hooks in ((Norm, 1), (Layer, 0)):
        block = engine(kind)
        with on(block, "gain:1@module.block,point=input"):
            assert sum(isinstance(h, PairTaps) for h in block._forward_hooks.values()) == hooks
            assert sum(isinstance(h, PairTaps) for h in block._forward_pre_hooks.values()) == 1
        with on(block, "gain:1@module.block,point=output"):
            assert sum(isinstance(h, PairTaps) for h in block._forward_hooks.values()) == 1
            assert not any(isinstance(h, PairTaps) for h in block._forward_pre_hooks.values())
        assert not block._forward_hooks and not block._forward_pre_hooks


def test_a_norm_without_a_residual_returns_one_tensor_that_is_left_alone_at_its_input_point():
    norm = engine(Norm)
    with on(norm, "gain:1@module.block,point=input") as ledger:
        assert torch.equal(norm(H), 2 * H / 10)
    with on(norm, "gain:1@module.block,point=output") as ledger:
        assert torch.equal(norm(H), 2 * H / 10) and torch.equal(norm(H, R)[1], SUM)
    assert ledger.forward == 2


def test_both_points_of_a_norm_act_in_one_call():
    norm = engine(Norm)
    with on(norm, "gain:1@module.block,point=input+output") as ledger:
        normed, stream = norm(H, R)
    assert torch.equal(normed, 4 * SUM / 10) and torch.equal(stream, SUM) and ledger.forward == 2


# ---- in a graph


def made(plan):
    injection = Injection(Plan.parse(plan, seed=0), rank=0, allow_inert=True)
    injection.enabled = True
    tap = injection.make_tap(0, "block", "output", None)
    current = injection.begin_compiled_pass(1)
    signed = current.key - (1 << 64) if current.key >= 1 << 63 else current.key
    return injection, tap, torch.tensor([signed, 1, 0, 1])


@pytest.mark.parametrize(("plan", "acts"), [("gain:1@module.block", True), ("gain:1@module.block,direction=backward", False)])
def test_the_operator_of_a_graph_makes_a_sum_faulty_when_it_runs(plan, acts):
    injection, tap, packed = made(plan)
    hidden, residual = torch.ops.shaketable.apply_to_sum(H, R, packed, tap.handle, 0)
    assert torch.equal(hidden, 2 * SUM if acts else H) and torch.equal(residual, 0 * R if acts else R)
    assert hidden is not H and residual is not R and injection.ledger.forward == int(acts)
    injection.enabled = False
    off = torch.ops.shaketable.apply_to_sum(H, R, packed, tap.handle, 0)
    assert torch.equal(off[0], H) and torch.equal(off[1], R) and off[0] is not H and off[1] is not R


def test_the_operator_of_a_graph_takes_the_clean_sum_back_where_a_fault_acted():
    injection, tap, packed = made("gain:1@module.block")
    found = torch.ops.shaketable.take_back(H, SUM, packed, tap.handle)
    assert torch.equal(found, SUM) and found is not SUM
    injection.enabled = False
    found = torch.ops.shaketable.take_back(H, SUM, packed, tap.handle)
    assert torch.equal(found, H) and found is not H


def test_while_a_graph_is_traced_a_norm_leaves_both_operators_in_it(monkeypatch):
    norm = engine(Norm)
    injection = Injection(Plan.parse("gain:1@module.block,point=input;gain:2@module.block,point=input"), allow_inert=True)
    injection.attach(nn.ModuleDict({"block": norm}))
    injection.enable()
    (hook,) = {h for h in norm._forward_hooks.values() if isinstance(h, PairTaps)}
    said = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    tracing = op.traces[injection.handle]
    monkeypatch.setattr(tracing, "packed", lambda x: "packed")
    ops = SimpleNamespace(
        apply_to_sum=lambda h, r, *how: said.append(("sum", *how)) or (h + r, torch.zeros_like(r)),
        take_back=lambda stream, total, *how: said.append(("back", torch.equal(total, SUM), *how)) or total,
    )
    monkeypatch.setitem(torch.ops.__dict__, "shaketable", ops)
    args, kwargs = hook(norm, (H, R), {})
    assert torch.equal(args[0], SUM) and torch.equal(args[1], 0 * R) and kwargs == {}
    found = hook(norm, (H, R), {}, ("normed", "stream"))
    assert found == ("normed", "stream"), "no pair of tensors"
    normed, stream, more = hook(norm, (H, R), {}, (H, R, "more"))
    first, second = (tap.handle for tap in injection.taps)
    assert said == [("sum", "packed", first, 0), ("sum", "packed", second, 0), ("back", True, "packed", first), ("back", True, "packed", second)]  # fmt: skip
    assert normed is H and torch.equal(stream, SUM) and more == "more"
    monkeypatch.undo()
    injection.close()


def test_pairs_are_alike_in_shape_and_both_tensors():
    assert residual_pair._alike(H, R) is True and residual_pair._alike(H, R[:, :1]) is False
    assert residual_pair._alike(H, None) is False and residual_pair._alike(None, R) is False


def test_a_hook_that_carries_a_pair_knows_where_its_arguments_are():
    _, tap, _ = made("gain:1@module.block")
    hook = PairTaps("output", [tap], Entry(1, nn.Identity(), None))
    block = engine(Layer)
    (handle,) = hook.install(block)
    assert hook.hidden == "hidden_states" and hook.places == {"hidden_states": 1, "residual": 2} and hook.is_norm is False
    assert [hook._name(i) for i in range(4)] == ["", "hidden_states", "residual", ""]
    assert hook._argument("residual", ("at", H), {"residual": R}) is R and hook._argument("residual", ("at", H, R), {}) is R
    assert hook._argument("residual", ("at", H), {}) is None
    handle.remove()
