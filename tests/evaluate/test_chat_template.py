"""A chat template is somebody else's program: an error in it is one line."""

import copy

import pytest

from shaketable.errors import ModelError
from shaketable.evaluate.score import prompt_tokens
from shaketable.evaluate.tasks import load_task
from shaketable.models import load_model


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")


def with_template(nano, template):
    tokenizer = copy.copy(nano[1])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('only system turns\\n\\nplease') }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
@pytest.mark.attack("hostile inputs")
def test_a_chat_template_that_does_not_work_is_one_line(nano, template):
    tokenizer = with_template(nano, template)
    task = load_task("arithmetic")
    with pytest.raises(ModelError, match=r"^the model's chat template cannot be used: \w+(: .*\S)?$") as caught:
        prompt_tokens(tokenizer, task, task.problems("test")[0])
    assert "\n" not in str(caught.value)
