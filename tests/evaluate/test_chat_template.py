"""A chat template is somebody else's program: what it raises is one line, and it ends."""

import copy
import sys
import time

import pytest
from jinja2.sandbox import SandboxedEnvironment

from shaketable.errors import ModelError
from shaketable.evaluate import chat_template
from shaketable.evaluate.evaluation import prompt_tokens
from shaketable.evaluate.tasks import load_task
from shaketable.models import load_model
from shaketable.train import run

LONG = "range(99999)"


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
        "{{ messages[0].content",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('only system turns\\n\\nplease') }}",
        "{{ messages[7].content.x }}",
        "{% include 'other' %}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'x' * 10 ** 15 }}",
    ],
)
@pytest.mark.attack("hostile inputs")
def test_a_chat_template_that_does_not_work_is_one_line(nano, template):
    tokenizer = with_template(nano, template)
    task = load_task("arithmetic")
    with pytest.raises(ModelError, match=r"^the model's chat template cannot be used: \w+(: .*\S)?$") as caught:
        prompt_tokens(tokenizer, task, task.problems("test")[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        f"{{% for i in {LONG} %}}{{% for i in {LONG} %}}{{% for i in {LONG} %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
        f"{{% for i in {LONG} %}}{{% for i in {LONG} %}}{{% set x = {LONG} | list | sort %}}{{% endfor %}}{{% endfor %}}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}",
    ],
    ids=["loops in loops", "long steps", "a macro that calls itself twice"],
)
@pytest.mark.attack("hostile inputs")
def test_a_chat_template_that_does_not_end_is_ended_in_one_line(nano, monkeypatch, template):
    monkeypatch.setattr(chat_template, "SECONDS", 0.25)
    before = sys.gettrace()
    tokenizer, task = with_template(nano, template), load_task("arithmetic")
    for ask in (prompt_tokens, run._prompt):
        with pytest.raises(
            ModelError, match=r"^the model's chat template cannot be used: it has not ended after 0\.25 seconds$"
        ):
            ask(tokenizer, task, task.problems("test")[0])
    assert sys.gettrace() is before, "whoever traced, traces again"


class Finalized:
    """Something that the garbage collector ends: what is raised in a finalizer goes nowhere, and tracing is off after it."""

    def __del__(self):
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            called()


def called():
    """A call, at which a trace function looks at the clock."""


@pytest.mark.attack("hostile inputs")
def test_a_template_is_ended_though_its_time_runs_out_in_a_finalizer(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.1)
    monkeypatch.setattr(chat_template, "LOOKS", 1)
    seen = []

    def make():
        if not seen:
            Finalized()
        seen.append(1)
        if len(seen) > 20_000:
            raise RuntimeError("it was not ended")
        return ""

    text = f"{{% for i in {LONG} %}}{{% for i in {LONG} %}}{{{{ make() }}}}{{% endfor %}}{{% endfor %}}"
    template = SandboxedEnvironment().from_string(text)
    with pytest.raises(chat_template._EndlessError), chat_template._watched():
        template.render(make=make)


def test_the_limit_is_longer_than_any_template_takes_and_shorter_than_patience():
    assert chat_template.SECONDS == 10 and 1 <= chat_template.LOOKS <= 1000
