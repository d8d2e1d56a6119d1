"""The supervised phase before a run: one for all arms and seeds, kept whole or not at all, and in the record."""

import multiprocessing

import pytest
import torch

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import load_task
from shaketable.models import load_model
from shaketable.records.weight_hash import weights_hash
from shaketable.train import warm_start as module
from shaketable.train.warm_start import warm_start
from tests.train.training_runs import prepared, small


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAKETABLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warm-starts"


def warmed(steps=2, tell=None, **fields):
    config = small(warm_start=steps, **fields)
    model, tokenizer = load_model(config.model)
    facts = warm_start(config, load_task(config.task), model, tokenizer, tell or (lambda kind, facts: None))
    return model, facts


def kept(cache):
    return sorted(p for p in cache.iterdir() if p.suffix != ".lock")


def test_arms_and_seeds_begin_with_the_same_weights_and_the_second_loads_them(tmp_path, cache):
    told = []
    one = prepared(tmp_path / "one", lambda kind, facts: told.append((kind, facts)), warm_start=2)
    steps = [facts for kind, facts in told if facts.get("text") == "warm start"]
    assert [(f["done"], f["total"]) for f in steps] == [(0, 2), (1, 2)]
    told.clear()
    other = prepared(
        tmp_path / "other", lambda kind, facts: told.append((kind, facts)), warm_start=2, seed=7, aqn="constant:0.1", lr=1e-4
    )
    assert not any(facts.get("text") == "warm start" for _, facts in told)
    assert weights_hash(one.policy) == weights_hash(other.policy) != weights_hash(load_model("nano")[0])
    assert len(kept(cache)) == 1
    first, second = (run.record.events("made_of")[0] for run in (one, other))
    assert first["weights"] == second["weights"] == first["warm_start"]["weights"] == weights_hash(one.policy)
    assert first["warm_start"]["before"] == weights_hash(load_model("nano")[0])
    assert (first["warm_start"]["cached"], second["warm_start"]["cached"]) == (False, True)


@pytest.mark.parametrize("place", [0, -100])
def test_a_broken_one_is_one_line(cache, place):
    warmed()
    (file,) = kept(cache)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(ShaketableError, match=rf"the warm start in {file} is broken; remove it"):
        warmed()


def test_a_kill_leaves_nothing_that_looks_whole(cache, monkeypatch):
    monkeypatch.setattr(module, "save_model", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        warmed()
    assert kept(cache) == []


def _in_a_process(queue):
    torch.set_num_threads(1)
    _, facts = warmed()
    queue.put(facts)


def test_runs_that_begin_at_once_share_one(cache):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_in_a_process, args=(queue,)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=90) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(f["cached"] for f in found) == [False, True]
    assert found[0]["weights"] == found[1]["weights"] and len(kept(cache)) == 1


def test_what_makes_no_sense_is_refused_in_one_line():
    task = load_task("arithmetic")

    class Strict(type(task)):
        def score(self, problem, completion):
            return super().score(problem, completion.removesuffix(problem.answer))

    with pytest.raises(ShaketableError, match=r"no warm start on arithmetic: .*is not scored as right"):
        module.check_answers(Strict())
