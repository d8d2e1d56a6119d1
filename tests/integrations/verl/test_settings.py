"""What a config of verl asks for: read, checked before anything starts, and turned into the instructions of samplers and actors."""

import json
import re

import pytest

from shaketable.errors import ShaketableError
from shaketable.integrations.verl.checks import check_model
from shaketable.integrations.verl.settings import keep_record, shaking_of
from shaketable.models import NANO

NOISE = "relative_gaussian:0.05@op.matmul"
EPOCHS = "epoch_aware:0.05-0.01+0.01-0.0005"


def config(tmp_path, mode="sync", sampler="vllm", strategy="fsdp2", rollout=None, **groups):
    """The part of verl's config that matters here: of a run on GPUs, with vLLM in eager mode."""
    trainer = {"use_v1": True, "v1": {"trainer_mode": mode}, "default_local_dir": str(tmp_path), "total_epochs": 2}
    sampling = {"name": sampler, "enforce_eager": True, "calculate_log_probs": False, "engine_kwargs": {"vllm": {}}}
    model = {"rollout": sampling | (rollout or {}), "actor": {"strategy": strategy}, "model": {"lora_rank": 0}}
    whole = {"trainer": trainer | {"device": "cuda"} | groups.pop("trainer", {}), "actor_rollout_ref": model}
    return whole | {"algorithm": {"rollout_correction": {"bypass_mode": False}}} | groups


def shaking(tmp_path, environ=None, **keys):
    return shaking_of(config(tmp_path, shaketable=keys), environ or {})


def test_a_config_without_our_keys_asks_nothing(tmp_path):
    assert shaking_of(config(tmp_path, shaketable=None), {}) is None


@pytest.mark.parametrize(
    ("plan_in", "phase", "roles"),
    [
        ("rollout", "rollout", ["sampler"]),
        ("actor", "train", ["actor"]),
        (None, "rollout+train", ["sampler", "actor"]),
    ],
)
def test_plan_in_says_who_is_shaken_and_never_validation(tmp_path, plan_in, phase, roles):
    made = shaking(tmp_path, plan=NOISE, plan_in=plan_in, seed=7)
    instructions = {role: made.instructions(role, 10) for role in ("sampler", "actor")}
    assert [role for role, found in instructions.items() if found] == roles
    for role in roles:
        assert instructions[role].plan == f"{NOISE},phase={phase}"
        assert (instructions[role].seed, instructions[role].total_steps) == (7, 10)


@pytest.mark.parametrize(
    ("asked", "plan_in", "phase", "scored"),
    [
        (None, None, "rollout+train", "clean"),
        ("plan", None, "rollout+train+eval", "plan"),
        ("both", "rollout", "rollout+eval", "both"),
    ],
)
def test_validations_are_clean_under_the_plan_or_both(tmp_path, asked, plan_in, phase, scored):
    made = shaking(tmp_path, plan=NOISE, plan_in=plan_in, validate=asked)
    assert made.instructions("sampler", 1).plan == f"{NOISE},phase={phase}"
    assert made.validations == scored
    assert shaking(tmp_path, plan=f"{NOISE},phase=rollout+eval").validations == "plan", "a clause may ask for it"


def test_a_schedule_by_epochs_follows_the_epochs_of_the_data(tmp_path):
    made = shaking(tmp_path, aqn=EPOCHS)
    assert made.total_steps(58, 29, epochs=2) == 58
    assert made.total_steps(40, 29, epochs=2) == 58, "cut short, not squeezed"
    assert made.total_steps(900, 29, epochs=2) == 58, "verl ends after its epochs, whatever total_training_steps says"
    with pytest.raises(ShaketableError, match="has 2 epochs and the run 87 steps of 29 an epoch"):
        made.total_steps(87, 29, epochs=3)
    decay = shaking(tmp_path, aqn="global_decay:0.05-0.0005,stages=10")
    assert decay.total_steps(40, 29, epochs=2) == 40
    with pytest.raises(ShaketableError, match="σ is 0 at each of 1 steps"):
        decay.total_steps(1, 1, epochs=1)


def test_a_sampler_has_no_backward(tmp_path):
    back = f"{NOISE},direction=backward"
    made = shaking(tmp_path, plan=back)
    assert made.instructions("sampler", 1) is None, "an order without clauses is no order"
    assert made.instructions("actor", 1).plan == f"{back},phase=train"
    made = shaking(tmp_path, plan=f"{back},phase=rollout+train;gain:0.1@layer.1")
    assert made.instructions("sampler", 1).plan == "gain:0.1@layer.1,phase=rollout+train"
    for keys in ({"plan": f"{back},phase=rollout"}, {"plan": back, "plan_in": "rollout"}):
        with pytest.raises(ShaketableError, match="would never act: a sampler has no backward"):
            shaking(tmp_path, **keys)


GRAPHS = {"enforce_eager": False}
WEIGHTS = "relative_gaussian:0.05@module.linear,point=weight"


def engine(**options):
    return {"engine_kwargs": {"vllm": options}}


@pytest.mark.parametrize(
    ("keys", "rollout", "trainer", "fails"),
    [
        ({"plan": NOISE}, GRAPHS, {}, True),
        ({"aqn": "constant:0.01,form=output"}, GRAPHS, {}, True),
        ({"plan": NOISE}, GRAPHS | engine(compilation_config={"cudagraph_mode": "NONE"}), {}, False),
        ({"plan": NOISE}, GRAPHS, {"device": "cpu"}, False),
        ({"plan": WEIGHTS}, GRAPHS, {}, False),
        ({"plan": NOISE, "plan_in": "actor"}, GRAPHS, {}, False),
    ],
)
def test_what_a_cuda_graph_would_swallow_is_refused_by_the_driver(tmp_path, keys, rollout, trainer, fails):
    asked = config(tmp_path, rollout=rollout, trainer=trainer, shaketable=keys)
    if fails:
        with pytest.raises(ShaketableError, match=r"add actor_rollout_ref\.rollout\.enforce_eager=True$"):
            shaking_of(asked, {})
    else:
        assert shaking_of(asked, {}) is not None


def test_samplers_are_held_against_actors_in_a_training_that_nobody_shakes(tmp_path):
    made = shaking(tmp_path, mismatch={"every": 50, "stop": True})
    assert made.instructions("sampler", 1) is None and made.instructions("actor", 1) is None
    assert shaking_of(config(tmp_path, shaketable={"resolved": made.model_dump(mode="json")}), {}).mismatch == made.mismatch
    assert made.lines[0].startswith("shaketable: samplers against actors every 50 steps; weights that differ")


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ({"plan": NOISE}, {}, "measures a training as it is: only shaketable.ledger goes with it"),
        ({"mismatch": {"every": 0}}, {}, "shaketable.mismatch.every"),
        ({}, {"sampler": "sglang"}, "rollout.name=vllm, not with sglang"),
        ({}, {"strategy": "fsdp"}, "needs actor_rollout_ref.actor.strategy=fsdp2"),
        ({}, {"rollout": {"tensor_model_parallel_size": 2}}, "rollout.tensor_model_parallel_size=1"),
        ({}, {"rollout": engine(worker_extension_cls="a.B")}, "needs no .*worker_extension_cls"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_the_driver(tmp_path, keys, changes, message):
    with pytest.raises(ShaketableError, match=message):
        shaking_of(config(tmp_path, shaketable={"mismatch": {"every": 5}} | keys, **changes), {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shaketable": {"plan": NOISE, "validate": "both", "plan_in": "actor"}}, "shaketable.validate=both needs a clause"),
        ({"shaketable": {"plan": f"{NOISE},phase=eval", "validate": "clean"}}, "shaketable.validate=clean, and "),
        (
            {"shaketable": {"plan": "gain:0.1@module.q_proj"}},
            "gain:0.1@module.q_proj,phase=rollout+train: vLLM computes q_proj",
        ),
        ({"shaketable": {"plna": NOISE}}, "shaketable.plna: unknown key; did you mean 'plan'?"),
        ({"shaketable": NOISE}, "shaketable is a group of keys"),
        ({"shaketable": {"seed": 1}}, "shaketable has neither a plan nor an aqn"),
        ({"shaketable": {"plan": NOISE, "plan_in": "critic"}}, "shaketable.plan_in: "),
        ({"shaketable": {"plan": f"{NOISE},phase=train", "plan_in": "rollout"}}, "shaketable.plan_in=rollout, and "),
        ({"shaketable": {"plan": NOISE}, "mode": "colocate_async"}, "shaketable works with trainer.v1.trainer_mode=sync"),
        ({"shaketable": {"plan": NOISE}, "sampler": "sglang"}, "shaketable works with rollout.name=vllm"),
        (
            {"shaketable": {"plan": NOISE}, "strategy": "megatron"},
            "faults in the actor need FSDP2, not actor.strategy=megatron",
        ),
        (
            {"shaketable": {"plan": NOISE}, "rollout": engine(additional_config={"shaketable": {"plan": NOISE}})},
            "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config asks for a plan",
        ),
        ({"shaketable": {"plan": NOISE}, "deadzone": {"enabled": True, "layer": 3, "threshold": 0.01}}, "shaketable.* and "),
    ],
)
def test_what_cannot_be_honoured_is_an_error_of_one_line(tmp_path, changes, message):
    with pytest.raises(ShaketableError) as error:
        shaking_of(config(tmp_path, **changes), {})
    assert str(error.value).startswith(message)


def test_what_the_driver_read_is_what_the_trainer_does(tmp_path):
    """The trainer runs in another process: without the variables that the driver saw, and in another folder."""
    environ = {"VERL_NOISY_OPS_ENABLED": "1", "VERL_NOISY_OPS_SCALE": "0.05", "VERL_NOISY_OPS_TYPE": "relative_gaussian"}
    made = shaking(tmp_path, environ, seed=5)
    aqn = shaking(tmp_path, aqn=EPOCHS, seed=9)
    for found in (made, aqn):
        again = shaking(tmp_path, resolved=found.model_dump(mode="json"))
        assert again == found.model_copy(update={"lines": ()})


def test_ledgers_are_never_mixed(tmp_path):
    first = shaking(tmp_path, plan=NOISE).ledger
    assert first.is_absolute() and first.parent == tmp_path / "shaketable"
    assert first != shaking(tmp_path, plan=NOISE).ledger
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "worker-1-aa.json").write_text(json.dumps({}))
    with pytest.raises(ShaketableError, match="holds the ledgers of another run"):
        shaking(tmp_path, plan=NOISE, ledger=str(tmp_path / "used"))


def test_the_order_of_noise_and_fault_reaches_the_workers_or_is_refused(tmp_path):
    """The origin's design: noise in front of the dead zone, in sampler and actor; nobody is told to come before nothing."""
    aqn = "constant:0.05,form=output,layers=3,where=both,order=before"
    made = shaking(tmp_path, plan="dead_zone:0.01@layer.3", aqn=aqn)
    assert [made.instructions(role, 1).aqn for role in ("sampler", "actor")] == [aqn, aqn]
    with pytest.raises(ShaketableError, match="order=before needs a plan, and there is none"):
        shaking(tmp_path, plan="dead_zone:0.01@layer.3", plan_in="actor", aqn=aqn)


# ---- checkpoints


def begin(tmp_path, **groups):
    """What verl's driver does with a config before Ray starts."""
    whole = config(tmp_path, **groups)
    keep_record(whole, shaking_of(whole, {}))


@pytest.mark.parametrize(
    "other", [{}, {"shaketable": {"plan": NOISE, "seed": 1}}, {"shaketable": {"plan": NOISE, "aqn": EPOCHS}}]
)
def test_checkpoints_of_another_plan_or_aqn_are_not_resumed(tmp_path, other):
    begin(tmp_path, shaketable={"plan": NOISE})
    begin(tmp_path, **other)
    begin(tmp_path, shaketable={"plan": NOISE})
    (tmp_path / "global_step_20").mkdir()
    begin(tmp_path, shaketable={"plan": NOISE, "validate": "both"})
    with pytest.raises(
        ShaketableError, match=r"made under plan relative_gaussian:0\.05@op\.matmul,phase=rollout\+train \(seed 0\), and this"
    ):
        begin(tmp_path, **other)
    path = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_20")}
    with pytest.raises(ShaketableError, match="verl would mix them"):
        begin(tmp_path / "new", trainer=path, **other)


# ---- sizes


@pytest.mark.parametrize(
    ("plan", "who"),
    [
        ("relative_gaussian:1e-4@op.matmul", "samplers compute in bfloat16"),
        ("relative_gaussian:1e-4@op.matmul,phase=train", "actors compute in bfloat16"),
        ("gain:1e-3@module.rmsnorm", "samplers compute in bfloat16"),
    ],
)
def test_noise_that_bfloat16_rounds_away_is_refused_with_both_cures(tmp_path, plan, who):
    with pytest.raises(ShaketableError, match=f"{who}, which rounds .* away") as error:
        shaking(tmp_path, plan=plan)
    cure = float(re.search(r"a magnitude of (\S+) or more", str(error.value))[1])
    assert shaking(tmp_path, plan=re.sub(r":[\d.e-]+", f":{cure}", plan, count=1)) is not None
    full = config(tmp_path, rollout={"dtype": "float32"}, shaketable={"plan": plan})
    full["actor_rollout_ref"]["actor"]["fsdp_config"] = {"mixed_precision": {"param_dtype": "fp32"}}
    assert shaking_of(full, {}) is not None


# ---- names


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("gain:0.1@module.gate_porj", "did you mean 'gate_proj'"),
        ("gain:0.1@layer.9", "layer 9 is out of range; this model has layers 0-7"),
        ("gain:0.1@module.QKVParallelLinear,phase=rollout", None),
    ],
)
def test_a_name_that_actors_do_not_have_is_refused_before_ray_with_one_that_they_have(tmp_path, plan, message):
    whole = config(tmp_path, shaketable={"plan": plan})
    made = shaking_of(whole, {})
    for path, expected in ((str(NANO), message), ("hdfs://somewhere/else", None)):
        whole["actor_rollout_ref"]["model"]["path"] = path
        if expected is None:
            check_model(whole, made)
        else:
            with pytest.raises(ShaketableError, match=expected):
                check_model(whole, made)
