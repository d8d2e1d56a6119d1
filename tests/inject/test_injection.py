"""An active plan, and what changes while it is."""

from shaketable.inject.injection import Injection
from shaketable.plan import Plan


def test_what_was_counted_is_told_before_the_magnitude_changes(monkeypatch):
    """What a GPU has counted by then belongs to the magnitude of then."""
    injection, told = Injection(Plan.parse("gain:0.1@module.linear")), []
    monkeypatch.setattr(injection, "settle", lambda: told.append(injection.faults[0].magnitude))
    injection.set_magnitude(0.5)
    assert told[0] == 0.1 and injection.faults[0].magnitude == 0.5
