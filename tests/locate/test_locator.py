"""One run of locate in every mode on a small model: what the diagnosis says of its own cost and probes."""

import pytest

import shaketable as st
from shaketable.errors import ModelError
from shaketable.locate.locate import Locator
from tests.locate.architectures import build, tokens

IDS = tokens(n=8)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def found(model):
    return {mode: st.locate(model, mode=mode, input_ids=IDS, seed=3) for mode in ("host", "device", "all")}


@pytest.mark.parametrize(("mode", "forwards"), [("host", 2 + 4), ("device", 2 + 1 + 1 + 2), ("all", 2 + 4 + 1 + 2)])
def test_the_cost_is_that_of_the_probes_that_ran(found, mode, forwards):
    diagnosis = found[mode]
    assert diagnosis.device_forwards == forwards
    timed = {"trace", "repeat", "links"} | ({"weights", "replay", "batch", "decode"} if mode != "device" else set())
    timed |= {"twin", "causal", "statistics"} if mode != "host" else set()
    assert diagnosis.cost.keys() == timed and all(cost >= 0 for cost in diagnosis.cost.values())
    assert diagnosis.cost_forwards == pytest.approx(sum(diagnosis.cost.values()), abs=0.01)


def test_a_probe_that_another_one_makes_needless_is_skipped_and_says_why(found):
    result = found["all"].probes[0].results["causal"]
    assert (result.status, result.reason) == ("skipped", "replay has judged this layer, and sees more")
    assert found["device"].probes[0].results["causal"].status == "pass"
    assert found["host"].probes[0].results["weights"].reason == "no file to compare with"


def test_progress_is_told_layer_by_layer(model):
    told = []
    st.locate(model, mode="host", input_ids=IDS, progress=lambda *facts: told.append(facts))
    assert told == [
        (0, 3, "a plain forward"), (0, 3, "trace"), (1, 3, "layer 0"), (2, 3, "layer 1"), (3, 3, "layer 2"),
    ]  # fmt: skip


def test_memory_that_is_full_is_told_with_what_helps(model, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(Locator, "run", full)
    with pytest.raises(ModelError, match=r"^there is not enough memory on cpu for one layer's probes; use fewer tokens$"):
        st.locate(model, input_ids=IDS)
