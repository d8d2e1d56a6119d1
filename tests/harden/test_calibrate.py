"""Calibrate: what is systematically off is put right, what is noise is left alone, and the folder loads again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from shaketable.harden.calibrate import calibrate, fold, regression
from tests.harden.models import (
    kl,
    logits,
    nano,
    plan_on,
    quiet,
    same_bits,
    same_values,
    students_of,
    tiny,
    tiny_pairs,
    values,
)


def repaired(students, pairs, plan):
    """KL before and after, and the facts."""
    injection = plan_on(students.model, plan)
    before = kl(students, pairs, injection)
    facts = calibrate(students, [injection], pairs, quiet)
    after = kl(students, pairs, injection)
    injection.close(check=False)
    return before, after, facts


def loads_again(model, pairs, folder):
    model.save_pretrained(folder)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation=model.config._attn_implementation
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return same_bits(logits(model, pairs), logits(loaded.eval(), pairs))


def test_a_gain_is_undone_and_needs_no_bias(tmp_path):
    students, pairs = nano()
    before, after, facts = repaired(students, pairs, "gain:0.2@module.linear")
    assert before > 1e-3
    assert after < 1e-4 * before
    assert (facts["layers"], facts["of"], facts["flops_added"]) == (8, 8, 0.0)
    assert all(m.bias is None for m in students.model.modules() if isinstance(m, nn.Linear))
    assert students.model.config.attention_bias is False
    assert loads_again(students.model, pairs, tmp_path)


def test_an_offset_goes_into_biases_that_the_folder_loads_with(tmp_path):
    students, pairs = nano()
    before, after, facts = repaired(students, pairs, "bias:0.3@module.linear")
    assert before > 0.1
    assert after < 1e-4 * before
    linears = [m for m in students.model.model.layers.modules() if isinstance(m, nn.Linear)]
    assert all(m.bias is not None for m in linears)
    assert facts["flops_added"] == sum(m.out_features for m in linears)
    assert students.model.config.attention_bias is True
    assert students.model.config.mlp_bias is True
    assert loads_again(students.model, pairs, tmp_path)


def test_an_offset_of_a_layers_output_goes_into_its_last_product():
    students, pairs = nano()
    before = values(students.model)
    _, after, facts = repaired(students, pairs, "bias:0.5@layer.3")
    assert after < 1e-6
    assert facts["layers"] == 1
    assert (students.model.config.attention_bias, students.model.config.mlp_bias) == (False, True)
    changed = {n for n, p in students.model.named_parameters() if n not in before or not torch.equal(p, before[n])}
    used = {n for n in changed if students.model.get_parameter(n).any()}
    assert used == {"model.layers.3.mlp.down_proj.bias"}


@pytest.mark.slow
def test_clipping_loses_its_mean_error():
    students, pairs = nano()
    before, after, _ = repaired(students, pairs, "saturation:0.5,scope=token@module.linear")
    assert after < 0.5 * before


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "relative_gaussian:0.1@module.linear",
        "relative_gaussian:0.2@op.matmul,direction=forward",
        "absolute_gaussian:0.1@layer.3",
    ],
)
def test_noise_is_left_alone(plan):
    students, pairs = nano()
    before = values(students.model)
    _, _, facts = repaired(students, pairs, plan)
    assert facts["layers"] == 0
    assert facts["flops_added"] == 0
    assert "as they were" in facts["sentence"]
    assert same_values(before, students.model)
    assert students.model.config.attention_bias is False


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2", "gemma2"])
def test_a_gain_is_undone_in_other_architectures(name, tmp_path):
    students, pairs = students_of(tiny(name)), tiny_pairs()
    before, after, facts = repaired(students, pairs, "gain:0.2@module.linear")
    assert facts["layers"] == 2
    assert after < 1e-4 * before
    assert loads_again(students.model, pairs, tmp_path)


def test_where_no_flag_gives_a_bias_none_is_added(tmp_path):
    """Qwen2 has biases at its queries, keys and values, and no setting for the others."""
    students, pairs = students_of(tiny("qwen2")), tiny_pairs()
    before = set(dict(students.model.named_parameters()))
    hurt, left, facts = repaired(students, pairs, "bias:0.3@module.q_proj+k_proj+v_proj")
    assert left < 1e-4 * hurt
    assert facts["flops_added"] == 0
    _, _, facts = repaired(students_of(tiny("qwen2")), pairs, "bias:0.3@module.down_proj")
    assert facts["flops_added"] == 0
    assert set(dict(students.model.named_parameters())) == before
    assert loads_again(students.model, pairs, tmp_path)


# ---- the regression itself


@settings(max_examples=30)
@given(
    slope=st.floats(0.3, 3).filter(lambda g: abs(g - 1) > 0.01),
    offset=st.floats(-2, 2).filter(lambda o: abs(o) > 0.05),
    seed=st.integers(0, 2**16),
)
def test_a_line_is_found(slope, offset, seed):
    clean = torch.randn(64, 3, generator=torch.Generator().manual_seed(seed)) + 0.5
    g, o = regression(clean, slope * clean + offset)
    assert torch.allclose(g, torch.full((3,), slope), rtol=1e-4)
    assert torch.allclose(o, torch.full((3,), offset), rtol=1e-3, atol=1e-4)
    product = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    with torch.no_grad():
        wanted = product(x)
        fold(product, g, o)
        assert torch.allclose(slope * product(x) + offset, wanted, atol=1e-4)


@pytest.mark.parametrize("relative", [True, False])
def test_noise_alone_is_a_line_of_slope_one(relative):
    """Few channels out of a hundred: three standard errors are met by chance in one of 370."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(400, 2000, generator=generator)
    z = torch.randn(400, 2000, generator=generator)
    g, o = regression(clean, clean + 0.3 * (clean * z if relative else z))
    assert float((g != 1).float().mean()) < 0.01
    assert float((o != 0).float().mean()) < 0.01
