"""The tokens a model is asked about.

One sequence without padding: padding would put masked positions into every probe. The built-in text mixes prose,
numbers, code and other scripts, so that many channels of a model have something to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shaketable.errors import ShaketableError

TEXT = """\
A shake table is what engineers put a building on to see which floor cracks in an earthquake. In 1995 the table in Miki
moved 1,200 tonnes at 0.9 g for 20 seconds; the third floor failed first. What is 37 + 58? The answer is 95, because
30 + 50 = 80 and 7 + 8 = 15.

def mean(values: list[float]) -> float:
    return sum(values) / len(values)  # fails on an empty list

Das Haus steht noch, sagte sie, und zählte die Risse. La tour penche, mais elle ne tombe pas. 建物は揺れたが、倒れなかった。
The report says: "no damage above level 2", yet the sensors at levels 7, 9 and 11 disagree by 3.4e-2. If all bolts are
sound and every beam is straight, then either the table lied or the sensors did. Which one would you check first, and why?
First, repeat the test with nothing changed. Second, turn the table around. Third, take a second set of sensors, and put
them where the first ones were. A fault that stays with the place is in the building; one that moves with the sensor is not.
"""


def read_prompts(path: Path) -> list[str]:
    """One prompt per line of a text file; empty lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ShaketableError(f"prompts cannot be read from {path}: {error}") from error
    return [line for line in lines if line.strip()]


def token_batch(tokenizer: Any, prompts: Sequence[str] | None, tokens: int) -> Tensor:
    """One sequence of at most `tokens` tokens, of shape (1, tokens).

    Args:
        tokenizer: A Hugging Face tokenizer.
        prompts: Texts, joined by newlines; None takes the built-in text.
        tokens: How many tokens to keep.
    """
    if tokenizer is None:
        raise ShaketableError("there is no tokenizer to make tokens with; give one, or token ids")
    if prompts is not None and not any(p.strip() for p in prompts):
        raise ShaketableError("the prompts are empty; give at least one line of text")
    text = TEXT * (1 + tokens // 64) if prompts is None else "\n".join(p for p in prompts if p.strip())
    ids: list[int] = tokenizer(text)["input_ids"][:tokens]
    if len(ids) < 2:
        raise ShaketableError(f"the prompts make {len(ids)} tokens; at least 2 are needed")
    return torch.tensor([ids])
