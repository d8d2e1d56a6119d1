"""Any function as a model whose operators are recorded and replayed."""

import torch
from torch import nn

from shaketable.capture.recorder import Recorder
from shaketable.capture.reference import Reference
from shaketable.locate.replay import judge
from shaketable.numerics.intervals import Precision

EXACT = Precision()


class Root(nn.Module):
    """Calls one function; its linear is a leaf."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, x):
        return self.function(x)


def judged(function, x=None, tamper=None, **options):
    """Record a function's operators, change the results of the last, replay."""
    root = Root(function)
    reference = Reference(root)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) if x is None else x
    with Recorder(root, lambda path, module: reference.leaf(path) is not None).watching() as recording:
        root(x)
    if tamper is not None:
        record = recording.records[-1]
        record.output = tamper(record.output)
    return judge(recording, reference, "", EXACT, **options)
