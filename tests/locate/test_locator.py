"""One run of locate in every mode on a small model: what the diagnosis says of itself, field by field."""

import platform
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import ModelError, ShaketableError
from shaketable.locate import locate as module
from shaketable.locate.locate import Locator, _failed, _longest, _still
from tests.locate.architectures import build, tokens

IDS = tokens(n=8)
RUN = {
    "host": {"weights", "repeat", "links", "checksum", "replay", "batch", "decode"},
    "device": {"repeat", "links", "twin", "causal"},
}
RUN["all"] = RUN["host"] | RUN["device"]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def found(model):
    return {mode: st.locate(model, mode=mode, input_ids=IDS, seed=3) for mode in RUN}


@pytest.mark.parametrize("mode", RUN)
def test_every_layer_has_the_probes_of_the_mode_and_statistics_where_the_device_was_asked(found, mode):
    diagnosis = found[mode]
    *layers, outside = diagnosis.probes
    assert [(p.layer, p.name) for p in layers] == [(n, f"model.layers.{n}") for n in range(3)]
    assert (outside.layer, outside.name) == (None, "")
    for probe in layers:
        assert probe.results.keys() == RUN[mode]
        assert (probe.statistics is not None) == (mode != "host")
    assert outside.results.keys() == {"repeat", "links"} | (
        {"weights", "replay", "batch", "decode"} if mode != "device" else set()
    )
    assert diagnosis.verdict == "HEALTHY" and (diagnosis.srdd is not None) == (mode != "host")


@pytest.mark.parametrize(("mode", "forwards"), [("host", 2 + 4), ("device", 2 + 1 + 1 + 2), ("all", 2 + 4 + 1 + 2)])
def test_the_cost_is_that_of_the_probes_that_ran(found, mode, forwards):
    diagnosis = found[mode]
    assert diagnosis.device_forwards == forwards
    timed = {"trace", "repeat", "links"} | ({"weights", "replay", "batch"} if mode != "device" else set())
    timed |= {"twin", "statistics"} if mode != "host" else set()
    timed |= {"causal"} if mode == "device" else set()
    assert diagnosis.cost.keys() == timed and all(cost >= 0 for cost in diagnosis.cost.values())
    assert diagnosis.cost_forwards == pytest.approx(sum(diagnosis.cost.values()), abs=0.01)


def test_a_probe_that_another_one_makes_needless_is_skipped_and_says_why(found):
    result = found["all"].probes[0].results["causal"]
    assert (result.status, result.reason) == ("skipped", "replay has judged this layer, and sees more")
    assert found["device"].probes[0].results["causal"].status == "pass"
    assert found["host"].probes[0].results["checksum"].reason == "replay judges every product"
    assert found["host"].probes[0].results["weights"].reason == "no file to compare with"


def test_the_diagnosis_says_what_was_judged_with_what_and_when(found):
    now = datetime.now(UTC)
    for mode, diagnosis in found.items():
        assert (diagnosis.model, diagnosis.model_class, diagnosis.num_layers) == ("LlamaForCausalLM", "LlamaForCausalLM", 3)
        assert (diagnosis.dtype, diagnosis.attention, diagnosis.mode) == ("float32", "sdpa", mode)
        assert (diagnosis.sequences, diagnosis.tokens, diagnosis.seed, diagnosis.strict) == (1, 8, 3, False)
        assert now - timedelta(hours=1) < datetime.fromisoformat(diagnosis.date) <= now
        assert diagnosis.versions == {
            "shaketable": st.__version__, "torch": version("torch"), "transformers": version("transformers"),
            "python": platform.python_version(),
        }  # fmt: skip
        assert diagnosis.detectable_rate["repeats"] == 2 and "1-(1-p)^2" in diagnosis.detectable_rate["text"]
        unread = ["the weights and the config against a file, as no source was given"]
        assert diagnosis.believed == (unread if mode != "device" else [])
        assert (diagnosis.notes, diagnosis.planted, diagnosis.foreign) == ([], None, [])


def test_a_planted_plan_is_told_with_what_it_changed_and_found(model):
    diagnosis = st.locate(model, mode="host", input_ids=IDS, plan="gain:0.5@module.down_proj,layers=1")
    assert (diagnosis.verdict, diagnosis.layer, diagnosis.op) == ("FAULT", 1, "mlp.down_proj")
    assert diagnosis.planted["plan"] == "gain:0.5@module.down_proj,layers=1" and diagnosis.planted["changed"] > 0
    assert {e.place for e in diagnosis.evidence} == {1}


@pytest.mark.parametrize(("place", "order"), [("embed_tokens", -1), ("lm_head", 3), ("norm", 3)])
def test_what_is_wrong_outside_of_the_layers_comes_before_or_after_them(model, place, order):
    site = f"module.model.{place}" if place == "norm" else f"module.{place}"
    include = {"embed_tokens": ",include=embedding", "lm_head": "", "norm": ""}[place]
    diagnosis = st.locate(model, mode="host", input_ids=IDS, plan=f"gain:0.5@{site},point=output{include}")
    assert (diagnosis.verdict, diagnosis.layer) == ("FAULT", None) and diagnosis.evidence[0].place == order
    assert diagnosis.op.endswith(place)


def test_progress_is_told_layer_by_layer(model):
    told = []
    st.locate(model, mode="host", input_ids=IDS, progress=lambda *facts: told.append(facts))
    assert told == [
        (0, 3, "a plain forward"), (0, 3, "trace"), (1, 3, "layer 0"), (2, 3, "layer 1"), (3, 3, "layer 2"),
    ]  # fmt: skip


def locator(model, **attributes):
    made = Locator(model, "host", None, 0, None)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_logits_that_differ_between_forwards_are_a_suspicion_that_counts_tokens(model):
    clean = torch.zeros(1, 4, 5)
    one, two = clean.clone(), clean.clone()
    one[0, 1, 2], two[0, 1, 3], two[0, 3, 0] = 1.0, 1.0, 1.0
    judge = locator(model)._logits
    assert judge([clean, clean], SimpleNamespace(logits=clean)).status == "pass"
    result = judge([one, two], SimpleNamespace(logits=clean))
    assert (result.status, result.score) == ("suspect", pytest.approx(3 / 20))
    assert result.reason == "three forwards of the whole model differ in the logits of 2 of 4 tokens"
    assert "of 1 of 4 tokens" in judge([clean, one], SimpleNamespace(logits=clean)).reason
    for logits in (clean, one, two):
        logits[0, 0] = float("nan")
    assert judge([one, two], SimpleNamespace(logits=clean)).reason == result.reason, "no number is no number, each time"


def test_the_unit_of_cost_is_the_faster_of_two_plain_forwards_and_a_model_that_fails_is_told(model, monkeypatch):
    clock = iter([0.0, 5.0, 5.0, 7.0])
    made = locator(model, _now=lambda: next(clock))
    logits, unit = made._plain_forwards(IDS)
    assert unit == 2.0 and len(logits) == 2 and torch.equal(*logits)

    def broken(*_):
        raise KeyError("first line\nsecond line")

    monkeypatch.setattr(module, "forward", broken)
    with pytest.raises(ModelError, match=r"^a plain forward of LlamaForCausalLM fails on these tokens: 'first line"):
        locator(model)._plain_forwards(IDS)


def test_time_is_added_up_by_name(model):
    clock = iter([0.0, 1.0, 10.0, 13.0, 20.0, 25.0])
    made = locator(model, _now=lambda: next(clock))
    assert [made._timed(name, lambda name=name: name) for name in ("a", "a", "b")] == ["a", "a", "b"]
    assert made.spent == {"a": 4.0, "b": 5.0}


@pytest.mark.parametrize(("limit", "longest"), [(128, 128), (2, 2), (1, 1 << 30), (None, 1 << 30), ("many", 1 << 30)])
def test_as_many_tokens_as_there_are_positions(limit, longest):
    assert _longest(SimpleNamespace(config=SimpleNamespace(max_position_embeddings=limit))) == longest
    assert _longest(SimpleNamespace()) == 1 << 30


def test_a_model_is_still_while_it_is_judged_and_every_module_gets_its_mode_back():
    model = nn.Sequential(nn.Linear(2, 2).eval(), nn.Linear(2, 2).train())
    model.training = True
    with pytest.raises(KeyError), torch.autocast("cpu"), _still(model):
        assert not any(m.training for m in model.modules()) and not torch.is_autocast_enabled("cpu")
        raise KeyError
    assert [m.training for m in model.modules()] == [True, False, True]


def test_a_failure_is_told_by_its_first_line_and_full_memory_is_none():
    assert _failed("the twin", ValueError("one\ntwo")) == "the twin cannot be called: one"
    assert _failed("the twin", ValueError()) == "the twin cannot be called: ValueError"
    with pytest.raises(torch.OutOfMemoryError):
        _failed("the twin", torch.OutOfMemoryError("full"))


@pytest.mark.parametrize("shape", [(8,), (2, 8), (1, 1), (1, 2, 3)])
def test_one_sequence_of_two_tokens_or_more_is_wanted(model, shape):
    with pytest.raises(ShaketableError) as refused:
        st.locate(model, input_ids=torch.ones(shape, dtype=torch.long))
    assert str(refused.value) == f"input_ids has shape {shape}; locate runs one sequence of at least 2 tokens"


def test_an_unknown_mode_is_refused_with_those_there_are(model):
    with pytest.raises(ShaketableError, match=r"^unknown mode 'hots'; valid: device, host, all$"):
        st.locate(model, mode="hots", input_ids=IDS)


def test_memory_that_is_full_is_told_with_what_helps(model, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(Locator, "run", full)
    with pytest.raises(ModelError, match=r"^there is not enough memory on cpu for one layer's probes; use fewer tokens$"):
        st.locate(model, input_ids=IDS)
