"""Outputs, gradients and ledgers that were stored once: the same seed must give the same bits after any change of the engine.

`golden.json` holds them. Everything here runs on a CPU, and a digest is taken only of what no CPU can compute in another order:
`Exact` multiplies with signed permutations scaled by powers of two, so each sum has one term. Gradients
of weights are compared to a tolerance far below the size of the noise. Compiled and checkpointed models are held against eager
ones in `test_same_everywhere.py`, and each fault against its formula in `tests/faults`.

    python -m tests.inject.test_golden    stores the results of the present code
"""

import functools
import json
from functools import partial
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject import Injection
from shaketable.plan import Plan

FILE = Path(__file__).with_name("golden.json")
SEED, WIDTH, TOKENS = 11, 64, 6
NOISE = "relative_gaussian:0.05"
CLOSE = 2e-4


class Block(nn.Module):
    """A residual block whose products are exact."""

    def __init__(self, generator):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        order = torch.randperm(WIDTH, generator=generator)
        scale = 2.0 ** torch.randint(-1, 2, (WIDTH,), generator=generator) * (
            1 - 2 * torch.randint(0, 2, (WIDTH,), generator=generator)
        )
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(WIDTH)[order] * scale)
            self.linear.bias.copy_(torch.randint(-2, 3, (WIDTH,), generator=generator).float())

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Exact(nn.Module):
    """Two such blocks, in layers."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.layers = nn.ModuleList(Block(generator) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tokens():
    x = torch.randint(-8, 9, (TOKENS, WIDTH), generator=torch.Generator().manual_seed(6)) / 4
    return x.requires_grad_()


def digest(*tensors):
    """Of the bits, where +0 and -0 are the same."""
    found = blake2b(digest_size=8)
    for x in tensors:
        found.update((x.detach().float() + 0.0).contiguous().numpy().tobytes())
    return found.hexdigest()


def some(*tensors):
    """A few values of each tensor and their sum of magnitudes."""
    return [float(v) for x in tensors for v in (*x.detach().double().flatten()[:5], x.detach().double().abs().sum())]


def counts(ledger):
    """What happened at each site, in whole numbers."""
    rows = ledger.to_dict()["sites"]
    return [[r["matched"], r["forward"], r["backward"], r["recomputed"], r["fused"], r["phases"], r["layers"]] for r in rows]


def measured(ledger):
    """What was measured at each site."""
    names = ("asked", "measured_error", "measured_error_backward", "measured_magnitude", "changed_fraction", "survival_rate")
    return [[row[name] for name in names] for row in ledger.to_dict()["sites"]]


def result(ledger, exact, close):
    return {
        "counts": counts(ledger),
        "measured": measured(ledger),
        "digest": digest(*exact),
        "values": some(*close),
    }


# ---- what is done to a model; each returns a `result`


def eager(plan, *, grad=True):
    """One training step."""
    model, x = Exact().train(), tokens()
    with st.inject(model, plan, seed=SEED, allow_inert=True) as ledger:
        with torch.set_grad_enabled(grad):
            y = model(x)
        if grad:
            y.sum().backward()
    weights = [p.grad for p in model.parameters()] if grad else []
    inputs = [y, x.grad] if grad else [y]
    return result(ledger, inputs, [*inputs, *weights])


def phases(plan):
    """Two steps of a rollout of two passes, an evaluation and a training pass, all in one process."""
    model, x, out = Exact(), tokens(), []
    with st.inject(model, plan, seed=SEED, allow_inert=True) as ledger:
        for number in range(2):
            injection_of(ledger).step = number
            with torch.no_grad(), st.phase("rollout"):
                out += [model.eval()(x), model(x)]
            with torch.no_grad(), st.phase("eval"):
                out.append(model(x))
            out.append(model.train()(x))
    return result(ledger, out, out)


def held(plan, *, sampler=False):
    """Noise on weights that is drawn once per rollout, as AQN does; `sampler`: written into the weights, as in vLLM."""
    model, x, out = Exact().eval(), tokens(), []
    injection = Injection(Plan.load(plan, seed=SEED), hold=True, sampler=sampler, allow_inert=True)
    injection.attach(model)
    injection.enable()
    for number in range(2):
        injection.step = number
        for _ in range(2):
            with torch.no_grad(), st.phase("rollout"):
                out += [model(x), model(x)]
                injection.rewrite()
    injection.close()
    out.append(model(x))
    return result(injection.ledger, out, out)


def ranks(plan):
    """Another rank, and a step that a resumed run begins with."""
    out, x = [], tokens()
    for rank, number in ((0, 0), (1, 0), (0, 7)):
        model = Exact()
        injection = st.inject(model, plan, seed=SEED, rank=rank, step=number, allow_inert=True)
        with injection as ledger:
            out += [model(x), model(x)]
    return result(ledger, out, out)


def injection_of(ledger):
    """The injection that keeps a live ledger."""
    return ledger.settle.__self__


# ---- the table


PLANS = {
    "output": f"{NOISE}@module.linear",
    "input": f"{NOISE}@module.linear,point=input",
    "weight": f"{NOISE}@module.linear,point=weight",
    "layer": f"{NOISE}@layer.1",
    "both ways": f"{NOISE}@module.linear,direction=both",
    "gradient": f"{NOISE}@module.linear,direction=backward",
    "products": f"{NOISE}@op.matmul",
    "products forward": f"{NOISE}@op.matmul,direction=forward",
    "products backward": f"{NOISE}@op.matmul,direction=backward",
    "w4a4": "mxfp4@module.linear,point=weight+input",
    "several": f"gain:0.1@layer.0;{NOISE}@op.matmul;absolute_gaussian:0.05@module.linear",
}


CASES = {
    **{f"eager {name}": partial(eager, plan) for name, plan in PLANS.items()},
    **{f"no gradients {name}": partial(eager, plan, grad=False) for name, plan in PLANS.items()},
    "phases": partial(phases, f"{NOISE}@module.linear,phase=rollout;gain:0.1@layer.1,phase=eval;{NOISE}@op.matmul,phase=train"),
    "phases of weights": partial(phases, f"{NOISE}@module.linear,point=weight,phase=rollout+train"),
    "held": partial(held, f"{NOISE}@module.linear,point=weight,phase=rollout"),
    "sampler": partial(held, f"{NOISE}@module.linear,point=weight;mxfp4@layer.0", sampler=True),
    "ranks and steps": partial(ranks, f"{NOISE}@module.linear,point=weight;{NOISE}@op.matmul"),
}


@functools.cache
def stored():
    return json.loads(FILE.read_text(encoding="utf-8"))


def test_every_case_is_stored():
    assert sorted(stored()) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_results_are_those_that_were_stored(name):
    found, known = json.loads(json.dumps(CASES[name]())), stored()[name]
    assert found["counts"] == known["counts"]
    assert found["digest"] == known["digest"]
    assert found["values"] == pytest.approx(known["values"], rel=CLOSE, abs=CLOSE)
    for mine, theirs in zip(found["measured"], known["measured"], strict=True):
        assert [v is None for v in mine] == [v is None for v in theirs]
        assert [v for v in mine if v is not None] == pytest.approx([v for v in theirs if v is not None], rel=CLOSE, abs=1e-7)


def _store():
    torch.set_num_threads(1)
    rows = [f"{json.dumps(name)}: {json.dumps(case())}" for name, case in CASES.items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    _store()
