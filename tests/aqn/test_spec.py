"""What AQN asks for, before there is a model."""

import pytest

import shaketable as st
from shaketable.aqn.spec import AQN


@pytest.mark.parametrize("asked", [{"layers": (0, 4)}, {"multipliers": {4: 2.0}}])
def test_a_layer_that_the_model_does_not_have_is_refused(asked):
    aqn = AQN(st.Constant(0.05), **asked)
    with pytest.raises(st.NoMatchError, match=r"layer 4 is out of range; this model has layers 0-3"):
        aqn.groups(4)
    assert aqn.groups(5)
