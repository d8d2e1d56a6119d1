"""Weights under any order of writing, moving, replacing, switching, phases, threads and failures: faulty where a plan says, clean elsewhere.

One machine for weights that are faulty when they are read, and one for those that are written into a sampling engine. Gains of 1
and 3 multiply by powers of two, so the expected results are exact.
"""

import copy
import threading
from itertools import count

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

import shaketable as st
from shaketable.inject.injection import Injection
from shaketable.plan import Plan

X = torch.tensor([[1.0, -2.0, 0.5, 4.0], [0.25, 1.0, -1.0, 2.0]])
GAINS = some.sampled_from([0.0, 1.0, 3.0])


class Fails(nn.Linear):
    """A linear that raises after its product when it is told to."""

    fails = False

    def forward(self, x):
        y = super().forward(x)
        if self.fails:
            raise ZeroDivisionError
        return y


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (Fails(4, 4, bias=False) for _ in "ab")
        with torch.no_grad():
            for i, layer in enumerate((self.a, self.b)):
                layer.weight.copy_(torch.eye(4).roll(i, 0) * 2.0**i)

    def forward(self, x):
        return self.b(self.a(x))


class Weights(RuleBasedStateMachine):
    """What both machines do to the weights of a model from outside."""

    @initialize()
    def begin(self):
        self.model = Layers()
        self.clean = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.gains, self.is_on = [1.0, 3.0], True
        self.new_values = count(3, 2)
        """Odd numbers: new weights that happen to be the faulty ones could not be told from them in an engine."""
        self.injection = self.attached()

    @rule(layer=some.sampled_from("ab"))
    def write_in_place(self, layer):
        self.put(layer, torch.full((4, 4), float(next(self.new_values))), lambda p, new: p.data.copy_(new))

    @rule(layer=some.sampled_from("ab"))
    def replace_the_parameter(self, layer):
        self.put(
            layer, torch.eye(4) * next(self.new_values), lambda p, new: setattr(self.part(layer), "weight", nn.Parameter(new))
        )

    @rule(dtype=some.sampled_from([torch.float32, torch.float64]))
    def move(self, dtype):
        self.moved(dtype)

    @rule(clause=some.sampled_from([0, 1]), gain=GAINS)
    def set_magnitude(self, clause, gain):
        self.injection.set_magnitude(gain, clause)
        self.gains[clause] = gain

    @rule()
    def switch(self):
        self.is_on = not self.is_on
        self.injection.enable() if self.is_on else self.injection.disable()

    @rule(step=some.integers(0, 3))
    def set_step(self, step):
        self.injection.step = step

    def part(self, layer):
        return getattr(self.model, layer)

    def teardown(self):
        if hasattr(self, "injection"):
            self.injection.close()
            for name, p in self.model.named_parameters():
                assert torch.equal(p, self.clean[name]) and type(self.part(name[0])) is Fails


class ReadWeights(Weights):
    """`a` is faulty in training and rollouts, `b` always."""

    def attached(self):
        plan = "gain:1@module.a,point=weight,phase=train+rollout;gain:3@module.b,point=weight"
        return st.inject(self.model, plan, allow_inert=True).enable()

    def put(self, layer, new, how):
        with torch.no_grad():
            new = new.to(self.part(layer).weight.dtype)
            how(self.part(layer).weight, new)
            self.clean[f"{layer}.weight"] = new.clone()

    def moved(self, dtype):
        self.model.to(dtype)
        self.clean = {name: value.to(dtype) for name, value in self.clean.items()}

    def expected(self, phase):
        a, b = self.clean["a.weight"], self.clean["b.weight"]
        if self.is_on:
            a, b = a * (1 + self.gains[0] * (phase != "eval")), b * (1 + self.gains[1])
        return X.to(a.dtype) @ a.T @ b.T

    def run(self, x):
        return self.model(x.to(self.clean["a.weight"].dtype))

    @rule(phase=some.sampled_from([None, "rollout", "train", "eval"]), training=some.booleans(), elsewhere=some.booleans())
    def call(self, phase, training, elsewhere):
        self.model.train(training)
        found = []

        def work():
            if phase is None:
                found.append(self.run(X))
            else:
                with st.phase(phase):
                    found.append(self.run(X))

        if elsewhere:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
        assert torch.equal(found[0], self.expected(phase or ("train" if training else "eval")))

    @rule(layer=some.sampled_from("ab"))
    def call_and_fail(self, layer):
        self.part(layer).fails = True
        with pytest.raises(ZeroDivisionError):
            self.run(X)
        self.part(layer).fails = False

    @rule()
    def learn(self):
        """The gradient is that of the faulty weight; the step is made on the clean one."""
        self.model.train()
        self.model.zero_grad()
        x = X.to(self.clean["a.weight"].dtype)
        self.model(x).sum().backward()
        b = self.clean["b.weight"] * (1 + self.gains[1] if self.is_on else 1)
        through = (torch.ones(4, dtype=b.dtype) @ b) * (1 + self.gains[0] if self.is_on else 1)
        assert torch.allclose(self.model.a.weight.grad, through[:, None] * x.sum(0))

    @rule()
    def copy(self):
        twin = copy.deepcopy(self.model)
        assert torch.equal(twin(X.to(self.clean["a.weight"].dtype)), self.clean_result())

    def clean_result(self):
        return X.to(self.clean["a.weight"].dtype) @ self.clean["a.weight"].T @ self.clean["b.weight"].T

    @invariant()
    def weights_are_clean_outside_of_calls(self):
        if hasattr(self, "clean"):
            for name, value in self.model.state_dict().items():
                assert torch.equal(value, self.clean[name])
            for layer in "ab":
                assert self.part(layer).weight is self.part(layer)._parameters["weight"]


class WrittenWeights(Weights):
    """The same plan on the model of a sampling engine, and now and then a second plan on `b`."""

    def attached(self):
        self.phase, self.second = "rollout", None
        plan = "gain:1@module.a,point=weight,phase=rollout;gain:3@module.b,point=weight"
        injection = Injection(Plan.parse(plan), sampler=True, allow_inert=True)
        injection.attach(self.model)
        return injection.enable()

    def put(self, layer, new, how):
        """New weights come from outside, and their loader says so."""
        with torch.no_grad():
            new = new.to(self.part(layer).weight.dtype)
            how(self.part(layer).weight, new)
        self.clean[f"{layer}.weight"] = new.clone()
        self.injection.rewrite()

    def moved(self, dtype):
        """An engine's weights do not move while they are faulty."""

    @rule(phase=some.sampled_from(["rollout", "eval"]))
    def set_phase(self, phase):
        self.injection.phase = self.phase = phase

    @rule()
    def second_plan(self):
        if self.second is None:
            self.second = Injection(Plan.parse("gain:1@module.b,point=weight"), sampler=True, allow_inert=True)
            self.second.attach(self.model)
            self.second.enable()
        else:
            self.second.close()
            self.second = None

    @invariant()
    def weights_are_the_clean_ones_with_the_faults_of_now(self):
        if hasattr(self, "injection"):
            gains = [self.gains[0] * (self.phase == "rollout"), self.gains[1]] if self.is_on else [0.0, 0.0]
            assert torch.equal(self.model.a.weight, self.clean["a.weight"] * (1 + gains[0]))
            factor = (1 + gains[1]) * (2 if self.second is not None else 1)
            assert torch.equal(self.model.b.weight, self.clean["b.weight"] * factor)

    def teardown(self):
        if getattr(self, "second", None) is not None:
            self.second.close()
        super().teardown()


TestReadWeights = ReadWeights.TestCase
TestWrittenWeights = WrittenWeights.TestCase
TestReadWeights.settings = TestWrittenWeights.settings = settings(max_examples=25, stateful_step_count=20)
