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
    """Calls its first expert; the second only in the last pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, last: bool = False) -> torch.Tensor:
        return self.second(x) if last else self.first(x)


def say(word: str) -> None:
    sys.modules["shaketable.launch.process"].active().flush()
    print(word, file=sys.stderr, flush=True)


x = torch.randn(64, 16)
if kind == "functional":  # no model, only layers
    first, second = nn.Embedding(8, 16), nn.Linear(16, 16)
    for _ in range(4):
        second(first(torch.arange(8)))
elif kind == "two models":  # the plan is for the second
    for model in (nn.Sequential(nn.Embedding(8, 16)), nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16))):
        for _ in range(4):
            model(torch.arange(8) if isinstance(model[0], nn.Embedding) else x)
elif kind == "compiled":
    model = torch.compile(nn.Sequential(nn.Linear(16, 16)), backend="aot_eager")
    for step in range(3):
        model(x)
        say(f"pass {step}")
elif kind == "evaluation":
    model = nn.Sequential(nn.Linear(16, 16)).eval()
    for _ in range(4):
        model(x)
else:
    model = Experts()
    for step in range(4):
        model(x, last=kind == "late" and step == 3)
        say(f"pass {step}")
say("end")
