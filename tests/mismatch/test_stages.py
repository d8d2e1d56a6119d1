"""Healthy pairs are legal, planted faults are named on their stage, and a verdict says what it did not look at."""

from dataclasses import replace

import pytest
import torch

from shaketable.errors import ShaketableError, UnavailableError
from shaketable.mismatch.engine import EngineError, Rollout
from shaketable.mismatch.stages import check
from tests.mismatch import pairs, planted


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "eager"), ("bfloat16", "sdpa")])
def test_a_healthy_pair_is_legal(dtype, attention):
    found = pairs.verdict(pairs.engine(getattr(torch, dtype), attention))
    assert found.verdict == "LEGAL", found.sentence
    assert found.exit_code == 0
    assert found.operators.kinds["linear"].operators == 2 * 56
    assert not found.weights.differing
    assert found.shares.explained > 0.7


@pytest.mark.parametrize("name", planted.OPERATORS)
def test_a_planted_operator_is_named(name):
    plant, operator, says = planted.OPERATORS[name]
    found = pairs.verdict(pairs.engine(plant=plant), recorded=1)
    assert (found.verdict, found.stage) == ("DEFECT", "operators"), found.sentence
    assert f"the engine's {operator} (" in found.sentence and says in found.sentence, found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in planted.OPERATORS if n != "coarse_head"])
def test_a_planted_operator_is_named_in_bfloat16(name):
    plant, operator, _ = planted.OPERATORS[name]
    found = pairs.verdict(pairs.engine(torch.bfloat16, plant=plant))
    assert found.stage == "operators" and f"the engine's {operator} (" in found.sentence, found.sentence


@pytest.mark.parametrize(("plant", "kind"), [(planted.stale_layer, "stale"), (planted.swapped_heads, "other_values")])
def test_planted_weights_are_named(plant, kind):
    found = pairs.verdict(pairs.engine(plant=plant), recorded=1)
    assert (found.verdict, found.stage) == ("DEFECT", "weights")
    assert {d.kind for d in found.weights.differing} == {kind}
    assert all("layers.3." in d.name for d in found.weights.differing)


def test_a_verdict_says_what_it_did_not_look_at():
    class Silent(type(pairs.engine())):
        def record(self, rollouts, phase, rows=None):
            raise UnavailableError("captured graphs call no module")

    other = Silent(pairs.engine(torch.bfloat16).model)
    found = pairs.verdict(other)
    assert found.operators is None
    assert any("captured graphs" in line for line in found.conclusion.not_looked_at)
    assert found.at_floor
    assert (found.verdict, found.exit_code) == ("INCONCLUSIVE", 4), "the floor proves nothing of what was not looked at"
    assert "captured graphs" in found.sentence and "enforce_eager" in found.conclusion.next


def test_an_engine_that_dies_takes_nothing_with_it():
    class Dies(type(pairs.engine())):
        def record(self, rollouts, phase, rows=None):
            raise EngineError("vLLM died: out of memory")

        def logprobs(self, rollouts, variant=None):
            if self.early:
                raise EngineError("vLLM died: out of memory")
            return super().logprobs(rollouts, variant)

    other = Dies(pairs.engine().model)
    for other.early in (False, True):
        found = pairs.verdict(other)
        assert (found.verdict, found.exit_code) == ("INCONCLUSIVE", 4)
        assert "vLLM died: out of memory" in found.sentence
        assert found.gap.tokens and found.floor.rows and found.semantics.rows
        assert (found.weights is None) == other.early


GOOD = Rollout([5, 6], [7, 8], [-1.0, -2.0])


@pytest.mark.parametrize(
    ("rollouts", "says"),
    [
        ([], "no token to compare"),
        ([GOOD, replace(GOOD, prompt=[5, 99])], "rollout 1 has token 99, and nano knows 0 to 98; are the rollouts of another"),
        ([replace(GOOD, prompt=[5] * 300)], "302 tokens, and the context of nano is 256"),
        ([replace(GOOD, logprobs=[-1.0, 0.5])], "log-probability 0.5"),
        ([replace(GOOD, logprobs=[-1.0, float("nan")])], "log-probability nan"),
        ([replace(GOOD, prompt=[])], "empty prompt"),
        ([replace(GOOD, completion=[], logprobs=[])], "every completion is empty"),
    ],
)
def test_rollouts_that_cannot_be_read_are_refused_in_one_line(rollouts, says):
    with pytest.raises(ShaketableError, match=says):
        check(rollouts, pairs.trainer())
