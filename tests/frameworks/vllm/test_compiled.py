"""A compiled vLLM, in processes of its own: taps that are in the graph, obey while it lives, and stay out of other graphs.

Two engines start one after the other and share vLLM's cache of graphs on disk: under a plan, and under none. The plan comes by
the environment, which vLLM does not look at when it names its graphs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shaketable as st
from tests.frameworks.vllm.small_engines import PROMPTS, Oracle
from tests.frameworks.vllm.small_models import save

pytestmark = pytest.mark.covers("vLLM", "module and layer plans; magnitudes live", "compiled, own processes")

PROGRAM = Path(__file__).with_name("programs") / "compiled.py"
PLAN = "relative_gaussian:0.02@module.linear; gain:0.1@layer.1; saturation:0.8,scope=token@module.rmsnorm,point=input"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of three layers: graphs are compiled layer by layer."""
    folder = tmp_path_factory.mktemp("compiled")
    save("llama", folder / "model")
    return folder


@pytest.fixture(scope="module")
def oracle(folder):
    """The same model in transformers."""
    return Oracle(folder / "model")


@pytest.fixture(scope="module")
def said(folder):
    """What the two engines said."""
    return {"shaken": start(folder, "shaken", PLAN), "clean": start(folder, "clean", "none")}


def start(folder, name, plan):
    env = os.environ | {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} | ({"SHAKETABLE_PLAN": plan} if plan != "none" else {})
    command = [sys.executable, PROGRAM, folder / "model", plan, folder / f"{name}.json"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads((folder / f"{name}.json").read_text())


def tokens(answers):
    return [ids for ids, _ in answers]


def logprobs(answers):
    return [value for _, value in answers]


def expected(oracle, plan):
    """What transformers computes under a plan: tokens, and the log-probability of all of them."""
    with st.inject(oracle.model, plan):
        return oracle.answer(PROMPTS)


def test_every_clause_hits_and_what_is_measured_is_what_was_asked_for(said):
    ledger = said["shaken"]["ledger"]
    assert [site["matched"] for site in ledger["sites"]] == [12, 1, 7]
    for site, asked in zip(ledger["sites"], (0.02, 0.1, 0.8), strict=True):
        assert site["measured_magnitude"] == pytest.approx(asked, rel=0.05)
        assert site["phases"].keys() == {"rollout"}
        assert min(spot["counts"]["rollout"][0] for spot in site["spots"].values()) > 0


def test_off_is_the_clean_engine(said):
    clean = said["clean"]["on"]
    for name in ("off", "cleared", "no sigma", "cleared again"):
        assert tokens(said["shaken"][name]) == tokens(clean)
        assert logprobs(said["shaken"][name]) == pytest.approx(logprobs(clean), abs=1e-5)


def test_on_is_not(said):
    clean = logprobs(said["clean"]["on"])
    for name in ("on", "second and third", "still on", "sigma", "weights"):
        assert max(abs(a - b) for a, b in zip(logprobs(said["shaken"][name]), clean, strict=True)) > 1e-3, name


def test_a_magnitude_is_changed_live_and_gives_what_transformers_gives(said, oracle):
    for name, plan in [
        ("second and third", "gain:0.3@layer.1; saturation:0.6,scope=token@module.rmsnorm,point=input"),
        ("weights", "gain:0.5@module.rmsnorm,point=weight"),
    ]:
        should = expected(oracle, plan)
        assert tokens(said["shaken"][name]) == tokens(should), name
        assert logprobs(said["shaken"][name]) == pytest.approx(logprobs(should), abs=1e-4), name
    before, after = said["shaken"]["compilations"]
    assert before == after, "nothing is compiled for a change"


def test_the_plan_can_be_given_again_and_none_at_other_sites(said):
    assert said["shaken"]["asked again"] == [0.02, 0.1, 0.8]
    assert "only magnitudes can change" in (said["shaken"]["another plan"])
    assert "must be given when vLLM starts" in said["shaken"]["noise on outputs"]
    assert "no plan" in said["shaken"]["magnitude of nothing"]


def test_an_engine_without_a_plan_has_no_taps_after_all_that(said, oracle, folder):
    assert said["clean"]["taps"] == [0] != said["shaken"]["taps"]
    assert tokens(said["clean"]["on"]) == tokens(oracle.answer(PROMPTS))
    places = list((folder / "cache" / "torch_compile_cache" / "torch_aot_compile").iterdir())
    assert len(places) == 1, "of the engine without a plan"
