"""The same plan does the same thing in every code path.

One table of cases goes through one table of paths (`code_paths.py`), and each path is held against eager with the same seed: the
same counts per site, layer and phase, forward and backward; the same error as measured; off, bit for bit, what the path computes
without a plan. Each case runs once per path and is kept (`seen`), and the tests look at different sides of it.

Noise is keyed by (seed, site, step, pass, use, rank), in compiled code as in eager: the law promises the same noise there, and so
the same bits where the compiler has nothing to reorder. That is asked of a single linear, at the end.

"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import shaketable as st
from tests import slow
from tests.inject import code_paths
from tests.inject.code_paths import DEVICE, PATHS, Captured, deterministic, digest
from tests.tensors import same

SEED = 3
FROZEN = ("captured", "dead zone")
"""A fault of several operators is in a graph with its magnitude, which cannot be changed there and is not read back."""
EVERY_PHASE = ("train", "eval", "rollout", "train")


@dataclass(frozen=True)
class Case:
    plan: str
    counts: list[tuple[int, int]] = field(hash=False)
    """Fires forward and backward of each site in eager."""
    phases: tuple[str, ...] = ("train",)
    """What the program does."""
    is_off: bool = False
    """Whether the plan as written does nothing."""


NOISE = "relative_gaussian:0.05"
# A block has two linears, one of them with a bias. Backward, a product makes a gradient for each of its two or three inputs, attention
# for three, a norm for two and an activation for one.
CASES = {
    "relative, output": Case(f"{NOISE}@module.linear", [(4, 0)]),
    "relative, input": Case(f"{NOISE}@module.linear,point=input", [(4, 0)]),
    "absolute, output": Case("absolute_gaussian:0.05@module.linear", [(4, 0)]),
    "absolute, input": Case("absolute_gaussian:0.05@module.linear,point=input", [(4, 0)]),
    "relative, output, both ways": Case(f"{NOISE}@module.linear,direction=both", [(4, 4)]),
    "gain": Case("gain:0.1@module.linear", [(4, 0)]),
    "dead zone": Case("dead_zone:0.05,scope=token@layer.all", [(2, 0)]),
    "mxfp4": Case("mxfp4@module.linear,point=weight+input", [(8, 0)]),
    "sparsity": Case("relative_gaussian:0.05,sparsity=0.25@module.linear", [(4, 0)]),
    "products forward": Case(f"{NOISE}@op.matmul,direction=forward", [(4, 0)]),
    "products backward": Case(f"{NOISE}@op.matmul,direction=backward", [(0, 10)]),
    "products": Case(f"{NOISE}@op.matmul", [(4, 10)]),
    "operators": Case(f"{NOISE}@op.all", [(10, 22)]),
    "one layer": Case(f"{NOISE}@layer.1", [(1, 0)]),
    "three clauses": Case(f"gain:0.1@layer.0;{NOISE}@op.matmul;{NOISE}@module.o_proj", [(1, 0), (4, 10), (2, 0)]),
    "phases": Case(
        f"{NOISE}@module.linear,phase=rollout;gain:0.1@module.linear,phase=eval;{NOISE}@op.matmul,phase=train",
        [(4, 0), (4, 0), (8, 20)],
        EVERY_PHASE,
    ),
    "magnitude 0": Case("relative_gaussian:0@module.linear;gain:0@op.all", [(0, 0), (0, 0)], is_off=True),
}
FEW = ("relative, output", "operators")
HERE = [(path, case) for path in ("checkpointed", "reentrant", "aot_eager") for case in CASES]
HERE += [("aot_eager checkpointed", case) for case in ("relative, output", "products")]
HERE += [("inductor", "operators")]
THERE = [("device", case) for case in CASES] + [("device inductor", case) for case in FEW]
THERE += [("captured", case) for case in CASES if case != "phases"]  # a graph is of one phase


def paths(*more):
    """Every case in every path but eager; those that need a GPU with their marks."""
    has_cuda = torch.cuda.is_available()
    marked = []
    for path, case in THERE:
        can = has_cuda or (DEVICE != "cuda" and path != "captured")
        marked.append(pytest.param(path, case, marks=[pytest.mark.gpu, pytest.mark.skipif(not can, reason="no accelerator")]))
    quick = [pair if pair[1] in FEW and pair[0] != "inductor" else slow(*pair) for pair in HERE]
    return pytest.mark.parametrize(("path", "case"), [*more, *quick, *marked])


@dataclass
class Seen:
    """What came out of one case in one path."""

    clean: list
    shaken: list
    sites: list
    """The ledger after that."""
    off: dict = field(default_factory=dict)
    """What came out each time the plan was off."""
    idle: tuple = ()
    """Fires while it was."""
    again: tuple = ()
    """Fires when it had been switched on once more."""


@functools.cache
def seen(path, name):
    """One case in one path: clean, shaken, off, on again, and after the plan was closed."""
    torch._dynamo.reset()
    with deterministic():
        found = run(place := PATHS[path](), CASES[name], clean(path, CASES[name].phases))
        if place.call is place.model or name in (*FEW, "mxfp4", "one layer"):  # to compile it all once more takes its time
            found.off["closed"] = place.work(CASES[name].phases)
    return found


@functools.cache
def clean(path, phases):
    """What a path computes without a plan."""
    with deterministic():
        return PATHS[path]().work(phases)


def run(place, case, clean):
    injection = st.inject(place.model, case.plan, seed=SEED, allow_inert=True).enable()
    place.prepare()
    ledger = injection.ledger
    ledger.clear()
    found = Seen(clean, place.work(case.phases), ledger.to_dict()["sites"])
    before = fires(ledger)
    injection.disable()
    found.off["disabled"] = place.work(case.phases)
    injection.enable()
    asked = [site.asked for site in ledger.sites]
    is_frozen = isinstance(place, Captured) and "dead_zone" in case.plan
    if None not in asked and not is_frozen:  # a format has no magnitude
        injection.set_magnitude(0)
        found.off["magnitude 0"] = place.work(case.phases)
        for clause, magnitude in enumerate(asked):
            injection.set_magnitude(magnitude, clause)
    found.idle = difference(fires(ledger), before)
    before = fires(ledger)
    place.work(case.phases)
    found.again = difference(fires(ledger), before)
    injection.close()
    return found


def fires(ledger):
    return [(site.forward, site.backward) for site in ledger.sites]


def difference(after, before):
    return [(a - c, b - d) for (a, b), (c, d) in zip(after, before, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_eager_counts_what_the_plan_says(case):
    found = seen("eager", case)
    assert [(site["forward"], site["backward"]) for site in found.sites] == CASES[case].counts
    assert same(found.shaken, found.clean) == CASES[case].is_off


@paths()
def test_counts_are_those_of_eager(path, case):
    found, eager = seen(path, case), seen("eager", case)
    assert [(site["forward"], site["backward"]) for site in found.sites] == CASES[case].counts
    for site, other in zip(found.sites, eager.sites, strict=True):
        assert site["matched"] == other["matched"]
        assert site["layers"] == other["layers"]
        assert site["phases"] == other["phases"]
        assert {name: spot["counts"] for name, spot in site["spots"].items()} == {
            name: spot["counts"] for name, spot in other["spots"].items()
        }


@paths(*(("eager", case) for case in CASES))
def test_the_program_is_another_one_when_it_is_shaken(path, case):
    found = seen(path, case)
    assert same(found.shaken, found.clean) == CASES[case].is_off


@paths(*(("eager", case) for case in CASES))
def test_switched_on_again_it_fires_as_often(path, case):
    assert seen(path, case).again == CASES[case].counts


@paths()
def test_what_is_measured_is_what_eager_measures(path, case):
    for site, other in zip(seen(path, case).sites, seen("eager", case).sites, strict=True):
        magnitude = () if (path, case) == FROZEN else ("measured_magnitude",)
        for what in (*magnitude, "measured_error", "measured_error_backward", "changed_fraction"):
            assert site[what] == (None if other[what] is None else pytest.approx(other[what], rel=0.1)), what
        assert site["remark"] == other["remark"]


@paths(*(("eager", case) for case in CASES))
def test_off_is_the_clean_program_bit_for_bit(path, case):
    found = seen(path, case)
    is_fixed = case == "mxfp4" or (path, case) == FROZEN
    assert found.off.keys() >= {"disabled"} | (set() if is_fixed else {"magnitude 0"})
    for how, results in found.off.items():
        assert same(results, found.clean), how
    assert found.idle == [(0, 0)] * len(found.sites), "what is off does not count"


@pytest.mark.parametrize("case", ["relative, output", "products"])
@pytest.mark.parametrize("path", ["checkpointed", "reentrant", "aot_eager checkpointed"])
def test_something_is_computed_again_and_is_not_a_fire(path, case):
    """That it is no fire is in the counts; here, that there was something to be confused by."""
    (site,) = seen(path, case).sites
    assert 0 < site["recomputed"] <= site["forward"]


@pytest.mark.parametrize(("path", "case"), [pair for pair in HERE if pair[0] in ("checkpointed", "reentrant")])
def test_a_checkpointed_model_has_the_bits_of_eager(path, case):
    assert same(seen(path, case).shaken, seen("eager", case).shaken)


# ---- the whole program, from outside


def shake(folder, plan, backend):
    """A program that never heard of us: what it printed, and the sites of its ledger."""
    program = [sys.executable, str(Path(code_paths.__file__)), backend]
    words = [sys.executable, "-m", "shaketable", "run", "--plan", plan, "--seed", str(SEED), "--ledger", str(folder), "--"]
    done = subprocess.run([*words, *program], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[0], json.loads((folder / "ledger.json").read_text())["sites"]


@pytest.mark.parametrize(("backend", "case"), [("eager", "three clauses"), slow("aot_eager", "products")])
def test_a_program_under_shaketable_run_is_shaken_as_one_that_injects(tmp_path, backend, case):
    printed, sites = shake(tmp_path / "ledger", CASES[case].plan, backend)
    found = seen(backend, case)
    assert printed == digest(found.shaken)
    for site, other in zip(sites, found.sites, strict=True):
        for what in ("forward", "backward", "layers", "phases", "matched", "measured_magnitude", "measured_error"):
            assert site[what] == other[what], what


# ---- the same noise: where a compiler has nothing to reorder, the same bits


class Twice(nn.Module):
    """One linear that is used twice in a pass."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(24, 24)

    def forward(self, x):
        return self.one(self.one(x))


KINDS = {
    "linear": lambda: nn.Linear(24, 24),
    "used twice": Twice,
    "no bias": lambda: nn.Linear(24, 24, bias=False),  # the gradient of a bias is a sum, which inductor orders anew
}


def passes(kind, plan, backend, **keys):
    """Output and gradients of three passes, the second of them an evaluation."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = KINDS[kind]()
    call = torch.compile(model, backend=backend) if backend else model
    x, found = torch.randn(5, 24, requires_grad=True), []
    with st.inject(model, plan, seed=SEED, **keys) if plan else torch.enable_grad():
        for phase in ("train", "eval", "train"):
            model.train(phase == "train")
            y = call(x)
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]
    return found


STEADY = {
    "gain": "gain:0.1@module.linear",
    "broken lanes": "gain:1,sparsity=0.25@module.linear",
    "dead zone": "dead_zone:0.3,scope=token@module.linear",
    "mxfp4": "mxfp4@module.linear,point=weight+input",
    "gain of products": "gain:0.1@op.matmul",
}
RANDOM = {
    "output": f"{NOISE}@module.linear",
    "absolute": "absolute_gaussian:0.05@module.linear",
    "input": f"{NOISE}@module.linear,point=input",
    "weight": f"{NOISE}@module.linear,point=weight",
    "both ways": f"{NOISE}@module.linear,direction=both",
    "sparsity": "relative_gaussian:0.05,sparsity=0.25@module.linear",
    "products forward": f"{NOISE}@op.matmul,direction=forward",
    "products backward": f"{NOISE}@op.matmul,direction=backward",
    "products": f"{NOISE}@op.matmul",
    "stochastic rounding": "mxfp4,rounding=stochastic@module.linear",
}
BITS = [("aot_eager", "used twice", case) for case in (*STEADY, *RANDOM)]
BITS += [("aot_eager", "linear", case) for case in ("output", "weight", "products")]
BITS += [slow("inductor", "no bias", case) for case in ("gain", "output", "products")]


@pytest.mark.parametrize(
    ("backend", "kind"), [("aot_eager", "linear"), ("aot_eager", "used twice"), slow("inductor", "no bias")]
)
def test_a_linear_has_nothing_to_reorder(backend, kind):
    """The compiled program without a plan has the bits of eager: what the next test needs."""
    assert same(passes(kind, None, backend), passes(kind, None, None))


@pytest.mark.parametrize(
    ("backend", "kind", "case"),
    BITS,
)
def test_the_same_seed_gives_the_same_bits_compiled_and_eager(backend, kind, case):
    """Noise is keyed by (seed, site, step, pass, use, rank): compiled code draws what eager draws."""
    plan = (STEADY | RANDOM)[case]
    eager = passes(kind, plan, None)
    assert not same(eager, passes(kind, None, None))
    assert same(passes(kind, plan, backend), eager)


@pytest.mark.parametrize("keys", [{"step": 7}, {"rank": 1}], ids=["step", "rank"])
def test_step_and_rank_key_the_noise_of_compiled_code_as_that_of_eager(keys):
    eager = passes("used twice", RANDOM["products"], None, **keys)
    assert not same(eager, passes("used twice", RANDOM["products"], None))
    assert same(passes("used twice", RANDOM["products"], "aot_eager", **keys), eager)
