"""vLLM against a trainer: what the worker tells is what it computes, healthy pairs are legal, planted defects are named.

The engine of most tests is in this process, so that a test can reach into its worker. The campaign with all pairs is
`benchmarks/mismatch.py`; here it runs for a few.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from shaketable.errors import UnavailableError
from shaketable.mismatch.engine import Rollout, Sampling
from tests.frameworks.vllm.planted import DEFECTS, model_of
from tests.frameworks.vllm.small_engines import NANO, SHAPE
from tests.frameworks.vllm.vllm_programs import FOLDER, printed, run

pytestmark = pytest.mark.covers("vLLM", "mismatch: weights, operators and planted defects", "eager")
ROOT = Path(__file__).parents[3]
LONG = [3 + i % 20 for i in range(40)]
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], LONG]


@pytest.fixture(scope="module")
def engine():
    from vllm.distributed.parallel_state import destroy_model_parallel

    from shaketable.integrations.vllm.engine import VLLMEngine

    destroy_model_parallel()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return VLLMEngine.open(str(NANO), {**SHAPE, "max_model_len": 128, "enforce_eager": True})


@pytest.fixture(scope="module")
def hf():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rollouts(engine):
    return engine.sample(PROMPTS, Sampling(8, seed=1))


def furthest(one, two):
    return max(abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


def test_every_weight_comes_back_as_it_is_though_vllm_packed_it_away(engine, hf):
    packed = [m for m in model_of(engine).modules() if hasattr(m, "weight") and m.weight.numel() == 0]
    told = dict(engine.parameters())
    own = dict(hf.named_parameters(remove_duplicate=False))
    assert len(packed) == 8 * 4, "qkv, o, gate_up and down of every layer: there is nothing left to read"
    assert told.keys() == own.keys()
    assert all(torch.equal(told[name], own[name]) for name in own)


def test_each_operator_is_told_with_what_the_one_before_it_made(engine, rollouts):
    for phase, count in (("prefill", 48), ("decode", 8)):
        calls = {call.name: call for call in engine.record([rollouts[2]], phase)[0].calls}
        assert len(calls) == 2 + 8 * 15 + 2
        first = calls["model.layers.0.input_layernorm"]
        assert torch.equal(first.inputs["x"], calls["model.embed_tokens"].output)
        assert torch.equal(calls["model.layers.0.self_attn.q_proj"].inputs["x"], first.output)
        attention = calls["model.layers.6.self_attn"]
        assert attention.inputs["q"].shape == (count, 4, 32) and attention.inputs["k"].shape == (48, 2, 32)
        assert attention.inputs["positions"].tolist() == list(range(48 - count, 48))
        assert torch.equal(attention.inputs["q"], calls["model.layers.6.self_attn.rotary_q"].output)
        assert torch.equal(calls["lm_head"].inputs["x"], calls["model.norm"].output)
        last = calls["log_softmax"]
        assert last.inputs["ids"].tolist() == rollouts[2].completion
        assert torch.equal(last.inputs["x"].log_softmax(-1).gather(1, last.inputs["ids"].unsqueeze(1)), last.output)


def test_decoding_follows_the_tokens_it_is_given(engine, hf, rollouts):
    told = [Rollout(r.prompt, [20 + i for i in range(6)], [0.0] * 6) for r in rollouts]
    read, decoded = engine.logprobs(told), engine.logprobs(told, "decode")
    with torch.no_grad():
        own = [hf(torch.tensor([r.tokens])).logits[0].log_softmax(-1) for r in told]
    expected = [[float(lp[len(r.prompt) + i - 1, r.completion[i]]) for i in range(6)] for r, lp in zip(told, own, strict=True)]
    assert furthest(read, expected) < 1e-3 and furthest(decoded, expected) < 1e-3
    assert furthest([r.logprobs for r in rollouts], engine.logprobs(rollouts)) < 1e-4, "sampled and read"
    assert furthest(engine.logprobs(told, "batch of one"), read) < 1e-4


def test_the_prefix_cache_is_hit_when_it_is_asked_for(engine, rollouts, monkeypatch):
    seen = []
    generate = engine.llm.generate
    monkeypatch.setattr(
        engine.llm, "generate", lambda *a, **k: [seen.append(r.num_cached_tokens) or r for r in generate(*a, **k)]
    )
    engine.logprobs([rollouts[2]], "prefix cache")
    assert seen[-1] == 32
    with pytest.raises(UnavailableError, match="no sequence fills a block of 32 tokens"):
        engine.logprobs(rollouts[:2], "prefix cache")


def campaign(tmp_path, *arguments):
    """The benchmark, in processes of its own."""
    done = run(sys.executable, ROOT / "benchmarks" / "mismatch.py", "--out", tmp_path / "found.json", *arguments)
    assert done.returncode == 0, printed(done)[-3000:]
    return json.loads((tmp_path / "found.json").read_text())


def test_the_command_line_starts_vllm_and_exits_with_the_verdict(tmp_path):
    arguments = {**SHAPE, "enforce_eager": True}
    asked = [NANO, "--engine", "vllm", "--engine-args", json.dumps(arguments), "--task", "arithmetic", "-n", "4"]
    command = [sys.executable, "-m", "shaketable", "mismatch", *asked, "--recorded", "1", "--json", tmp_path / "found.json"]
    done = run(*command)
    assert done.returncode == 0, printed(done)[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["verdict"] == "LEGAL" and found["engine"]["engine"] == "vllm"
    assert found["weights"]["compared"] == 75 and found["weights"]["differing"] == []
    refused = run(*[x if x != json.dumps(arguments) else '{"max_model_lenn": 3}' for x in command], "--force")
    assert refused.returncode == 2 and "vLLM could not start" in refused.stderr and "Traceback" not in printed(refused)


def test_a_healthy_pair_is_legal_with_vllm_in_its_own_process(tmp_path):
    found = campaign(tmp_path, "--only", "nano float32 eager healthy,nano bfloat16 eager healthy", "--runs", "1")
    assert len(found) == 2
    assert [run["verdict"] for facts in found.values() for run in facts["healthy"]] == ["LEGAL", "LEGAL"]


@pytest.mark.parametrize("only", ["nano float32 eager planted", "nano bfloat16 eager planted", "moe float32 eager planted"])
def test_planted_defects_are_named_on_their_stage(tmp_path, only):
    (facts,) = campaign(tmp_path, "--only", only, "--runs", "0").values()
    wanted = {name for name, defect in DEFECTS.items() if defect.model == only.split()[0]}
    assert facts["planted"].keys() == wanted
    unnamed = {name: row["sentence"] for name, row in facts["planted"].items() if not (row["named"] or row["unseen"])}
    assert unnamed == {}


@pytest.fixture(scope="module", params=["healthy", "stale"])
def training(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    done = run(sys.executable, FOLDER / "trl_grpo.py", NANO, folder, request.param)
    assert done.returncode == 0, printed(done)[-3000:]
    return request.param, json.loads((folder / "found.json").read_text())


def test_a_training_with_colocated_vllm_logs_the_gap_and_stops_at_a_stale_layer(training):
    how, found = training
    rows = [row for row in found["log"] if "shaketable/mismatch/gap" in row]
    assert rows and all(row["shaketable/mismatch/weights_differing"] == 0 for row in rows)
    assert any(name.startswith("shaketable/mismatch/share/") for name in rows[0]) and "shaketable/mismatch/floor" in rows[0]
    if how == "stale":
        assert re.match(r"StaleWeightsError: step \d: after the sync the sampler's model\.layers\.5\.", found["error"])
        return
    assert found["error"] is None and len(rows) == 2
    compared = [row[f"shaketable/mismatch/weights_{name}"] for row in rows for name in ("compared", "cast")]
    assert compared == [75, 75] * 2, "TRL starts vLLM in bfloat16 for this float32 checkpoint"
    assert 1e-6 < rows[0]["shaketable/mismatch/gap"] < 1e-2
