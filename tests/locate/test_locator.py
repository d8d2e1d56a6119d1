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


def test_a_probe_that_another_one_makes_needless_is_skipped_and_says_why(found):
    result = found["all"].probes[0].results["causal"]
    assert (result.status, result.reason) == ("skipped", "replay has judged this layer, and sees more")
    assert found["device"].probes[0].results["causal"].status == "pass"
    assert found["host"].probes[0].results["weights"].reason == "no file to compare with"


def test_memory_that_is_full_is_told_with_what_helps(model, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(Locator, "run", full)
    with pytest.raises(ModelError, match=r"^there is not enough memory on cpu for one layer's probes; use fewer tokens$"):
        st.locate(model, input_ids=IDS)
