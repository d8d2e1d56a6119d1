"""Study files: what is refused, in which words, and what is filled in."""

from pathlib import Path

import pytest
import yaml

from shaketable.errors import ShaketableError
from shaketable.study.cells import cells_of
from shaketable.study.file import load_study
from tests.study.small_studies import data, study


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(data(), sort_keys=False))
    return path


def test_a_shipped_study_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_study(Path("guided-aqn"), ["seeds=2"]).seeds == (0, 1)
    assert load_study(Path("gpu/pilot")).device == "cuda"
    with pytest.raises(ShaketableError, match=r"^cannot read the study guided-agn: .*; did you mean 'guided-aqn'\?"):
        load_study(Path("guided-agn"))


WRONG = {
    "trian.steps=3": "unknown key 'trian'; did you mean 'train'?",
    "train.stepz=3": "train: unknown option 'stepz'; did you mean 'steps'?",
    "compare.primary.a=nois": "there is no arm 'nois'; did you mean 'noise'?",
    "compare.primary.endpoint=loss": "the endpoint loss is not measured; write evaluate: {loss: true}",
    "evaluate.conditions.own=dead_zone:0.1@layer.3": "own is what untrained arms with a plan or AQN are scored under",
    "compare.primary={a: as it comes, b: noise, endpoint: reward}": "as it comes is not trained, and does not measure reward",
    "compare.primary=null": "compare.primary is missing: name the comparison that decides before the run",
    "arms.as it comes.aqn=global_decay:0.05-0.01": "a score has no steps for global_decay",
    "arms.as it comes.aqn=constant:0.01": "noise on weights is drawn once a rollout",
    "arms.targeted.plan=null": "a guide needs a plan",
    "arms.noise.plan=nose": "'nose' is neither a plan nor the name of a condition; did you mean 'noise'?",
    "seeds=[1, 2, 1]": "nor a list of different ones",
    "arms.noise.task=arithmetic,level=2": "solve different tasks",
    "train.steps={": "the value is not YAML",
}


@pytest.mark.parametrize("replaced", WRONG)
def test_what_is_wrong_is_one_line_that_names_the_place(file, replaced):
    with pytest.raises(ShaketableError) as error:
        cells_of(load_study(file, [replaced]))
    assert WRONG[replaced] in str(error.value)
    assert "\n" not in str(error.value)


def test_set_replaces_adds_and_takes_away(file):
    found = load_study(
        file, ["train.steps=7", "arms.more={plan: faulty}", "arms.targeted=null", "engine.workers=1", "seeds=[5]"]
    )
    assert found.train["steps"] == 7
    assert list(found.arms) == ["noise", "noise + AQN", "as it comes", "more"]
    assert (found.seeds, found.engine.workers) == ((5,), 1)


# ---- keys


def names(**replaced):
    return {cell.name for cell in cells_of(study(**replaced))}


def test_what_changes_the_numbers_changes_the_key():
    base = names()
    assert not base & {n for n in names(train=data()["train"] | {"steps": 5}) if not n.startswith(("diagnosis", "as-it"))}
    assert not base & {n for n in names(evaluate=data()["evaluate"] | {"n": 13}) if not n.startswith("diagnosis")}
    assert not base & names(engine={"threads": 2})
    assert len(base & names(diagnose={"tokens": 33})) == 6  # all but the diagnosis and the two runs it guides


def test_what_does_not_change_the_numbers_does_not_change_the_key():
    others = {"question": "?", "compare": {"primary": {"a": "noise", "b": "targeted", "condition": "clean"}}}
    assert names(**others, engine={"kind": "ray", "workers": 1, "retries": 3}, keep="records") == names()


def test_the_plan_of_a_file_is_held_by_the_study_and_its_seed_refused(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("plan: gain:0.1@layer.2\n")
    arms = data()["arms"] | {"file": {"plan": str(plan)}}
    assert study(arms=arms).model_dump()["arms"]["file"]["plan"] == "gain:0.1@layer.2"
    plan.write_text("plan: gain:0.1@layer.2\nseed: 7\n")
    with pytest.raises(ShaketableError, match="has a seed of its own, 7"):
        study(arms=arms)


GOLDEN = {
    "as-it-comes-s0-86ff13ce",
    "diagnosis-138f4f89",
    "noise-aqn-s0-6d283a9b",
    "noise-s0-dd3decc1",
    "targeted-s0-f13c09ae",
}


def test_keys_stay_what_they_are():
    """A store must be found again. Whoever adds an option gives its old meaning in `cells.NEWER`, and this still holds."""
    found = {cell.name for cell in cells_of(study(seeds=1))}
    assert found == GOLDEN
