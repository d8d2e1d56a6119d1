"""σ over a run, before the run."""

from rich.console import Console

import shaketable as st
from shaketable.aqn.plot import plot, sigmas
from shaketable.aqn.spec import Zones

DECAY = st.GlobalDecay(0.05, 0.0005, stages=10)


def shown(table):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_the_table_is_what_the_run_does(tiny_llama):
    aqn = st.AQN(DECAY, multipliers={1: 2.0}, zones=Zones())
    table, noise = sigmas(aqn, 20, tiny_llama), aqn.attach(tiny_llama, 20)
    for step in range(20):
        noise.step = step
        found = {layer: row[step] for group, row in zip(table.groups, table.values, strict=True) for layer in group.layers}
        assert found == noise.sigmas


def test_rows_are_the_steps_at_which_something_changes():
    rows = sigmas(st.AQN(DECAY), 100).rows()
    assert [step for step, _ in rows] == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99]
    assert rows[0][1] == (0.0,) and rows[1][1] == (0.05,)
    zoned = sigmas(st.AQN(st.Constant(0.04), zones=Zones()), 10, 8)
    assert zoned.rows() == [(0, (0.04, 0.04)), (5, (0.04, 0.02)), (9, (0.04, 0.02))]
    assert sigmas(st.AQN(st.Constant(0.04)), 1).rows() == [(0, (0.04,))]


def test_labels_name_the_layers():
    assert [g.label for g in sigmas(st.AQN(DECAY), 10).groups] == ["all layers"]
    assert [g.label for g in sigmas(st.AQN(DECAY), 10, 4).groups] == ["all layers"]
    assert [g.label for g in sigmas(st.AQN(DECAY, layers=[2]), 10, 4).groups] == ["layer 2"]
    known = sigmas(st.AQN(DECAY, multipliers={1: 2.0, 2: 2.0}), 10, 4)
    assert [g.label for g in known.groups] == ["layers 0+3 and outside of layers", "layers 1-2"]
    unknown = sigmas(st.AQN(DECAY, multipliers={1: 2.0, 2: 2.0}), 10)
    assert [g.label for g in unknown.groups] == ["all other layers", "layers 1-2"]
    assert [g.label for g in sigmas(st.AQN(DECAY, zones=Zones()), 10).groups] == ["all layers (edge)", "all layers (middle)"]
    zoned = sigmas(st.AQN(st.Constant(0.1), multipliers={1: 2.0}, zones=Zones()), 2)
    assert [(g.label, row) for g, row in zip(zoned.groups, zoned.values, strict=True)] == [
        ("all other layers (edge)", (0.1, 0.1)),
        ("all other layers (middle)", (0.1, 0.05)),
        ("layer 1 (edge)", (0.2, 0.2)),
        ("layer 1 (middle)", (0.2, 0.1)),
    ]


def test_the_terminal_shows_stages_and_numbers():
    text = shown(sigmas(st.AQN(DECAY), 100).render())
    assert "global_decay:0.05-0.0005,stages=10 over 100 steps" in text
    assert "0.02812" in text and "99" in text


def test_the_plot_is_a_picture_with_a_line_per_group(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    step = Axes.step
    monkeypatch.setattr(Axes, "step", lambda axes, x, y, **more: (drawn.append((x, y)), step(axes, x, y, **more))[1])
    plot(st.AQN(DECAY, multipliers={1: 2.0}), 20, tmp_path / "aqn.png", 4)
    assert (tmp_path / "aqn.png").read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == 2
    assert drawn[1][1][:20] == [2 * y for y in drawn[0][1][:20]]
