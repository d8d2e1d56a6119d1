"""A compiled model, a compiled function that calls a model first, and a compiled function without any model."""

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
first = torch.compile(torch.nn.Linear(8, 8), backend="aot_eager")
second = torch.nn.Linear(8, 8)
weight = torch.randn(8, 8, requires_grad=True)


@torch.compile(backend="aot_eager")
def through_a_model(x):
    return second(x).sum()


@torch.compile(backend="aot_eager")
def without_a_model(x):
    return (x @ weight).sum()


for _ in range(3):
    for function in (first, through_a_model, without_a_model):
        function(torch.ones(2, 8)).sum().backward()
