"""The faulty weight is made when the module reads it."""

import torch
from torch import nn

import shaketable as st


class Careful(nn.Linear):
    """Looks at its weight where gradients are off before it multiplies with it."""

    def forward(self, x):
        with torch.no_grad():
            kind = self.weight.dtype
        return super().forward(x.to(kind))


class Idle(nn.Linear):
    """Never looks at its weight."""

    def forward(self, x):
        return x


class Late(nn.Linear):
    """Gets its weight from a hook that was added after all others, as a sharded module may."""

    def gather(self, module, args):
        self._parameters["weight"] = self.whole


def test_a_first_look_without_gradients_costs_no_gradient():
    layer = Careful(4, 4)
    with st.inject(layer, "gain:1@module.Careful,point=weight"):
        layer(torch.ones(1, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))


def test_a_weight_that_is_not_read_is_not_hit():
    layer = Idle(4, 4)
    with st.inject(layer, "gain:1@module.Idle,point=weight", allow_inert=True) as ledger:
        layer(torch.ones(1, 4))
    assert ledger.forward == 0 and ledger.inert()


def test_the_weight_that_counts_is_the_one_that_is_there_when_it_is_read():
    layer = Late(4, 4, bias=False)
    layer.whole = nn.Parameter(torch.eye(4))
    with st.inject(layer, "gain:1@module.Late,point=weight"):
        layer.register_forward_pre_hook(layer.gather)
        assert torch.equal(layer(torch.ones(1, 4)), torch.full((1, 4), 2.0))


def test_two_clauses_on_one_weight_both_act_in_a_compiled_model():
    torch._dynamo.reset()
    layer = nn.Linear(4, 4, bias=False)
    clean = layer(torch.eye(4)).detach()
    with st.inject(layer, "gain:1@module.linear,point=weight; gain:2@module.linear,point=weight") as ledger:
        found = torch.compile(layer, backend="eager", fullgraph=True)(torch.eye(4))
    assert torch.allclose(found, 6 * clean) and [site.forward for site in ledger.sites] == [1, 1]
