"""nano and the questions that it is asked, once a file."""

import pytest

from tests.evaluate.decoding.nano_prompts import QUESTIONS


@pytest.fixture(scope="module")
def nano():
    from shaketable.models import load_model

    return load_model("nano")


@pytest.fixture(scope="module")
def prompts(nano):
    return [nano[1](q)["input_ids"] for q in QUESTIONS]
