"""What is wrong with a parameter is told from how it differs."""

import pytest
import torch

from shaketable.errors import ShaketableError
from shaketable.integrations.common.mismatch import compare_digests, digest
from shaketable.mismatch.weights import compare

WEIGHT = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
SQUARE = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(48, 32, generator=torch.Generator().manual_seed(2))


def kind_of(got, own=WEIGHT, dtype=torch.float32):
    trainer = {"w": own, "other": OTHER}
    found = compare(trainer, [("w", got), ("other", OTHER.to(dtype))], dtype).differing
    return found[0].kind if found else None


def swapped(w):
    order = torch.arange(len(w))
    order[:16], order[16:32] = torch.arange(16, 32), torch.arange(16)
    return w[order]


@pytest.mark.parametrize(
    ("got", "kind"),
    [
        (WEIGHT.clone(), None),
        (WEIGHT.T.contiguous(), "shape"),
        (swapped(WEIGHT), "other_values"),
        (OTHER.clone(), "other_parameter"),
        (WEIGHT.bfloat16().float(), "cast"),
        (WEIGHT.to(torch.float8_e4m3fn).float(), "cast"),
        (WEIGHT + 0.01 * OTHER, "stale"),
        (WEIGHT * (1 + 5e-6), "stale"),
        (OTHER * 3 + 1, "other_values"),
    ],
)
def test_kind(got, kind):
    assert kind_of(got) == kind


def test_an_engine_may_hold_all_weights_in_its_own_dtype():
    assert kind_of(WEIGHT.bfloat16(), dtype=torch.bfloat16) is None
    assert kind_of(WEIGHT.to(torch.float8_e4m3fn).bfloat16(), dtype=torch.bfloat16) == "cast"


def test_float16_and_bfloat16_of_one_source_are_no_difference_and_another_step_is():
    assert kind_of(WEIGHT.half(), WEIGHT.bfloat16(), torch.float16) is None
    assert kind_of(WEIGHT.bfloat16(), WEIGHT.half(), torch.bfloat16) is None
    assert kind_of((WEIGHT + 0.01 * OTHER).bfloat16(), WEIGHT.half(), torch.bfloat16) == "stale"


def test_a_missing_bias_is_named():
    own = {f"layers.{i}.q.{name}": torch.randn(4) for i in range(3) for name in ("weight", "bias")}
    without_bias = [(name, weight) for name, weight in own.items() if name != "layers.1.q.bias"]
    (found,) = compare(own, without_bias, torch.float32).differing
    assert (found.name, found.says) == ("layers.1.q.bias", "is missing: the engine computes without it")


def test_the_rows_that_differ_are_told():
    got = WEIGHT.clone()
    got[7] *= 1.5
    found = compare({"w": WEIGHT}, [("w", got)], torch.float32).differing[0]
    assert found.kind == "stale" and "1 of 48 rows differ (7), relative difference" in found.says
    assert "32 of 48 rows differ (0 to 31)" in compare({"w": WEIGHT}, [("w", swapped(WEIGHT))], torch.float32).differing[0].says


def test_one_value_is_enough():
    got = WEIGHT.clone()
    got[3, 4] += 1e-6
    assert kind_of(got) is not None


def test_an_earlier_checkpoint_is_named():
    old = WEIGHT + 0.01 * OTHER
    found = compare({"w": WEIGHT}, [("w", old)], torch.float32, {"step-40": {"w": old}}).differing[0]
    assert (found.kind, found.says) == ("earlier", "is that of step-40")


def test_what_the_engine_does_not_tell_is_listed_but_for_tied_parameters():
    own = {"w": WEIGHT, "tied to w": WEIGHT, "other": OTHER}
    found = compare(own, [("w", WEIGHT), ("strange", OTHER)], torch.float32)
    assert (found.missing, found.unknown) == (["other"], ["strange"])


def unlike(own, dtype, engine):
    return bool(compare_digests({"w": digests(own, dtype)}, [{"w": digest(engine)}], dtype).differing)


def digests(own, dtype):
    return digest(own), digest(own.to(dtype))


@pytest.mark.parametrize(
    ("got", "dtype", "is_unlike"),
    [
        (WEIGHT.clone(), torch.float32, False),
        (WEIGHT.bfloat16(), torch.bfloat16, False),
        (WEIGHT.clone(), torch.bfloat16, False),
        (WEIGHT.nextafter(torch.tensor(9.0)), torch.float32, True),
        (WEIGHT.half(), torch.bfloat16, True),
        (swapped(WEIGHT), torch.float32, True),
    ],
)
def test_digests_say_what_a_comparison_of_all_values_says(got, dtype, is_unlike):
    assert unlike(WEIGHT, dtype, got) == is_unlike
    assert is_unlike == (kind_of(got, dtype=dtype) is not None)


def test_the_sign_of_a_zero_is_no_difference_and_one_bit_is():
    assert not unlike(torch.tensor([[0.0, -0.0, 1.0]]), torch.float32, torch.tensor([[-0.0, 0.0, 1.0]]))
    one = WEIGHT.clone()
    one.view(torch.int32)[17, 3] ^= 1
    assert unlike(WEIGHT, torch.float32, one)


def test_only_what_both_sides_have_counts_as_compared():
    weights = {"w": WEIGHT, "same": SQUARE, "trainer's alone": OTHER}
    own = {name: digests(weight, torch.bfloat16) for name, weight in weights.items()}
    own_held = {"w": digest(WEIGHT.bfloat16())}
    held = {"w": digest(WEIGHT * 1.5), "same": digest(SQUARE.bfloat16()), "fused": digest(OTHER)}
    said = compare_digests(own, [own_held, held], torch.bfloat16)
    assert [row.name for row in said.differing] == ["w (replica 1)"]
    assert (said.compared, said.cast, said.unknown) == (3, 2, ["fused"])


def test_weights_of_which_none_was_compared_are_not_equal_weights():
    with pytest.raises(ShaketableError, match="nothing was compared"):
        compare_digests({"w": digests(WEIGHT, torch.float32)}, [{"model.w": digest(WEIGHT)}], torch.float32)
