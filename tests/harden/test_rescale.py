"""Rescale: the fault does less harm, and healthy hardware does not notice."""

from __future__ import annotations

import pytest
import torch

from shaketable.harden.rescale import circuits_of, rescale
from shaketable.locate.twins import gauge_of, rescaled
from shaketable.sites.structure import find_layers
from tests.harden.models import (
    ARCHITECTURES,
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

W4A4 = "mxfp4@module.linear,point=weight+input"
WIRED = [name for name in ARCHITECTURES if name != "gpt_neox"]


@torch.no_grad()
def scale(model, exponents, layers=None):
    """Scale spaces of a model's layers without a change of what it computes."""
    for index, (layer, circuit) in enumerate(zip(find_layers(model)[0], circuits_of(model), strict=True)):
        if layers is None or index in layers:
            chosen = {s: torch.exp2(e) for s, e in exponents(circuit).items()}
            for path, value in rescaled(layer, circuit, gauge_of(circuit, chosen)).items():
                layer.get_parameter(path).copy_(value)


def outlier(space, exponent=6, channel=5):
    """One channel that is much larger than the others."""

    def exponents(circuit):
        found = torch.zeros(circuit.sizes[space])
        found[channel] = exponent
        return {space: found}

    return exponents


def everywhere(space, exponent):
    return lambda circuit: {space: torch.full((circuit.sizes[space],), float(exponent))}


@pytest.mark.parametrize("name", WIRED)
def test_an_outlier_is_taken_back_and_no_bit_changes_without_the_fault(name):
    model = tiny(name)
    space = "v" if name == "gemma2" else "n1"
    scale(model, outlier(space))
    students, pairs = students_of(model), tiny_pairs()
    before, clean = values(model), logits(students.clean, pairs)
    injection = plan_on(model, W4A4)
    hurt = kl(students, pairs, injection)
    facts = rescale(students, [injection], pairs, quiet)
    assert kl(students, pairs, injection) < hurt
    injection.close(check=False)
    assert facts["layers"] == facts["of"] == 2
    assert facts["spaces"][space] == 2
    assert not same_values(before, model)
    assert same_bits(clean, logits(model, pairs))
    assert "the same bits come out" in facts["sentence"]


def test_nano_with_outliers_comes_back():
    students, pairs = nano()
    scale(students.model, outlier("n1"))
    scale(students.model, outlier("n2", channel=9))
    injection = plan_on(students.model, W4A4)
    before = kl(students, pairs, injection)
    facts = rescale(students, [injection], pairs, quiet)
    assert before > 0.5
    assert kl(students, pairs, injection) < 0.1 * before
    assert {"n1", "n2"} <= facts["spaces"].keys()
    injection.close(check=False)


@pytest.mark.parametrize(
    ("space", "exponent", "plan"),
    [
        ("up", 6, "saturation:8,scope=absolute@module.up_proj"),
        ("v", 6, "saturation:8,scope=absolute@module.v_proj"),
        ("up", 10, "fp8_e4m3,scope=none@module.down_proj,point=input"),
        ("n1", -12, "fp8_e4m3,scope=none@module.q_proj+k_proj+v_proj,point=input"),
        ("k", 5, "saturation:16,scope=absolute@module.k_proj"),
        ("n2", 6, "nvfp4@module.linear,point=input"),
    ],
)
def test_values_leave_a_ceiling_and_an_underflow(space, exponent, plan):
    """All channels of a space are too large, or too small, for the fault, or one is too large: a power of two helps."""
    model = tiny("llama")
    scale(model, outlier(space, exponent) if "nvfp4" in plan else everywhere(space, exponent))
    students, pairs = students_of(model), tiny_pairs()
    injection = plan_on(model, plan)
    before = kl(students, pairs, injection)
    facts = rescale(students, [injection], pairs, quiet)
    assert facts["layers"] > 0
    assert kl(students, pairs, injection) < 0.3 * before
    injection.close(check=False)


@pytest.mark.parametrize(
    "plan", ["relative_gaussian:0.2@module.linear", "dead_zone:0.3,scope=token@layer.1", "gain:0.2@module.linear"]
)
def test_what_no_scale_can_help_is_left_alone(plan):
    students, pairs = students_of(tiny("llama")), tiny_pairs()
    before = values(students.model)
    injection = plan_on(students.model, plan)
    facts = rescale(students, [injection], pairs, quiet)
    injection.close(check=False)
    assert facts["layers"] == 0
    assert "as they were" in facts["sentence"]
    assert same_values(before, students.model)


def test_only_layers_that_the_plan_touches_are_changed():
    model = tiny("llama")
    scale(model, outlier("n1"))
    students, pairs = students_of(model), tiny_pairs()
    before = values(model)
    injection = plan_on(model, W4A4 + ",layers=1")
    facts = rescale(students, [injection], pairs, quiet)
    injection.close(check=False)
    assert facts["layers"] == 1
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all(".layers.1." in n for n in changed)


def test_an_architecture_without_a_circuit_is_left_alone():
    students = students_of(tiny("gpt_neox"))
    before = values(students.model)
    injection = plan_on(students.model, W4A4)
    facts = rescale(students, [injection], tiny_pairs(), quiet)
    injection.close(check=False)
    assert (facts["layers"], facts["of"]) == (0, 2)
    assert "no symmetries are known for the architecture gpt_neox" in facts["sentence"]
    assert same_values(before, students.model)


def beside_the_normal_range():
    """An outlier among values that are hardly normal numbers: taken back, it is rounded otherwise."""

    def exponents(circuit):
        return {"n1": outlier("n1")(circuit)["n1"] - 125}

    model = tiny("llama")
    scale(model, exponents)
    return students_of(model), plan_on(model, W4A4)


def test_a_scale_that_rounds_otherwise_is_not_kept():
    students, injection = beside_the_normal_range()
    pairs = tiny_pairs()
    clean = logits(students.clean, pairs)
    facts = rescale(students, [injection], pairs, quiet)
    injection.close(check=False)
    assert "n1" not in facts["spaces"]
    assert same_bits(clean, logits(students.model, pairs))
