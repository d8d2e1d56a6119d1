"""Weights made ready at the head of a pass, and formats on inputs without hooks: the GPU's way, tried on a CPU.

Kernels run in Triton's interpreter. What the general path does is the same model without that: bits are compared.
"""

import copy
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.faults.gpu import batched, dispatch
from shaketable.inject import attach
from shaketable.inject.fast import inputs as fast_inputs
from shaketable.inject.fast import linear
from shaketable.inject.injection import Injection
from shaketable.inject.weights import on_read, prepared
from shaketable.plan import Plan

pytestmark = [
    pytest.mark.skipif(dispatch._kernels() is None, reason="no Triton here"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="no interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SHIFT = "systematic_bias:0.3@module.linear"
W4A4, W4, AQN = "mxfp4@module.linear", "mxfp4@module.linear,point=weight", "rms_gaussian:0.1@module.rmsnorm,point=weight"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.q_proj, self.k_proj, self.down = nn.Linear(32, 64), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)
        self.unused = nn.Linear(32, 32)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(self.q_proj(h) * self.k_proj(h).sigmoid())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x, during=None):
        for layer in self.layers:
            x = layer(x)
            if during is not None:
                during()
        return x

    def generate(self, n=3):
        return [self(inputs()) for _ in range(n)]


def inputs(rows=3):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


@pytest.fixture
def kernels(monkeypatch):
    """Kernels take tensors of the CPU, on both ways."""
    monkeypatch.setattr(dispatch, "fits", lambda x: x.dtype in dispatch._floats() and x.numel() > 0)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def gpu(monkeypatch, kernels):
    """All that asks for a GPU is told that there is one."""
    with monkeypatch.context() as patch:
        for module in (linear, fast_inputs, on_read):
            patch.setattr(module, "on_gpu", lambda module: True)
        patch.setattr(prepared, "is_on_gpu", lambda parameter: True)
        patch.setattr(fast_inputs, "is_capturing", lambda: False)
        patch.setattr(fast_inputs, "_on_gpu", lambda x: type(x) is torch.Tensor)
        patch.setattr(attach.Attached, "_is_fast", lambda self, part, entry, tapped: part.module in self.anatomy.layers)
        yield patch


def made(plan, hold=False, net=None, **more):
    net = Stack().eval() if net is None else net
    injection = Injection(Plan.parse(plan, seed=3), hold=hold, **more)
    injection.attach(net)
    return net, injection.enable()


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel of many was launched."""
    seen = {"quantize_many": 0, "draw_many": 0}
    original = dispatch.launch

    def launch(kernel, *args, **kwargs):
        name = kernel.__name__
        seen[name] = seen.get(name, 0) + 1
        return original(kernel, *args, **kwargs)

    monkeypatch.setattr(dispatch, "launch", launch)
    return seen


def both_ways(run, gpu):
    """What a function gives on the GPU's way and on the ordinary one."""
    short = run()
    gpu.undo()
    return short, run()


def told(injection):
    return [{k: v for k, v in s.items() if k != "seconds" and k != "spots"} for s in injection.ledger.to_dict()["sites"]]


@torch.no_grad()
@pytest.mark.parametrize("plan", [W4A4, W4, "mxfp4@module.linear,point=input", "fp8_e4m3@module.linear", "nvfp4@module.linear"])
def test_values_counts_and_measurements_are_those_of_hooks(plan, gpu):
    def run():
        net, injection = made(plan)
        found = [net(inputs(rows)) for rows in (3, 3, 5, 3, 3)]
        injection.close()
        return found, told(injection)

    (short, ledger), (hooked, other) = both_ways(run, gpu)
    assert all(torch.equal(a, b) for a, b in zip(short, hooked, strict=True))
    assert ledger == other
    assert ledger[0]["forward"] == 5 * 6 * (1 if "point" in plan else 2)


@torch.no_grad()
def test_one_launch_quantizes_all_weights_of_a_pass(gpu, launches):
    net, injection = made(W4)
    for n in range(3):
        net(inputs())
        assert launches["quantize_many"] == n
    assert launches["quantize"] == 6, "the first pass went the general path"
    assert {len(group.entries) for group in injection.prepared_of(0)._groups.values()} == {6}, "what nobody reads is not made"
    injection.close()


@torch.no_grad()
def test_a_weight_written_through_data_is_seen_in_the_next_pass(gpu):
    net, injection = made(W4A4)
    for _ in range(2):
        net(inputs())
    for p in net.parameters():
        p.data.zero_()
    assert torch.equal(net(inputs()), inputs())
    injection.close()


@torch.no_grad()
@pytest.mark.parametrize("plan", [W4, W4A4])
def test_a_weight_that_is_written_moved_or_replaced_in_the_middle_of_a_pass_is_seen(plan, gpu):
    def run():
        net, injection = made(plan)
        seen, last = [net(inputs()), net(inputs())], net.layers[1].down

        def write():
            last.weight.mul_(0.7)

        def move():
            last.weight.data = last.weight.data * 1.3

        def replace():
            last._parameters["weight"] = nn.Parameter(torch.linspace(-1, 1, 32 * 64).view(32, 64))

        for change in (write, move, replace):
            seen += [net(inputs(), change), net(inputs())]
        injection.close()
        return seen, told(injection)

    (short, ledger), (hooked, other) = both_ways(run, gpu)
    assert all(torch.equal(a, b) for a, b in zip(short, hooked, strict=True))
    assert len({y.numpy().tobytes() for y in short}) >= 5
    assert ledger == other


@torch.no_grad()
def test_inside_a_rollout_weights_are_quantized_once(gpu, launches):
    net, injection = made(W4)
    net(inputs())
    with st.phase("rollout"):
        first = net.generate(4)
        assert launches["quantize_many"] == 1
        net.layers[0].down.weight.mul_(3.0)
        assert not torch.equal(net(inputs()), first[0])
        assert launches["quantize_many"] == 2
    with st.phase("rollout"):
        net.generate(2)
    assert launches["quantize_many"] == 3
    injection.close()


@torch.no_grad()
def test_only_this_thread_and_only_the_module_itself_read_the_ready_value(gpu):
    net, injection = made(W4)
    for _ in range(2):
        net(inputs())
    linear, seen = net.layers[0].down, {}
    parameter = linear._parameters["weight"]
    forward = nn.functional.linear

    def peek():
        seen["between"] = linear.weight
        thread = threading.Thread(target=lambda: seen.__setitem__("other", linear.weight))
        thread.start()
        thread.join()

    def inside(x, weight, bias=None):
        if weight.shape == parameter.shape and "own" not in seen:
            seen["own"] = weight
            peek_other = threading.Thread(target=lambda: seen.__setitem__("meanwhile", linear.weight))
            peek_other.start()
            peek_other.join()
        return forward(x, weight, bias)

    gpu.setattr(nn.functional, "linear", inside)
    net(inputs(), peek)
    assert seen["own"] is not parameter
    assert seen["other"] is seen["between"] is seen["meanwhile"] is linear.weight is parameter
    injection.close()


@torch.no_grad()
def test_a_pass_of_another_thread_does_without(gpu, launches):
    net, injection = made(W4)
    for _ in range(2):
        expected = net(inputs())
    found = []

    def during():
        if not found:
            thread = threading.Thread(target=lambda: found.append(grad_free(net)))
            thread.start()
            thread.join()

    before = launches["quantize_many"]
    assert torch.equal(net(inputs(), during), expected)
    assert torch.equal(found[0], expected)
    assert launches["quantize_many"] == before + 1
    assert injection.ledger.forward == 4 * 6
    injection.close()


def grad_free(net):
    with torch.no_grad():
        return net(inputs())


def test_passes_with_gradients_take_the_general_path(gpu):
    def run():
        net, injection = made(W4A4)
        x = inputs().requires_grad_()
        grad_free(net), grad_free(net)
        net(x).sum().backward()
        seen = [x.grad, *(p.grad for p in net.parameters() if p.grad is not None), grad_free(net)]
        injection.close()
        return seen, told(injection)

    (short, ledger), (hooked, other) = both_ways(run, gpu)
    assert all(torch.equal(a, b) for a, b in zip(short, hooked, strict=True))
    assert ledger == other


@torch.no_grad()
def test_an_exception_closes_the_pass(gpu):
    net, injection = made(W4A4, allow_inert=True)
    for _ in range(2):
        expected = net(inputs())

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        net(inputs(), fail)
    prepared = injection.prepared_of(0)
    assert prepared.frame is None and not any(group.frame for group in prepared._groups.values())
    linear = net.layers[0].down
    assert linear.weight is linear._parameters["weight"]
    assert torch.equal(net(inputs()), expected)
    injection.close()


@torch.no_grad()
def test_off_is_clean_and_closing_leaves_no_trace(gpu):
    net = Stack().eval()
    clean = net(inputs())
    kinds = [type(m) for m in net.modules()]
    _, injection = made(f"{W4A4};{AQN}", net=net)
    for _ in range(2):
        assert not torch.equal(net(inputs()), clean)
    assert not any(m._forward_hooks or m._forward_pre_hooks for layer in net.layers for m in layer.children())
    injection.disable()
    assert torch.equal(net(inputs()), clean)
    injection.enable()
    seen = []
    with pytest.raises(AssertionError):
        net(inputs(), lambda: [injection.disable(), seen.append(1), exec("assert 0")])
    injection.enable()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert [type(m) for m in twin.modules()] == kinds
        assert not [name for m in twin.modules() for name in vars(m) if "shaketable" in name]
        assert torch.equal(twin(inputs()), clean)
    injection.close()
    assert [type(m) for m in net.modules()] == kinds
    assert not [name for m in net.modules() for name in vars(m) if "shaketable" in name]
    assert torch.equal(net(inputs()), clean)


@torch.no_grad()
def test_switched_off_in_the_middle_of_a_pass(gpu):
    def run():
        net, injection = made(W4A4)
        grad_free(net), grad_free(net)
        seen = net(inputs(), injection.disable)
        injection.close()
        return seen, told(injection)

    (short, ledger), (hooked, other) = both_ways(run, gpu)
    assert torch.equal(short, hooked)
    assert ledger == other


@torch.no_grad()
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "plans",
    [
        (W4A4, f"{SHIFT},point=weight"),
        (f"{SHIFT},point=weight", W4A4),
        (W4A4, f"{SHIFT},point=weight+input"),
        (f"{SHIFT},point=weight+input", W4A4),
        (W4A4, f"{SHIFT};mxfp4@module.rmsnorm,point=weight"),
    ],
)
def test_two_plans_on_the_same_linears_come_off_in_any_order(plans, order, gpu):
    def run():
        net = Stack().eval()
        seen = [net(inputs())]
        both = [made(plan, net=net)[1] for plan in plans]
        seen += [net(inputs()) for _ in range(3)]
        for i in order:
            both[i].close()
            seen += [net(inputs()) for _ in range(2)]
        assert all(type(m) is nn.Linear for layer in net.layers for m in layer.children() if m is not layer.norm)
        assert torch.equal(seen[0], seen[-1])
        return seen, [told(injection) for injection in both]

    (short, ledgers), (hooked, others) = both_ways(run, gpu)
    assert all(torch.equal(a, b) for a, b in zip(short, hooked, strict=True))
    assert ledgers == others


@torch.no_grad()
def test_linears_that_share_an_input_share_its_quantization(gpu, launches):
    net, injection = made("mxfp4@module.linear,point=input")
    net(inputs())
    before = launches["quantize"]
    net(inputs())
    assert launches["quantize"] == before + 2 * 2, "once for queries and keys, once for what comes down"
    assert injection.ledger.forward == 2 * 6
    injection.close()


@torch.no_grad()
def test_an_input_written_to_between_two_linears_is_quantized_again(gpu):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            x = x.clone()
            y = self.a(x)
            x.mul_(3.7)
            return y + self.b(x)

    def run():
        net, injection = made("mxfp4@module.linear,point=input", net=Writes())
        seen = [net(inputs()) for _ in range(3)]
        with torch.inference_mode():
            seen.append(net(inputs()).clone())
        injection.close()
        return seen

    short, hooked = both_ways(run, gpu)
    assert all(torch.equal(a, b) for a, b in zip(short, hooked, strict=True))


@torch.no_grad()
def test_a_compiled_model_has_the_same_weights(gpu):
    net, injection = made(W4A4)
    expected = net(inputs())
    net.compile(backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(net(inputs()), expected)
    assert injection.ledger.forward == 3 * 12
    injection.close()
    torch._dynamo.reset()


class Careful(nn.Linear):
    """Looks at its weight before it multiplies with it."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class Odd(nn.Module):
    """A module that reads its weight twice, and two that are wanted without a gradient and then with one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.careful, self.linear, self.norm = Careful(32, 32), nn.Linear(32, 32), nn.RMSNorm(32)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        x = self.careful(x) + self.linear(self.norm(x))
        with torch.enable_grad():
            y = self.norm(self.linear(x)).square().sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(y, [*self.linear.parameters(), *self.norm.parameters()])])


@torch.no_grad()
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("fault", ["mxfp4", "rms_gaussian:0.1"])
def test_reads_that_repeat_and_gradients_in_the_middle_of_a_pass(fault, hold, gpu):
    def run():
        net, injection = made(f"{fault}@module.Careful+linear+rmsnorm,point=weight", hold=hold, net=Odd())
        with st.phase("rollout"):
            seen = [net(inputs()) for _ in range(4)]
        injection.close()
        return seen, [{k: site[k] for k in ("forward", "backward", "phases", "layers")} for site in told(injection)]

    (short, ledger), (hooked, other) = both_ways(run, gpu)
    for a, b in zip(short, hooked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert ledger == other


@torch.no_grad()
@pytest.mark.parametrize("plan", [W4A4, f"{AQN},phase=rollout"])
def test_modules_that_are_called_outside_of_a_pass_are_hit(plan, gpu):
    def run():
        net, injection = made(plan, hold=AQN in plan)
        seen = []
        for _ in range(3):
            with st.phase("rollout"):
                seen += [net(inputs()), net.layers[0](inputs()), net.layers[1].norm(inputs()), net.layers[0].q_proj(inputs())]
        injection.close()
        return seen, injection.ledger.forward

    (short, fires), (hooked, others) = both_ways(run, gpu)
    for a, b in zip(short, hooked, strict=True):
        torch.testing.assert_close(a, b)
    assert fires == others


# ---- noise that is held


@torch.no_grad()
@pytest.mark.parametrize("fault", ["rms_gaussian", "absolute_gaussian", "relative_gaussian"])
def test_held_noise_is_that_of_the_general_path(fault, gpu, launches):
    def run():
        net, injection = made(f"{fault}:0.1@module.rmsnorm,point=weight,phase=rollout", hold=True)
        seen = []
        for step in range(3):
            injection.step = step
            with st.phase("rollout"):
                seen += net.generate()
            seen.append(net(inputs()))
        injection.close()
        return seen, injection

    (short, injection), (hooked, other) = both_ways(run, gpu)
    for a, b in zip(short, hooked, strict=True):
        torch.testing.assert_close(a, b)
    assert launches["draw_many"] == 2, "the first draw is made one by one"
    mine, theirs = told(injection)[0], told(other)[0]
    assert mine["forward"] == theirs["forward"] == 3 * 2
    assert injection.ledger.sites[0].measured().fires == 6
    for name in ("measured_magnitude", "measured_error", "changed_fraction", "survival_rate"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name


@torch.no_grad()
def test_a_forward_in_the_held_state_draws_nothing_and_sees_every_change(gpu, launches):
    net, injection = made(f"{AQN},phase=rollout", hold=True)
    net.generate()
    with st.phase("rollout"):
        first = net.generate()
        assert all(torch.equal(first[0], y) for y in first)
        assert launches["draw_many"] == 1
        net.layers[0].norm.weight.mul_(2.0)
        second = net.generate()
        assert not torch.equal(first[0], second[0])
        injection.set_magnitude(0.2)
        third = net.generate()
        assert not torch.equal(second[0], third[0])
        injection.set_magnitude(0)
        twin = copy.deepcopy(net)
        assert torch.equal(net(inputs()), twin(inputs()))
    assert injection.ledger.forward == 2 + 2 + 2, "a draw is counted once per key and magnitude"
    injection.close()


@torch.no_grad()
def test_a_draw_that_nobody_reads_is_not_counted(gpu):
    net, injection = made(f"{AQN},phase=rollout", hold=True)
    net.generate()
    assert injection.ledger.forward == 2
    with st.phase("rollout"), pytest.raises(ZeroDivisionError):
        net(inputs(), lambda: 1 / 0)
    assert injection.ledger.forward == 3
    assert injection.ledger.sites[0].measured().fires == 3
    net.generate()
    assert injection.ledger.forward == 5
    injection.close()


@torch.no_grad()
def test_noisy_weights_stay_at_one_address(gpu):
    """Captured graphs go on reading there."""
    net, injection = made(f"{AQN},phase=rollout", hold=True)
    tap = injection.models[0].weights[0][1].tap
    net.generate()
    net.generate()
    home = tap._kept.value
    net.generate()
    assert tap._kept.value is home
    injection.close()


@torch.no_grad()
def test_a_step_and_its_rollout_ask_the_gpu_once_and_write_no_table(gpu, launches, monkeypatch):
    """AQN as a training has it: each wait stops a host that should run ahead, and a table would be written in Python."""
    net = Stack().eval()
    asked, tables, tolist, laid_out = [], [], torch.Tensor.tolist, batched.Drawn.__init__
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(1) or tolist(self))
    monkeypatch.setattr(batched.Drawn, "__init__", lambda *args: tables.append(1) or laid_out(*args))
    with st.AQN.load("constant:0.1").attach(net, 100) as noise:
        for step in range(1, 6):
            before = len(asked)
            noise.step = step
            with st.phase("rollout"):
                net.generate()
            if step > 2:
                assert len(asked) == before + 1, "what the draw of the step before has changed"
        assert launches["draw_many"] == 4, "the first is made one by one"
        assert len(tables) == 1
        found = noise.ledger
        assert (found.forward, found.sites[0].magnitudes) == (5 * 2, 5 * 2)
        assert found.sites[0].asked == pytest.approx(0.1)


class Square(nn.Module):
    """Weights that can be turned around where they are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


@torch.no_grad()
def test_weights_that_are_written_turned_or_moved_between_rollouts_or_in_them_are_seen(gpu, launches):
    def run():
        net, injection = made("rms_gaussian:0.1@module.linear,point=weight,phase=rollout", hold=True, net=Square())
        seen, weight = [], net.a.weight

        def replace():
            net.a._parameters["weight"] = nn.Parameter(torch.linspace(-1, 1, 32 * 32).view(32, 32))

        changes = [
            lambda: None,
            lambda: None,
            lambda: weight.add_(1.0),
            lambda: weight.data.mul_(0.5),
            lambda: setattr(weight, "data", weight.data.t()),
            lambda: setattr(weight, "data", weight.data.clone()),
            replace,
        ]
        for change in changes:
            change()
            for _ in range(2):
                with st.phase("rollout"):
                    seen += [net(inputs()), net(inputs())]
        with st.phase("rollout"):
            for own in (net.a, net.b, net.a):
                own.weight.mul_(1.1)
                seen.append(net(inputs()))
        injection.close()
        return seen, injection

    (short, injection), (hooked, other) = both_ways(run, gpu)
    for n, (a, b) in enumerate(zip(short, hooked, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda found, n=n: f"{n}: {found}")
    assert launches["draw_many"] >= 10
    mine, theirs = told(injection)[0], told(other)[0]
    assert mine["forward"] == theirs["forward"] == 15 * 2
    assert mine["measured_magnitude"] == pytest.approx(theirs["measured_magnitude"], rel=1e-4)


@torch.no_grad()
def test_a_resumed_run_draws_the_same_noise(gpu):
    """Keys are made on the GPU from the moment and the place: of the step, and not of how often was drawn before."""

    def rollouts(steps):
        net, injection = made(f"{AQN},phase=rollout", hold=True, allow_inert=True)
        found = {}
        for step in steps:
            injection.step = step
            found[step] = [y for _ in range(2) for y in net.generate(1)]
        injection.close()
        return found

    whole, resumed = rollouts(range(4)), rollouts([2, 3])
    for step in (2, 3):
        torch.testing.assert_close(whole[step], resumed[step])
    seen = [y.numpy().tobytes() for step in whole.values() for y in step]
    assert len(set(seen)) == 8
