"""The curve: what is drawn is what was found."""

import pytest
from matplotlib import figure

from shaketable.evaluate.sweep.results import plot, short_names


def point(model, magnitude, accuracy):
    return {
        "model": model,
        "magnitude": magnitude,
        "accuracy": accuracy,
        "ci_low": accuracy - 0.1,
        "ci_high": accuracy + 0.05,
        "n": 9,
        "seeds": [0, 1],
    }


def found(*points):
    return {"config": {"plan": "gain@layer.0", "task": "arithmetic"}, "points": list(points)}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws, and gives the axes."""
    kept = []
    save = figure.Figure.savefig

    def keep(self, *args, **options):
        kept.append(self.axes[0])
        save(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", keep)

    def draw(results):
        plot(results, tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        return kept[-1]

    return draw


def test_every_model_has_a_line_with_its_bars(drawn):
    axes = drawn(found(point("a/x", 0.0, 0.8), point("a/x", 0.1, 0.5), point("b/y", 0.0, 0.7), point("b/y", 0.1, 0.2)))
    lines = {c.get_label(): c for c in axes.containers}
    assert list(lines) == ["x", "y"]
    assert list(lines["x"].lines[0].get_ydata()) == [0.8, 0.5]
    assert list(lines["y"].lines[0].get_ydata()) == [0.7, 0.2]
    (bars,) = lines["y"].lines[2]
    assert [(s[0][1], s[1][1]) for s in bars.get_segments()] == [pytest.approx((0.6, 0.75)), pytest.approx((0.1, 0.25))]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["clean", "0.1"]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["x", "y"]
    low, high = axes.get_ylim()
    assert low == 0 and high > 0.85


def test_names_are_short_where_they_differ():
    assert short_names(["runs/a/model", "Qwen/Q"]) == ["model", "Q"]
    assert short_names(["a/model", "b/model/"]) == ["a/model", "b/model/"]
