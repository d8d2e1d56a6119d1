"""Products on a card, tried on a CPU: the short way gives the bits, the counts and the refusals of the ordinary one."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from card_on_cpu import card
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shaketable as st

__all__ = ["card"]
NOISE = "relative_gaussian:0.1@op.matmul"


class Net(nn.Module):
    """Products with and without a bias, on two, three and four dimensions, one of them twice."""

    def __init__(self, **options):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.options = options

    def body(self, x):
        return self.down(F.silu(self.up(x)))

    def forward(self, x):
        again = self.options.get("again")
        for _ in range(self.options.get("turns", 2)):
            x = x + (self.body(x) if again is None else checkpoint(self.body, x, use_reentrant=again))
        return x


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


def batch(*shape, grad=True, seed=1):
    return torch.randn(*shape, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def loss(y):
    return y.square().sum()


def told(ledger):
    """All that a ledger says but how long it took."""
    sites = ledger.to_dict()["sites"]
    for site in sites:
        del site["seconds"]
        for spot in site["spots"].values():
            del spot["seconds"]
    return sites


def shaken(program, model, plan=NOISE):
    """What `program(model, injection)` returns, the gradients of the parameters, and the ledger."""
    injection = st.inject(model, plan, seed=3, allow_inert=True).enable()
    found = program(model, injection)
    injection.close()
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)], told(injection.ledger)


def both_ways(card, program, plan=NOISE, **options):
    """The ledgers of a program under a plan, the short way and the ordinary one, whose values are equal; and how many launches."""
    short = shaken(program, net(**options), plan)
    made = len(card)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shaketable.inject.short.keyed.on_card", lambda x: False)
        ordinary = shaken(program, net(**options), plan)
    assert len(card) == made
    assert all(torch.equal(a, b) for a, b in zip(short[0], ordinary[0], strict=True))
    return short[1], ordinary[1], made


def agree(card, program, plan=NOISE, launches=True, **options):
    """The two ways agree in all that they say."""
    short, ordinary, made = both_ways(card, program, plan, **options)
    assert short == ordinary
    assert bool(made) == launches
    return short


def step(model, injection, shape=(4,), grad=True):
    x = batch(*shape, grad=grad)
    y = model(x)
    loss(y).backward()
    return [y.detach()] + ([x.grad] if grad else [])


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3), (1,), (1, 1)])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_the_noise_is_that_of_the_ordinary_way(card, shape, grad, direction):
    sites = agree(card, partial(step, shape=shape, grad=grad), f"{NOISE},direction={direction}")
    assert (sites[0]["forward"], sites[0]["backward"]) == (
        0 if direction == "backward" else 4,
        0 if direction == "forward" else 10 - (not grad),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("plan", [NOISE, "absolute_gaussian:0.1@op.matmul", "gain:0.1@op.matmul", f"{NOISE};{NOISE}"])
def test_types_and_faults(card, plan, dtype):
    def program(model, _):
        x = batch(2, 3).detach().to(dtype).requires_grad_()
        y = model.to(dtype)(x)
        loss(y).backward()
        return y.detach(), x.grad

    agree(card, program, plan, launches="gaussian" in plan and ";" not in plan and dtype is not torch.float64)


@pytest.mark.parametrize("again", [True, False])
def test_what_is_computed_twice_sees_the_same_noise(card, again):
    sites = agree(card, partial(step, shape=(2, 3)), again=again)
    plain = agree(card, partial(step, shape=(2, 3)))
    assert sites[0].pop("recomputed") > plain[0].pop("recomputed") == 0
    assert (sites[0]["forward"], sites[0]["backward"]) == (plain[0]["forward"], plain[0]["backward"])


def test_checkpointing_changes_no_value(card):
    found = [shaken(partial(step, shape=(2, 3)), net(again=again))[0] for again in (None, True, False)]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_checkpoint_that_keeps_products_does_not_strike_them_twice(card):
    """Selective checkpointing keeps what a product returned, the memory itself."""
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])

    def program(model, _):
        x = batch(4)
        y = checkpoint(model.body, x, use_reentrant=False, context_fn=keep)
        loss(y).backward()
        return y.detach(), x.grad

    def inside(model, injection):
        model.forward = partial(lambda net, x: program(net, None), model)
        return model(None)

    agree(card, inside, launches=False)


def test_two_forwards_before_their_backwards(card):
    def program(model, _, order=(1, 0)):
        losses = [loss(model(batch(4, seed=seed))) for seed in (1, 2)]
        for i in order:
            losses[i].backward()
        return [x.detach() for x in losses]

    agree(card, program)
    first, second = (shaken(partial(program, order=order), net())[0] for order in ((0, 1), (1, 0)))
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(first, second, strict=True))


def test_one_graph_twice(card):
    def program(model, _):
        x = batch(2, 3)
        y = loss(model(x))
        y.backward(retain_graph=True)
        once = x.grad.clone()
        y.backward()
        return once, x.grad

    sites = agree(card, program)
    assert sites[0]["backward"] == 20


def switch(injection):
    injection.disable()


def louder(injection):
    injection.set_magnitude(0.3)


def end(injection):
    injection.close(check=False)


@pytest.mark.parametrize("change", [switch, louder, end])
def test_what_changes_between_forward_and_backward(card, change):
    def program(model, injection):
        x = batch(4)
        y = model(x)
        change(injection)
        loss(y).backward()
        return y.detach(), x.grad

    sites = agree(card, program)
    assert sites[0]["backward"] == (10 if change is louder else 0)


def test_the_plan_switched_on_between_passes(card):
    def program(model, injection):
        found = []
        for on in (False, True):
            (injection.enable if on else injection.disable)()
            x = batch(4)
            loss(model(x)).backward()
            found.append(x.grad)
        return found

    agree(card, program)


def test_frozen_weights_and_adapters_beside_them(card):
    def program(model, _):
        for p in model.parameters():
            p.requires_grad_(False)
        a = nn.Parameter(torch.ones(2, 8) / 7)
        own = model.up.forward
        model.up.forward = lambda x: own(x) + F.linear(F.linear(x, a), torch.ones(16, 2))
        x = batch(2, 3)
        y = model(x)
        loss(y).backward()
        return y.detach(), x.grad, a.grad

    agree(card, program)


def called(model, call, *tensors):
    """`call` of the tensors as the model's own forward, and its gradients."""
    model.forward = call
    y = model(*tensors)
    loss(y).backward()
    return [y.detach(), *(t.grad for t in tensors if t.requires_grad)]


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).requires_grad_()


@pytest.mark.parametrize(
    ("call", "shapes", "launches"),
    [
        (lambda x, w: F.linear(x.transpose(0, 1), w), [(4, 3), (5, 4)], False),
        (lambda x, w: F.linear(x, w.t()), [(3, 4), (4, 5)], True),
        (lambda x, w, b: F.linear(x, w, b), [(3, 4), (5, 4), (3, 5)], False),
        (lambda x, w, b: F.linear(x, w, b), [(1, 4), (5, 4), (5,)], True),
        (lambda x, w: F.linear(x, w), [(4,), (5, 4)], False),
        (lambda x, w: F.linear(x, w), [(3, 4), (4,)], False),
        (lambda x, w: F.linear(x, w), [(3, 1), (1, 1)], True),
        (lambda x, w: F.linear(input=x, weight=w), [(3, 4), (5, 4)], False),
        (lambda x: F.linear(x, x), [(4, 4)], True),
        (lambda x, w: F.linear(x, w).relu_(), [(3, 4), (5, 4)], True),
        (lambda x, w, b: F.linear(x, w, b).relu_(), [(2, 3, 4), (5, 4), (5,)], True),
        (lambda x, w: torch.mm(x, w) @ w.t(), [(3, 4), (4, 5)], False),
    ],
)
def test_whatever_is_not_as_it_mostly_is(card, call, shapes, launches):
    def program(model, _):
        return called(model, call, *(leaf(*shape) for shape in shapes))

    agree(card, program, launches=launches)


class Own(torch.Tensor):
    """Somebody's own kind of tensor."""


def test_tensors_of_others(card):
    def program(model, _):
        return called(model, lambda x, w: F.linear(x, w), leaf(3, 4).detach().as_subclass(Own), leaf(5, 4))

    agree(card, program, launches=False)


class Keeping(TorchFunctionMode):
    """Keeps what products return, the memory itself."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.kept.append((result, result.detach().clone()))
        return result


def test_what_a_mode_of_others_keeps_stays_as_it_was(card):
    model, own = net(), Keeping()
    with own, st.inject(model, NOISE, seed=3) as ledger:
        loss(model(batch(4))).backward()
    assert (ledger.forward, ledger.backward) == (4, 10)
    assert len(own.kept) == 4
    assert all(torch.equal(a, b) for a, b in own.kept)


def cast_agree(card, program, plan=NOISE, **options):
    """As `agree`, but for what is measured: gradients of what is cast come later than others, and fires are numbered as they come."""
    *both, made = both_ways(card, program, plan, **options)
    counts = [{k: site[k] for k in ("forward", "backward", "recomputed", "matched", "phases")} for (site,) in both]
    assert counts[0] == counts[1]
    assert both[0][0]["measured_magnitude"] == pytest.approx(0.1, rel=0.3)
    return made


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3)])
def test_autocast_casts_before_the_product(card, shape, direction):
    """The error is on the gradient of what was given, in its own type, as an echo would have it."""

    def program(model, injection):
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, injection, shape)

    made = cast_agree(card, program, f"{NOISE},direction={direction}")
    assert made == {"forward": 4, "backward": 10, "both": 14}[direction]


@pytest.mark.parametrize("together", [False, True])
def test_autocast_over_one_pass_and_over_two(card, together):
    """Autocast keeps what it has cast until it is left."""

    def program(model, _):
        found = []
        with torch.autocast("cpu", torch.bfloat16, enabled=together):
            for seed in (1, 2):
                with torch.autocast("cpu", torch.bfloat16):
                    found.append(model(batch(2, 3, seed=seed)))
        for y in reversed(found):
            loss(y).backward()
        return [y.detach() for y in found]

    assert cast_agree(card, program, turns=1) == 4 + 10


@pytest.mark.parametrize("again", [True, False])
def test_autocast_and_checkpointing(card, again):
    def program(model, injection):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch(2, 3))
        loss(y).backward()
        return [y.detach()]

    assert cast_agree(card, program, again=again)


def test_autocast_and_frozen_weights(card):
    def program(model, injection):
        for p in model.parameters():
            p.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, injection, (2, 3))

    assert cast_agree(card, program)


def test_some_gradients_alone(card):
    def program(model, _):
        x = batch(4)
        y = loss(model(x))
        return [*torch.autograd.grad(y, [model.down.weight], retain_graph=True), *torch.autograd.grad(y, [x])]

    agree(card, program)


def test_gradients_of_gradients_are_refused(card):
    def program(model, _):
        x = batch(4)
        (g,) = torch.autograd.grad(loss(model(x)), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            loss(g).backward()
        return [g.detach()]

    agree(card, program)


@pytest.mark.parametrize(
    "other", ["relative_gaussian:0.2@op.matmul", "gain:0.1@op.matmul", "relative_gaussian:0.2@module.linear"]
)
@pytest.mark.parametrize("first", [True, False])
def test_two_plans_at_once(card, other, first):
    def program(model, injection):
        if first:
            injection.disable()
        second = st.inject(model, other, seed=9).enable()
        injection.enable()
        found = step(model, injection, (2, 3))
        second.close()
        return found

    agree(card, program)


def test_hooks_of_others_see_what_they_would(card):
    def program(model, injection):
        seen = []
        model.up.register_full_backward_hook(lambda module, before, after: seen.extend([*before, *after]))
        model.down.register_forward_hook(lambda module, args, y: y.register_hook(lambda g: seen.append(g.clone())) and None)
        return [*step(model, injection, (2, 3)), *seen]

    agree(card, program)


def test_copies_are_clean_and_closing_leaves_no_trace(card):
    model = net()
    clean = step(model, None)
    model.zero_grad()
    with st.inject(model, NOISE, seed=3):
        step(model, None)
        twin = copy.deepcopy(model)
    assert card
    twin.zero_grad()
    model.zero_grad()
    for after in (model, twin):
        assert all(torch.equal(a, b) for a, b in zip(step(after, None), clean, strict=True))


def test_what_is_measured_is_what_was_asked_for(card):
    model = net()
    with st.inject(model, NOISE, seed=3) as ledger:
        for seed in range(4):
            loss(model(batch(400, seed=seed))).backward()
    assert card
    assert ledger.sites[0].magnitude == pytest.approx(0.1, rel=0.02)
    assert ledger.sites[0].measured("backward").fires < ledger.backward / 2
