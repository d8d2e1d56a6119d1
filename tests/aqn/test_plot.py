"""σ over a run, before the run."""

import shaketable as st
from shaketable.aqn.plot import sigmas
from shaketable.aqn.spec import Zones

DECAY = st.GlobalDecay(0.05, 0.0005, stages=10)


def test_the_table_is_what_the_run_does(tiny_llama):
    aqn = st.AQN(DECAY, multipliers={1: 2.0}, zones=Zones())
    table, noise = sigmas(aqn, 20, tiny_llama), aqn.attach(tiny_llama, 20)
    for step in range(20):
        noise.step = step
        found = {layer: row[step] for group, row in zip(table.groups, table.values, strict=True) for layer in group.layers}
        assert found == noise.sigmas


def test_rows_are_the_steps_at_which_something_changes():
    rows = sigmas(st.AQN(DECAY), 100, 8).rows()
    assert [step for step, _ in rows] == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99]
    assert rows[0][1] == (0.0,) and rows[1][1] == (0.05,)
    zoned = sigmas(st.AQN(st.Constant(0.04), zones=Zones()), 10, 8)
    assert zoned.rows() == [(0, (0.04, 0.04)), (5, (0.04, 0.02)), (9, (0.04, 0.02))]
    assert sigmas(st.AQN(st.Constant(0.04)), 1, 8).rows() == [(0, (0.04,))]
