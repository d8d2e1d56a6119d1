"""verl's next release: with each name that we need renamed in turn, a run stops where it would have trained clean."""

import importlib
import sys

import pytest

from shaketable.errors import ShaketableError
from shaketable.integrations.names import CLASSES

pytestmark = pytest.mark.covers("verl", "a renamed method stops the run at its start", "no engine")

MODULES = {
    "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync": "trainer",
    "verl.workers.engine_workers:TrainingWorker": "actor",
    "verl.workers.engine_workers:ActorRolloutRefWorker": "actor",
    "verl.utils.tensordict_utils:": "actor",
}
"""Where a name is checked: the module of `shaketable.integrations.verl` that is imported before it is used."""


def needed():
    """Every name of a class or module of verl, with the module of ours that depends on it."""
    for owner, ours in MODULES.items():
        yield from (
            pytest.param(owner, name, ours, id=f"{owner.rpartition(':')[2] or owner}.{name}") for name in CLASSES[owner]
        )


@pytest.mark.parametrize(("owner", "name", "ours"), needed())
def test_a_renamed_name_stops_the_run_at_its_start(monkeypatch, owner, name, ours):
    path, _, kind = owner.partition(":")
    found = importlib.import_module(path)
    found = getattr(found, kind) if kind else found
    for holder in getattr(found, "__mro__", [found]):
        if name in vars(holder):
            monkeypatch.setattr(holder, f"{name}_of_tomorrow", vars(holder)[name], raising=False)
            monkeypatch.delattr(holder, name)
    monkeypatch.delitem(sys.modules, f"shaketable.integrations.verl.{ours}", raising=False)
    with pytest.raises(ShaketableError, match=rf"verl \S+ has no \S+\.{name} .* was tested with verl 0\.9\.0 and 0\.9\.1"):
        importlib.import_module(f"shaketable.integrations.verl.{ours}")
