"""Sums for nano, and what a forward over a whole text says of its tokens."""

import torch

QUESTIONS = ["144+725=", "7+8=", "900-1=", "12+34=", "555+445=", "31-997=", "100+100=", "8-3=", "472+338=", "60+6="]


def tokens(found):
    return [c.tokens for c in found]


def forced(model, prompt, completion, temperature):
    """log softmax of a forward over prompt and completion, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double() / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()
