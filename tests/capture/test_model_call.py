"""How models of all kinds are called with tokens, and where their logits are found."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.capture.trace import call_with_tokens, logits_of
from shaketable.errors import ModelError

IDS = torch.tensor([[1, 3, 2]])
LOGITS, STATES = torch.zeros(1, 3, 7), torch.zeros(1, 3, 4)


def module(forward, **parts):
    """A module whose forward is a function of its arguments alone."""
    own = type("Own", (nn.Module,), {"forward": staticmethod(forward)})()
    for name, part in parts.items():
        own.add_module(name, part)
    return own


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda input_ids, use_cache=True: {"input_ids": input_ids, "use_cache": use_cache}, {"input_ids", "use_cache"}),
        (lambda input_ids, **rest: {"input_ids": input_ids, **rest}, {"input_ids", "use_cache"}),
        (lambda **rest: rest, {"input_ids", "use_cache"}),
        (lambda idx, targets=None: {"idx": idx}, {"idx"}),
        (lambda x, /: {"x": x}, {"x"}),
        (lambda *given: {"given": given[0]}, {"given"}),
        (lambda tokens, use_cache=True: {"tokens": tokens, "use_cache": use_cache}, {"tokens", "use_cache"}),
    ],
)
def test_tokens_go_where_forward_takes_them(forward, told):
    answer = call_with_tokens(module(forward), IDS)
    assert answer.keys() == told
    tokens, *others = answer.values()
    assert tokens is IDS
    assert not any(others)


def test_arguments_are_given_by_name_and_win():
    found = call_with_tokens(module(lambda idx, start_pos, other: (start_pos, other)), IDS, {"start_pos": 2, "other": 3})
    assert found == (2, 3)


@pytest.mark.parametrize(
    "answer",
    [
        LOGITS,
        (LOGITS, torch.tensor(1.0)),
        (STATES, LOGITS),
        {"logits": LOGITS, "other": torch.zeros(1, 3, 7)},
        SimpleNamespace(logits=LOGITS),
    ],
)
def test_logits_are_found(answer):
    model = module(lambda idx: idx, embedding=nn.Embedding(7, 4))
    assert logits_of(answer, model) is LOGITS


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((LOGITS, LOGITS.clone()), r"it returns \(1, 3, 7\), \(1, 3, 7\); let it return a floating-point tensor"),
        ({"last_hidden_state": STATES}, r"it returns \(1, 3, 4\);"),
        (None, "it returns a NoneType;"),
    ],
)
def test_what_cannot_be_told_is_refused_in_one_line(answer, said):
    with pytest.raises(ModelError, match=said) as error:
        logits_of(answer, module(lambda idx: idx, embedding=nn.Embedding(7, 4)))
    assert "\n" not in str(error.value)
