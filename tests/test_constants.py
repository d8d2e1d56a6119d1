"""Numbers that a guarantee rests on, each with the reason it is what it is.

A threshold that is twice as wide breaks nothing that a test of one case would see: it finds a little less, or alarms a little
more often. So whoever changes one of these changes it here too, and says what was measured again.
"""

import importlib

import pytest

from shaketable.faults.rng import key_of, mix64

CONSTANTS = {
    # locate: no false alarm, and what is missed
    "numerics.intervals.ACCUMULATION": 2.0**-24,  # float32 inside of every kernel
    "numerics.intervals.TINY": 2.0**-125,  # what a device may flush to zero
    "locate.twins.LARGEST_EXPONENT": 3,
    # a plan that does nothing is an error, and a rare one is not
    "ledger.inert.ENOUGH": 256,
    "ledger.inert.NEVER": 1e-6,
    "launch.process.PASSES": 2,
    # measured equals asked
    "ledger.ledger.TOLERANCE": 0.1,
    "faults.sums.SAMPLE": 2**14,
    "faults.sums.ROWS": 2**16,
    "inject.counters._PATIENCE": 7,
    # recomputed micro-batches find their noise
    "inject.passes._REMEMBERED": 256,
    # what a killed process loses
    "launch.ledger_file.PAUSE": 0.05,
    "launch.ledger_file.SHARE": 20,
    "train.checkpoints.KEEP": 2,
    # what is called legal between sampler and trainer
    "mismatch.results.MEAN": 1.5,
    "mismatch.results.LARGEST": 10.0,
    "mismatch.semantics.EXPLAINS": 0.2,
    "mismatch.semantics.LEAVES": 0.6,
    "mismatch.verdict.REPRODUCES": 0.5,
    "numerics.decoder_operators.SCALE": 2.0,
    "numerics.decoder_operators.SIGMAS": 6.0,
    "numerics.decoder_operators.EXCESS": 4.0,
    # a claim
    "evaluate.statistics.POWER": 0.8,
    "launch.run.NOTHING_INJECTED": 3,
    "study.runs.LAST": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_number_that_a_guarantee_rests_on_is_what_it_was(name):
    module, _, constant = name.rpartition(".")
    assert getattr(importlib.import_module(f"shaketable.{module}"), constant) == CONSTANTS[name]


@pytest.mark.parametrize(("terms", "units"), [(1, 1), (25, 25), (64, 44), (4096, 576)])
def test_the_slack_of_a_sum_is_the_documented_one(terms, units):
    """In units of float32: all terms where they are few, 5√K + K/16 where they are many."""
    from shaketable.numerics.intervals import summation

    assert summation(terms) == units * 2.0**-24


def test_keys_of_other_parts_are_other_keys_in_every_version():
    """Recorded runs are repeated by their keys, so these numbers never change; and no two lists of parts are one."""
    assert key_of(0, "a", "b") == 7692335375239204862
    assert key_of("a", "bc") != key_of("ab", "c") != key_of("abc")
    assert [mix64(n) for n in (0, 1)] == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1], "SplitMix64's own first outputs"
