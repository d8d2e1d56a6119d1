"""A prompt as a chat model is given it, by a template that came with the model.

A template is somebody else's program. Jinja's sandbox bounds what it can reach, and the length of one range; loops inside of
each other can still run for days. So it is watched while it renders: lines of the template and calls of what it uses are
counted, and every few hundred of them the processor time of this thread is looked at. A template of today needs a
thousandth of a second for a prompt; the clock does not count what other programs use.

Rejected: an alarm (it works in the main thread alone, and a program has one), a thread (nobody can end it), a process for
every prompt (seconds each), a limit of steps (one step may sort a hundred thousand numbers). What stays unbounded is one
operation on a number or a text that is enormous by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from shaketable.errors import ModelError

SECONDS = 10.0
"""Of processor time, for one prompt."""
LOOKS = 256
"""Steps from one look at the clock to the next."""


class _EndlessError(BaseException):
    """Not an `Exception`: Jinja has places that catch those, and a trace function that has raised once is not called again."""


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of one turn of a user and of the beginning of the answer."""
    messages = [{"role": "user", "content": text}]
    try:
        with _watched():
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except _EndlessError:
        raise ModelError(f"the model's chat template cannot be used: it has not ended after {SECONDS:g} seconds") from None
    except Exception as error:  # a template is a program, and raises what it likes
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ModelError(f"the model's chat template cannot be used: {what}") from error
    return list(rendered["input_ids"])


@contextmanager
def _watched() -> Iterator[None]:
    """Raise inside of a template when it takes longer than SECONDS."""
    steps, end = 0, time.thread_time() + SECONDS

    def look(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        steps += 1
        is_template = frame.f_code.co_filename == "<template>"  # the name that Jinja gives to a text
        # Not in a finalizer that the garbage collector calls here: what is raised there goes nowhere.
        ours = is_template or str(frame.f_globals.get("__name__", "")).startswith("jinja2")
        if ours and steps >= LOOKS:
            steps = 0
            if time.thread_time() > end:
                raise _EndlessError
        return look if is_template else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
