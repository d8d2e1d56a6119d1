"""What is put on a model: hooks where a clause acts, and nowhere else."""

import pytest

import shaketable as st


@pytest.mark.parametrize(("family", "hooked"), [("matmul", False), ("rms_norm", True), ("all", True)])
def test_a_norm_is_hooked_only_by_a_plan_on_norms(tiny_llama, family, hooked):
    norm = tiny_llama.model.norm
    with st.inject(tiny_llama, f"gain:0.1@op.{family}", allow_inert=True):
        assert bool(norm._forward_hooks or norm._forward_pre_hooks) == hooked
    assert not norm._forward_hooks and not norm._forward_pre_hooks
