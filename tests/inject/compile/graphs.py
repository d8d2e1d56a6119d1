"""What the tests of compiled models share: how many graphs dynamo made, and a table of rows where there is no GPU."""

import torch

import shaketable as st
from shaketable.inject.device.table import DeviceTable

NOISE = "relative_gaussian:0.05@module.linear"


def graphs() -> int:
    """Graphs since the counters were cleared."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def tabled(net, plan=NOISE, **more):
    """A plan on a model whose taps read a table, as they do on a GPU."""
    injection = st.inject(net, plan, **more).enable()
    injection.tables._add(DeviceTable(injection, torch.device("cpu"), injection.taps))
    return injection
