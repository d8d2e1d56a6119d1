"""Several clauses in one plan: each does, and is told, what it would alone, whatever its place among the others."""

import torch
from torch import nn

import shaketable as st

CLAUSES = (
    "relative_gaussian:0.05@module.first",
    "saturation:2@module.second",  # fires and changes nothing
    "gain:0.5@module.third,phase=eval",  # is never on
    "gain:0.25@module.fourth,direction=backward",
    "dead_zone:0.5@module.fifth,point=input",
)


class Five(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in ("first", "second", "third", "fourth", "fifth"):
            setattr(self, name, nn.Linear(16, 16))

    def forward(self, x):
        return tuple(module(x) for module in self.children())


def told(*clauses):
    """What the ledger and the check say of each clause, after two passes and a backward one."""
    model = Five()
    injection = st.inject(model, ";".join(clauses), allow_inert=True)
    with injection as ledger:
        for _ in range(2):
            x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
            sum(y.square().sum() for y in model(x)).backward()
        lines = injection.inert_check.inert(trained=True)
    rows = [{k: v for k, v in site.to_dict().items() if k != "seconds"} for site in ledger.sites]
    for row in rows:
        for spot in row["spots"].values():
            spot.pop("seconds")
    return [(row, lines.get(i)) for i, row in enumerate(rows)], ledger.inert()


ALONE = {}


def alone(clause):
    if clause not in ALONE:
        ALONE[clause] = told(clause)
    return ALONE[clause]


def what_counts(row):
    """Noise has keys by the place of its clause: its counts are compared, and its error roughly."""
    exact = {k: row[k] for k in ("site", "fault", "asked", "matched", "forward", "backward", "phases", "layers", "remark")}
    return exact | {k: None if row[k] is None else round(row[k], 2) for k in ("measured_error", "changed_fraction")}


def test_all_of_them_backwards():
    rows, inert = told(*reversed(CLAUSES))
    assert [what_counts(row) for row, _ in rows] == [what_counts(alone(c)[0][0][0]) for c in reversed(CLAUSES)]
    assert [line for _, line in rows] == [alone(c)[0][0][1] for c in reversed(CLAUSES)]
    assert [bool(line) for _, line in rows] == [False, False, False, True, False], "the one that clips at twice the largest"
    assert len(inert) == 2
