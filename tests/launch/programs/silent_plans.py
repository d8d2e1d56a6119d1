"""Programs in which some plans do nothing. Each says on stderr when its first pass, and its last one, is over.

Before it says so, it lets the thread that writes the ledger look: on a busy machine that may take seconds.

silent_plans.py KIND
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
kind = sys.argv[1]


class Experts(nn.Module):
    """Calls its first expert, and never the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def say(word: str) -> None:
    sys.modules["shaketable.launch.process"].active().flush()
    print(word, file=sys.stderr, flush=True)


x = torch.randn(64, 16)
if kind == "functional":  # no model, only layers
    first, second = nn.Embedding(8, 16), nn.Linear(16, 16)
    for _ in range(4):
        second(first(torch.arange(8)))
elif kind == "evaluation":
    model = nn.Sequential(nn.Linear(16, 16)).eval()
    for _ in range(4):
        model(x)
else:
    model = Experts()
    for step in range(4):
        model(x)
        say(f"pass {step}")
say("end")
