"""σ over a run, before the run."""

import shaketable as st
from shaketable.aqn.plot import sigmas

DECAY = st.GlobalDecay(0.05, 0.0005, stages=10)


def test_the_table_is_what_the_run_does(tiny_llama):
    aqn = st.AQN(DECAY, multipliers={1: 2.0}, zones=True)
    table, noise = sigmas(aqn, 20, tiny_llama), aqn.attach(tiny_llama, 20)
    for step in range(20):
        noise.step = step
        found = {layer: row[step] for group, row in zip(table.groups, table.values, strict=True) for layer in group.layers}
        assert found == noise.sigmas
