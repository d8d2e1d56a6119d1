"""Two lines in a script: plans and AQN in real trainers of TRL and Hugging Face, on a CPU, for a few steps."""

import copy
import json

import pytest
import torch
from transformers import TrainerCallback

import shaketable as st
from shaketable.errors import ShaketableError
from shaketable.integrations.hf.vllm_sampler import sampler_of
from shaketable.integrations.trl import ShaketableCallback
from tests.integrations.hf.small_trainers import Spy, dpo, evaluating, grpo, llama, lora, sft

pytestmark = pytest.mark.covers("TRL", "callback: plan and AQN in GRPO, SFT and DPO; references clean", "eager")

PLAN = "relative_gaussian:0.05@module.linear"


def fires(callback):
    return callback.merged.sites[0].by("phase")


def logged(trainer, name):
    return [row[f"shaketable/{name}"] for row in trainer.state.log_history if f"shaketable/{name}" in row]


def logits(model):
    """In training mode: the phase that plans act in."""
    with torch.no_grad():
        return model.train()(torch.arange(3, 11)[None]).logits


def test_grpo_is_shaken_in_rollouts_and_training(tmp_path, capsys):
    callback = ShaketableCallback(plan=PLAN, aqn="constant:0.1", seed=5, ledger=tmp_path / "l" / "ledger.json")
    model = llama()
    spy, trainer = Spy(model), grpo(tmp_path, model, callback)
    trainer.train()
    assert all(spy.noisy("train")) and len(spy.noisy("train")) == 3
    assert set(fires(callback)) == {"rollout", "train"} and fires(callback)["train"]["forward"] == 3 * 14
    plan, norms = callback.merged.sites
    assert norms.by("phase") == {"rollout": {"forward": 15, "backward": 0}}, "five norms, three rollouts"
    assert plan.magnitude == pytest.approx(0.05, rel=0.1) and norms.magnitude == pytest.approx(0.1, rel=0.25)
    assert logged(trainer, "sigma") == [0.1] * 3
    assert sum(logged(trainer, "forward")) == callback.merged.forward and min(logged(trainer, "forward")) > 14
    assert logged(trainer, "measured_error")[-1] == pytest.approx(0.05, rel=0.1)
    written = json.loads((tmp_path / "l" / "ledger.json").read_text())
    assert st.Ledger.from_dict(written) == st.Ledger.from_dict(callback.merged.to_dict())
    assert written["workers"] == [{"rank": 0, "forward": callback.merged.forward, "backward": 0}]
    assert (written["seed"], written["aqn"]) == (5, "constant:0.1,seed=5")
    assert "Ledger · seed 5" in capsys.readouterr().out


@pytest.mark.parametrize("make", [sft, dpo])
def test_sft_and_dpo_are_shaken_forward_and_backward(tmp_path, make):
    callback = ShaketableCallback(plan="relative_gaussian:0.05@op.matmul", seed=0)
    model = llama()
    trainer = make(tmp_path, model, callback)
    reference = getattr(trainer, "ref_model", None)
    spy, other = Spy(model), None if reference is None else Spy(reference)
    trainer.train()
    assert set(fires(callback)) == {"train"}
    assert callback.merged.forward > 0 and callback.merged.backward > 0
    assert min(logged(trainer, "backward")) > 0
    assert all(spy.noisy("train"))
    assert other is None or (other.passes and not any(noise for _, noise in other.passes))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["relative_gaussian:0.05@op.matmul", PLAN, f"{PLAN},point=weight"])
@pytest.mark.parametrize("make", [grpo, dpo])
def test_the_reference_that_peft_makes_of_the_same_weights_is_clean(tmp_path, make, plan):
    callback = ShaketableCallback(plan=plan)
    more = {"beta": 0.1} if make is grpo else {}
    trainer = make(tmp_path, llama(), callback, peft_config=lora(), max_steps=1, **more)
    seen = []
    spy = Spy(trainer.model)
    tuned = spy.mlp.down_proj
    spy.mlp.register_forward_hook(lambda *_: seen.append(bool(tuned.disable_adapters)))
    trainer.train()
    assert any(seen) and not all(seen)
    assert [noise for _, noise in spy.passes] == [not reference for reference in seen]


def test_evaluation_is_clean_also_when_it_samples(tmp_path):
    callback = ShaketableCallback(plan=PLAN, aqn="constant:0.2")
    model = llama()
    passes = evaluating(tmp_path, model, callback, Spy(model).passes)
    assert len(passes) == 4 and all(len(found) > 2 for found in passes)
    assert not any(noise for found in passes for _, noise in found)
    assert set(fires(callback)) == {"rollout", "train"} and callback.noise.rollouts == 3
    assert set(callback.merged.sites[1].by("phase")) == {"rollout"}, "AQN too"


def test_evaluation_is_shaken_when_a_clause_says_so(tmp_path):
    callback = ShaketableCallback(plan=f"{PLAN},phase=eval; gain:1@module.rmsnorm", aqn="constant:0.2")
    model = llama()
    passes = evaluating(tmp_path, model, callback, Spy(model).passes)
    assert all(noise for found in passes for _, noise in found)
    assert set(fires(callback)) == {"eval"}
    assert set(callback.merged.sites[1].by("phase")) == {"rollout", "train"}, "what names no phase is not for evaluations"
    assert set(callback.merged.sites[2].by("phase")) == {"rollout"} and callback.noise.rollouts == 3


def test_weights_are_saved_clean_and_the_model_is_left_as_it_was(tmp_path):
    from transformers import LlamaForCausalLM

    model = llama()
    kinds = [type(m) for m in model.modules()]
    trainer = sft(tmp_path, model, ShaketableCallback(plan="mxfp4@module.linear"), save_strategy="steps", save_steps=3)
    methods = set(trainer.__dict__)
    trainer.train()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in saved.state_dict().items())
    assert torch.equal(logits(model), logits(saved))
    assert [type(m) for m in model.modules()] == kinds
    assert not any(name.startswith("_shaketable") for m in model.modules() for name in m.__dict__)
    assert not {"training_step", "evaluation_loop"} & (set(trainer.__dict__) - methods)


STEPS = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}


class Killed(TrainerCallback):
    """Ends a training in its third step, as a kill would."""

    def on_step_begin(self, args, state, control, **more):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_killed_training_leaves_its_ledger_and_a_resumed_one_ends_as_an_uninterrupted_one(tmp_path):
    plan = f"{PLAN}; relative_gaussian:0.2@module.linear,point=weight"

    def train(ledger, folder, resume=None, *others):
        model = llama()
        trainer = sft(folder, model, ShaketableCallback(plan=plan, ledger=ledger), max_steps=4, **STEPS)
        for other in others:
            trainer.add_callback(other)
        trainer.train(resume_from_checkpoint=resume)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return json.loads(ledger.read_text()), losses, model.state_dict()

    whole, losses, weights = train(tmp_path / "whole.json", tmp_path / "whole")
    file, folder = tmp_path / "ledger.json", tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        train(file, folder, None, Killed)
    left = json.loads(file.read_text())
    assert left["finished"] is False and 0 < left["forward"] < whole["forward"]
    with pytest.raises(ShaketableError, match="is there already"):
        train(file, folder)
    resumed, losses_again, weights_again = train(file, folder, str(folder / "checkpoint-2"))
    assert losses_again[2:] == losses[2:]
    assert all(torch.equal(value, weights_again[name]) for name, value in weights.items())
    assert resumed["finished"] is True
    assert (resumed["forward"], resumed["backward"]) == (whole["forward"], whole["backward"])


def test_origin_03_the_trainers_step_reaches_the_noise(tmp_path):
    callback = ShaketableCallback(aqn="global_decay:0.2-0.02,stages=3")
    trainer = grpo(tmp_path, llama(), callback)
    trainer.train()
    assert logged(trainer, "sigma") == [0.0, 0.2, 0.02]
    site = callback.noise.ledger.sites[0]
    assert (callback.noise.rollouts, site.forward) == (3, 10), "five norms, two rollouts with noise"
    assert site.asked == pytest.approx(0.11) and site.magnitude == pytest.approx(0.11, rel=0.25)
    assert set(site.by("phase")) == {"rollout"}, "the trained policy is clean"


def test_origin_04_sigma_of_each_layer_reaches_the_sampler(tmp_path):
    file = tmp_path / "aqn.yaml"
    file.write_text(
        "aqn: {enabled: true, layer_specific: true, base_sigma: 0.1, layer_sigmas: {1: 0.3}, schedule: 'constant:0.1'}\n"
    )
    callback = ShaketableCallback(aqn=file)
    grpo(tmp_path, llama(), callback).train()
    assert callback.noise.sigmas == pytest.approx({1: 0.3})
    (site,) = callback.noise.ledger.sites
    assert {s.layer for s in site.spots.values()} == {1} and len(site.spots) == 2
    assert all(s.counts == {"rollout": [3, 0]} for s in site.spots.values())
    assert site.magnitude == pytest.approx(0.3, rel=0.25)


def test_a_trainer_that_never_samples_is_an_error(tmp_path):
    with pytest.raises(st.InertError, match="no rollout"):
        sft(tmp_path, llama(), ShaketableCallback(aqn="constant:0.1")).train()


class Failing(TrainerCallback):
    """Raises between two steps."""

    def on_step_end(self, *_, **more):
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_script_that_fails_raises_its_own_error_and_keeps_a_clean_model(tmp_path, error, capsys):
    def failing(completions, **_):
        raise error("of the user's own")

    model, file = llama(), tmp_path / "ledger.json"
    clean, kinds = logits(copy.deepcopy(model)), [type(m) for m in model.modules()]
    trainer = grpo(tmp_path, model, ShaketableCallback(plan=PLAN, aqn="constant:0.2", ledger=file), reward=failing)
    with pytest.raises(error, match="of the user's own") as caught:
        trainer.train()
    assert caught.value.__context__ is None
    assert torch.equal(logits(model), clean) and [type(m) for m in model.modules()] == kinds
    assert not file.exists() and "Ledger" not in capsys.readouterr().out
    assert "training_step" not in trainer.__dict__


@pytest.mark.slow
def test_an_error_between_steps_leaves_a_clean_model_and_the_next_training_is_shaken(tmp_path):
    model, callback = llama(), ShaketableCallback(plan=PLAN)
    trainer = sft(tmp_path, model, callback)
    trainer.add_callback(Failing())
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    clean = llama()
    clean.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(clean))
    trainer.pop_callback(Failing)
    trainer.train()
    assert "training_step" not in trainer.__dict__
    assert callback.merged.forward == 3 * 14


def test_after_a_training_that_died_the_next_one_is_clean_without_the_callback(tmp_path):
    callback = ShaketableCallback(plan=f"{PLAN};{PLAN},phase=eval")
    trainer = sft(tmp_path, llama(), callback)
    trainer.add_callback(Failing())
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    before = callback.ledger.forward
    for gone in (Failing, ShaketableCallback):
        trainer.remove_callback(gone)
    trainer.train()
    assert callback.ledger.forward == before > 0
    assert "training_step" not in trainer.__dict__ and "evaluation_loop" not in trainer.__dict__


@pytest.mark.parametrize("plan", ["gain:0@module.linear", f"{PLAN},phase=rollout"])
def test_a_plan_that_did_nothing_is_an_error_at_the_end(tmp_path, plan):
    with pytest.raises(st.InertError, match="linear"):
        sft(tmp_path, llama(), ShaketableCallback(plan=plan)).train()
    sft(tmp_path, llama(), ShaketableCallback(plan=plan, allow_inert=True)).train()


@pytest.mark.slow
@pytest.mark.parametrize("make", [sft, grpo])
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("saturation:2@module.linear", "times and changed no value"),
        (f"{PLAN};gain:0.1@op.softmax", "gain:0.1@op.softmax,phase=rollout+train was on in"),
    ],
)
def test_a_plan_that_does_nothing_is_an_error_after_the_first_step(tmp_path, make, plan, said):
    callback = ShaketableCallback(plan=plan)
    trainer = make(tmp_path, llama(), callback, gradient_accumulation_steps=2)
    with pytest.raises(st.InertError, match=r"\(after the first step\)") as error:
        trainer.train()
    assert said in str(error.value)
    assert trainer.state.global_step == 1
    assert "training_step" not in trainer.__dict__ and callback.injection.closed


def test_what_cannot_work_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ShaketableError, match="needs plan=, aqn= or both, or mismatch_every= alone"):
        ShaketableCallback()
    with pytest.raises(st.PlanError, match="matches 'moose'"):
        sft(tmp_path, llama(), ShaketableCallback(plan="gain:1@module.moose")).train()
    (tmp_path / "ledger.json").write_text("{}")
    with pytest.raises(ShaketableError, match="nothing is overwritten"):
        sft(tmp_path, llama(), ShaketableCallback(plan=PLAN, ledger=tmp_path / "ledger.json")).train()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"aqn": "constant:0.1"}, "constant:0.1: rollouts happen in the vLLM server"),
        ({"plan": PLAN}, "the vLLM server.*write phase=train"),
    ],
)
def test_a_vllm_server_is_out_of_reach(tmp_path, fields, said):
    """vLLM is not here: the trainer is a real one whose sampler is set to what TRL makes of `vllm_mode='server'`."""
    trainer = served(grpo(tmp_path, llama(), ShaketableCallback(**fields)))
    with pytest.raises(st.PlanError, match=said):
        trainer.train()
    in_training = ShaketableCallback(plan=f"{PLAN},phase=train").plan
    assert sampler_of(trainer, in_training, None, 3, 0) is None, "beside it, training can be shaken"


@pytest.mark.parametrize("name", ["training_step", "evaluation_loop"])
def test_a_release_that_has_renamed_a_method_is_refused_before_the_first_step(tmp_path, monkeypatch, name):
    trainer = sft(tmp_path, llama(), ShaketableCallback(plan=PLAN), max_steps=1)

    for kind in [kind for kind in type(trainer).__mro__ if name in vars(kind)]:
        monkeypatch.setattr(kind, f"{name}_of_tomorrow", vars(kind)[name], raising=False)
        monkeypatch.delattr(kind, name)
    with pytest.raises(ShaketableError, match=rf"has no \S+{name} \(needed: .* was tested with \w+ [\d.]+"):
        trainer.train()


def served(trainer):
    from trl.generation.vllm_generation import VLLMGeneration

    trainer.args.use_vllm, trainer.vllm_generation = True, object.__new__(VLLMGeneration)
    trainer.vllm_generation.mode = "server"
    return trainer


@pytest.mark.parametrize("fields", [{"aqn": "constant:0.1"}, {"plan": PLAN}])
def test_continuous_batching_is_out_of_reach(tmp_path, fields):
    trainer = grpo(tmp_path, llama(), ShaketableCallback(**fields), use_transformers_continuous_batching=True)
    with pytest.raises(st.PlanError, match="thread of its own"):
        trainer.train()


def test_operators_of_a_model_that_the_trainer_compiles_are_shaken(tmp_path, fresh_graphs):
    callback = ShaketableCallback(plan="relative_gaussian:0.05@op.matmul", seed=0)
    how = {"torch_compile": True, "torch_compile_backend": "aot_eager", "gradient_checkpointing": False}
    sft(tmp_path, llama(), callback, max_steps=2, **how).train()
    assert fires(callback)["train"] == {"forward": 2 * 14, "backward": 2 * 28}
    assert torch.overrides._get_current_function_mode_stack() == []
