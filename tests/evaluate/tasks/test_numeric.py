from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shaketable.evaluate.tasks.numeric import final_answer, same_number

integers = st.integers(-(10**12), 10**12)


@given(integers, integers)
@settings(max_examples=60)
def test_numbers_are_equal_when_their_fractions_are(a, b):
    assert same_number(str(a), f"{a:,}.00")
    assert same_number(str(a), str(b)) == (Fraction(a) == Fraction(b))


@given(st.integers(10, 10**9))
@settings(max_examples=60)
def test_origin_26_no_part_of_a_number_is_the_number(n):
    text = str(n)
    for part in {text[:1], text[:-1], text[1:], f"{text}0", f"1{text}", f"-{text}"} - {text}:
        assert same_number(text, part) == (int(part) == n)


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("#### 3\nwait\n#### 18", "18"),
        ("#### **18** dollars", "18"),
        ("#### 3 + 4 = 7", "7"),
        (r"\boxed{3}, no: $\boxed{\$1{,}080}$", "1,080"),
        (r"\boxed{\frac{36}{2}}", "18"),
        ("She has 16 - 3 - 4 = 9, so she makes 9 * 2 = 18 dollars.", "18"),
    ],
)
def test_the_answer_of_a_completion(completion, gold):
    assert same_number(gold, final_answer(completion))
    assert not same_number(f"{gold}1", final_answer(completion))


@pytest.mark.parametrize("completion", ["", "####", "#### none", r"\boxed{}", "9" * 5000])
def test_no_answer_is_no_answer(completion):
    assert not same_number("18", final_answer(completion))


@pytest.mark.parametrize(
    "bomb",
    [
        "#### 9**9**9**9**9",
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{99999999999!}",
        r"\boxed{\exp(\exp(\exp(99)))}",
        "#### = " + "(" * 9999 + "1",
    ],
)
@pytest.mark.timeout(120)
def test_an_endless_calculation_is_a_wrong_answer(bomb):
    assert not same_number("18", final_answer(bomb))
