from shaketable.evaluate.tasks import Arithmetic, Problem, Score, Task, sample


class Numbered(Task):
    name = "numbered"
    size: int = 1319

    def problems(self, split):
        return [Problem(f"{split}-{i}", f"{i}?", str(i)) for i in range(self.size)]

    def score(self, problem, completion):
        return Score(completion == problem.answer, True)


def test_origin_29_a_sample_is_not_the_first_n():
    drawn = [int(p.answer) for p in sample(Numbered(), "test", 200, seed=0)]
    assert len(set(drawn)) == 200
    assert drawn != list(range(200))
    # A uniform sample of 200 from 1319 has mean 659 ± 27 and reaches into every tenth of the set.
    assert abs(sum(drawn) / 200 - 659) < 4 * 27
    assert {i * 10 // 1319 for i in drawn} == set(range(10))


def test_a_sample_depends_on_seed_and_split_and_on_nothing_else():
    first = sample(Numbered(), "test", 50, seed=1)
    assert first == sample(Numbered(), "test", 50, seed=1)
    assert first != sample(Numbered(), "test", 50, seed=2)
    assert [p.answer for p in first] != [p.answer for p in sample(Numbered(), "train", 50, seed=1)]


def test_a_sample_is_the_same_on_every_machine():
    assert [p.id for p in sample(Arithmetic(level=2), "test", 4, seed=7)] == ["69+84", "34+97", "40-49", "53-74"]
