"""The laws of the house that injection must keep. Each test fails when its law is broken."""

import copy
import io
import json
import random

import numpy
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import shaketable as st
from tests.inject.code_paths import Checkpointed
from tests.inject.recomputation import accumulated_gradients, assert_recomputation_sees_the_same_noise
from tests.tensors import ids, same, step

NOISE = "relative_gaussian:0.05"
LEVELS = [
    f"{NOISE}@module.linear",
    f"{NOISE}@module.linear,point=input",
    f"{NOISE}@module.rmsnorm+linear,point=weight",
    f"{NOISE}@layer.all",
    f"{NOISE}@op.all",
    "mxfp4@module.linear",
]


# 1. No silent no-op


def test_law_1_a_plan_that_matches_nothing_raises_at_once_and_hooks_nothing(tiny_llama):
    with pytest.raises(st.NoMatchError, match="did you mean 'down_proj'"):
        st.inject(tiny_llama, f"{NOISE}@module.linear;{NOISE}@module.down_prj")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny_llama.modules())


@pytest.mark.parametrize("plan", LEVELS)
def test_law_1_a_plan_that_never_fires_raises_on_exit(tiny_llama, plan):
    with pytest.raises(st.InertError, match="never fired"), st.inject(tiny_llama, plan):
        pass


def test_law_1_a_plan_that_changes_no_value_raises_on_exit():
    layer = nn.Linear(4, 4)
    with pytest.raises(st.InertError, match="changed no value"), st.inject(layer, "saturation:1@module.linear"):
        layer(torch.ones(1, 4))
    with st.inject(layer, "saturation:1@module.linear", allow_inert=True) as ledger:
        layer(torch.ones(1, 4))
    assert ledger.forward == 1


def test_law_1_rare_faults_are_not_taken_for_inert():
    layer = nn.Linear(64, 64)
    with st.inject(layer, "spike:9,rate=0.0005@module.linear", seed=4) as ledger:
        for _ in range(200):
            layer(torch.ones(1, 64))
    assert ledger.sites[0].measured().changed > 0


def test_law_1_an_error_of_the_program_is_not_hidden(tiny_llama):
    with pytest.raises(ZeroDivisionError), st.inject(tiny_llama, LEVELS[0]):
        _ = 1 / 0


# 2. Off is off


@pytest.mark.parametrize("plan", LEVELS)
def test_law_2_off_and_after_are_bit_identical(tiny_llama, plan):
    clean, weights = step(tiny_llama), copy.deepcopy(tiny_llama.state_dict())
    injection = st.inject(tiny_llama, plan).enable()
    assert not same(step(tiny_llama), clean)
    injection.disable()
    assert same(step(tiny_llama), clean)
    injection.enable()
    assert not same(step(tiny_llama), clean)
    injection.close()
    assert same(step(tiny_llama), clean)
    assert all(torch.equal(v, weights[k]) for k, v in tiny_llama.state_dict().items())


@pytest.mark.parametrize("plan", LEVELS)
def test_law_2_nothing_of_us_is_left(tiny_llama, plan):
    before = [(type(m), set(m.__dict__)) for m in tiny_llama.modules()]
    with st.inject(tiny_llama, plan):
        tiny_llama(ids())
    with pytest.raises(ZeroDivisionError), st.inject(tiny_llama, plan):
        tiny_llama(ids())
        _ = 1 / 0
    assert [(type(m), set(m.__dict__)) for m in tiny_llama.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny_llama.modules())
    assert torch.overrides._len_torch_function_stack() == 0


def test_law_2_magnitude_zero_is_the_identity(tiny_llama):
    clean = step(tiny_llama)
    for site in ("module.linear", "module.linear,point=weight", "layer.all", "op.all"):
        for fault in ("relative_gaussian:0", "dead_zone:0", "systematic_bias:0", "spike:0", "stuck_bit:0", "bias:0"):
            with st.inject(tiny_llama, f"{fault}@{site}", allow_inert=True):
                assert same(step(tiny_llama), clean), (fault, site)


# 3. Own randomness


@pytest.mark.parametrize("plan", [*LEVELS, "spike:9,rate=0.1@layer.all", "mxfp4,rounding=stochastic@module.linear"])
def test_law_3_global_generators_are_untouched(tiny_llama, plan):
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    with st.inject(tiny_llama, plan):
        step(tiny_llama)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()


@pytest.mark.parametrize("plan", LEVELS[:5])
def test_law_3_same_key_same_noise_other_key_other_noise(tiny_llama, plan):
    def two_steps(**keys):
        with st.inject(tiny_llama, plan, **keys):
            return step(tiny_llama), step(tiny_llama)

    first, second = two_steps(seed=1)
    assert not same(first, second), "every pass has noise of its own"
    assert same(two_steps(seed=1)[1], second)
    assert not same(two_steps(seed=2)[0], first)
    assert not same(two_steps(seed=1, rank=1)[0], first)


def test_law_3_phases_steps_and_places_have_noise_of_their_own():
    """Two linears of one shape, given the same: whatever differs is their noise."""
    model, x = torch.nn.Sequential(torch.nn.Identity()), torch.ones(2, 8)
    model.a, model.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    model.b.load_state_dict(model.a.state_dict())
    model.forward = lambda x: torch.stack([model.a(x), model.b(x)])
    drawn = []
    for at in (0, 1):
        for name in ("train", "eval", "rollout"):
            with st.inject(model, "relative_gaussian:0.1@module.linear", step=at), st.phase(name):
                drawn += [y.detach() for y in model(x)]
    assert len({tuple(y.flatten().tolist()) for y in drawn}) == 12


def test_law_3_a_resumed_run_draws_what_an_uninterrupted_one_drew(tiny_llama):
    with st.inject(tiny_llama, LEVELS[4], seed=1) as _:
        pass_through = st.inject(tiny_llama, LEVELS[0], seed=1, allow_inert=True)
        pass_through.close()
        step(tiny_llama)
    whole = st.inject(tiny_llama, LEVELS[4], seed=1).enable()
    results = []
    for number in range(3):
        whole.step = number
        results.append(step(tiny_llama))
    whole.close()
    resumed = st.inject(tiny_llama, LEVELS[4], seed=1, step=2).enable()
    assert same(step(tiny_llama), results[2])
    assert not same(results[0], results[2])
    resumed.close()


def test_law_3_an_evaluation_in_between_does_not_shift_the_noise_of_training(tiny_llama):
    def train(evaluate):
        tiny_llama.train()
        with st.inject(tiny_llama, LEVELS[0], seed=1):
            step(tiny_llama)
            if evaluate:
                with st.phase("eval"), torch.no_grad():
                    tiny_llama(ids())
            return step(tiny_llama)

    assert same(train(evaluate=True), train(evaluate=False))


def test_law_3_broken_lanes_stay_broken():
    torch.manual_seed(0)
    layer = nn.Linear(8, 40)
    broken = []
    with st.inject(layer, "gain:1,sparsity=0.25@module.linear", seed=5):
        for shape in ((1, 8), (7, 8), (2, 3, 8), (64, 8)):
            x = torch.randn(shape)
            y = layer(x)
            clean = torch.nn.functional.linear(x, layer.weight, layer.bias)
            broken.append((y != clean).flatten(0, -2).any(0))
    assert all(torch.equal(b, broken[0]) for b in broken)
    assert int(broken[0].sum()) == 10


def test_law_3_ranks_and_runs_share_the_broken_lanes():
    layer, x = nn.Linear(8, 40), torch.ones(1, 8)

    def broken(**keys):
        with st.inject(layer, "gain:1,sparsity=0.25@module.linear", **keys):
            return layer(x) != torch.nn.functional.linear(x, layer.weight, layer.bias)

    assert torch.equal(broken(seed=5), broken(seed=5, rank=1))
    assert not torch.equal(broken(seed=5), broken(seed=6))


# 4. Clean weights come back


def test_law_4_noise_on_weights_never_accumulates_is_never_saved_and_comes_off(tiny_llama):
    clean, weights = step(tiny_llama), copy.deepcopy(tiny_llama.state_dict())
    with st.inject(tiny_llama, f"{NOISE}@module.rmsnorm+linear,point=weight,phase=rollout") as ledger:
        for number in range(1, 4):
            with st.phase("rollout"):
                noisy = tiny_llama(ids()).logits
                saved = io.BytesIO()
                torch.save(tiny_llama.state_dict(), saved)
            assert same(step(tiny_llama), clean), "training in between"
            assert not torch.equal(noisy, tiny_llama(ids()).logits)
            saved.seek(0)
            assert all(torch.equal(v, weights[k]) for k, v in torch.load(saved).items()), "saved within a rollout"
            assert ledger.forward == number * 37, "28 linears and 9 norms a rollout"
        assert ledger.sites[0].measured().error == pytest.approx(0.05, rel=0.1), (
            "the third rollout is no noisier than the first"
        )
    assert all(torch.equal(v, weights[k]) for k, v in tiny_llama.state_dict().items())


# 5. A score names its condition; 6. Nothing is overwritten


@pytest.fixture
def shaketable(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder: exit code and what it said on stderr."""
    from shaketable import cli

    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["shaketable", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capsys.readouterr().err

    return run


SWEEP = ("sweep", "nano", "--task", "arithmetic", "--plan", "relative_gaussian@op.matmul", "--limit", "4", "--seeds", "1")


def test_law_5_a_score_names_its_condition_and_proves_its_faults(shaketable, tmp_path):
    code, told = shaketable(*SWEEP, "--magnitudes", "0,0.3", "--out", "run", "--json", "a.json")
    assert code == 0, told
    clean, faulty = json.loads((tmp_path / "a.json").read_text())["points"]
    assert (clean["magnitude"], clean["plan"], clean["injections"]) == (0, None, 0)
    assert faulty["magnitude"] == 0.3 and "relative_gaussian:0.3@op.matmul" in faulty["plan"]
    assert faulty["injections"] > 0 and faulty["measured_error"] == pytest.approx(0.3, rel=0.1)


def test_law_5_an_evaluation_meets_no_fault_that_it_did_not_ask_for(tiny_llama):
    clean = tiny_llama(ids()).logits
    with st.inject(tiny_llama, f"{NOISE}@op.all,phase=rollout+train") as ledger:
        with st.phase("train"):
            assert not torch.equal(tiny_llama(ids()).logits, clean)
        before = ledger.forward
        with st.phase("eval"):
            assert torch.equal(tiny_llama(ids()).logits, clean)
        assert ledger.forward == before > 0


def test_law_6_nothing_is_overwritten(shaketable, tmp_path):
    assert shaketable(*SWEEP, "--magnitudes", "0,0.3", "--out", "run", "--json", "a.json")[0] == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for where in (["--out", "run"], ["--out", "other", "--json", "a.json"]):
        code, told = shaketable(*SWEEP, "--magnitudes", "0,0.2", *where)
        assert code == 2 and len(told.strip().splitlines()) == 1, told
    assert all(path.read_bytes() == content for path, content in files.items())
    assert [shaketable(*SWEEP, "--magnitudes", "0,0.2")[0] for _ in range(2)] == [0, 0]
    assert len(list(tmp_path.glob("runs/sweep-nano-*/record.jsonl"))) == 2, "each run has a folder of its own"


# 7. Measured equals asked


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.5])
@pytest.mark.parametrize("site", ["module.linear", "module.linear,point=weight", "layer.all", "op.matmul"])
def test_law_7_measured_equals_asked(tiny_llama, scale, site):
    with st.inject(tiny_llama, f"relative_gaussian:{scale}@{site}") as ledger:
        step(tiny_llama)
    record = ledger.to_dict()["sites"][0]
    assert record["measured_magnitude"] == pytest.approx(scale, rel=0.05)
    assert record["measured_error"] == pytest.approx(scale, rel=0.2)
    assert record["remark"] is None


def test_law_7_or_the_run_says_why(tiny_llama):
    model = tiny_llama.to(torch.bfloat16)
    with st.inject(model, "relative_gaussian:1e-3@module.linear") as ledger:
        model(ids())
        model(ids())
    assert "asked for 0.001" in ledger.to_dict()["sites"][0]["remark"]
    assert "asked for 0.001" in str(ledger)


# 8. Forward and backward belong to the right layer


def gradients_of_one_layer(model, layer):
    """Which decoder layers' parameters get another gradient when only `layer` is faulty in backward."""
    clean = step(model)
    with st.inject(model, f"relative_gaussian:0.5@op.matmul,direction=backward,layers={layer}") as ledger:
        noisy = step(model)
    names = ["loss", *(n for n, _ in model.named_parameters())]
    changed = {n for n, a, b in zip(names, clean, noisy, strict=True) if not torch.equal(a, b)}
    assert "loss" not in changed
    return {int(n.split(".")[2]) for n in changed if ".layers." in n}, ledger


def test_law_8_an_error_in_backward_reaches_its_layer_and_those_before(tiny_llama):
    for layer in range(4):
        changed, ledger = gradients_of_one_layer(tiny_llama, layer)
        assert changed == set(range(layer + 1))
        assert set(ledger.sites[0].by("layer")) == {str(layer)}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        f"{NOISE}@op.all",
        f"{NOISE}@module.linear",
        "dead_zone:0.05,scope=token@layer.all",
        f"{NOISE}@module.linear,point=weight",
    ],
)
def test_law_8_recomputation_sees_the_noise_of_the_first_pass(tiny_llama, plan, reentrant):
    assert_recomputation_sees_the_same_noise(tiny_llama, plan, reentrant, step)


def test_law_8_accumulated_micro_batches_keep_their_noise_apart(tiny_llama):
    """Two forwards, then both backwards, in either order, checkpointed or not."""

    def run(order, checkpoint):
        return accumulated_gradients(tiny_llama, f"{NOISE}@op.all", order, checkpoint, ids())

    reference = run((0, 1), checkpoint=False)
    for order in ((0, 1), (1, 0)):
        for checkpoint in (False, True):
            found = run(order, checkpoint)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(reference, found, strict=True)), (order, checkpoint)


@pytest.mark.parametrize(
    "fault",
    [
        "dead_zone:0.01,scope=token",
        "spike:2,mode=max,rate=0.1",
        "noise:0.1",
        "saturation:0.001",
        "gain:0.2",
        "bit_flip:0.1",
        "truncation:3",
    ],
)
def test_law_7_holds_in_sparse_lanes_next_to_a_massive_channel(fault):
    torch.manual_seed(0)
    layer = nn.Linear(16, 200)
    with torch.no_grad():
        layer.weight[7] *= 50
    with st.inject(layer, f"{fault.partition('@')[0]},sparsity=0.1@module.linear") as ledger:
        for _ in range(16):
            layer(torch.randn(64, 16))
    site = ledger.to_dict()["sites"][0]
    assert site["measured_magnitude"] == pytest.approx(site["asked"], rel=0.15)
    assert site["remark"] is None


def checkpointing():
    """The functions of torch that are exchanged while a plan is active."""
    return torch.utils.checkpoint._checkpoint_without_reentrant_generator, torch.utils.checkpoint.CheckpointFunction.forward


@pytest.mark.parametrize("plan", ["module.linear", "op.matmul", "module.linear,point=weight"])
@pytest.mark.parametrize("what", ["leaf", "product", "two", "container"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_law_8_whatever_is_checkpointed_sees_the_noise_of_the_first_pass(what, plan, reentrant):
    torch.manual_seed(0)
    model = Checkpointed(what)
    results, before = [], checkpointing()
    for how in (None, reentrant):
        x = torch.ones(3, 8, requires_grad=True)
        model.zero_grad()
        with st.inject(model, f"{NOISE}@{plan}", seed=1) as ledger:
            loss = model(x, how)
            loss.backward()
        results.append(
            (ledger.forward, ledger.backward, loss, x.grad, *(p.grad for p in model.parameters() if p.grad is not None))
        )
    assert results[0][:2] == results[1][:2]
    assert same(results[0][2:], results[1][2:])
    assert checkpointing() == before


def test_law_2_an_interrupted_forward_does_not_colour_the_next(tiny_llama):
    class Interrupt(nn.Module):
        def forward(self, *args, **kwargs):
            raise KeyboardInterrupt

    with st.inject(tiny_llama, f"{NOISE}@op.matmul", seed=1) as ledger:
        norm, tiny_llama.model.norm = tiny_llama.model.norm, Interrupt()
        with pytest.raises(KeyboardInterrupt):
            tiny_llama(ids())
        tiny_llama.model.norm = norm
        before = ledger.forward
        with st.phase("train"):
            tiny_llama(ids())
    assert ledger.forward == before + 28
    assert ledger.sites[0].by("phase")["train"]["forward"] == 28


def test_law_2_gradients_after_the_context_are_clean(tiny_llama):
    clean = step(tiny_llama)
    tiny_llama.zero_grad()
    with st.inject(tiny_llama, f"{NOISE}@op.matmul,direction=backward", allow_inert=True) as ledger:
        loss = tiny_llama(ids(), labels=ids()).loss
    loss.backward()
    assert ledger.backward == 0
    assert same([loss.detach(), *(p.grad for p in tiny_llama.parameters())], clean)
