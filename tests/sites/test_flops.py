"""What each role of a model costs."""

import torch
import transformers

from shaketable.sites import flops
from shaketable.sites.structure import Anatomy


def test_every_parameter_is_counted_once():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64))
    model.scale = torch.nn.Parameter(torch.ones(5, device="meta"))
    table = flops.costs(Anatomy.of(model), 8)
    assert sum(row.parameters for row in table.values()) == sum(p.numel() for p in model.parameters())
    assert table["other"].count == 0 and table["other"].parameters >= 5
