"""A gauge: another basis for every space of a layer, in which it computes the same function with other numbers.

    stream      x → S·2^k·x with signs S per channel: rows of what writes the stream, columns of what reads it; eps·4^k
    norm output weight × n, columns of the maps it feeds × 1/n
    values      rows of v × s, columns of o × 1/s, for every query head of the group
    up, down    rows of up × s, columns of down × 1/s; the gate has none: SiLU is neither odd nor homogeneous
    queries     rows of k × s, rows of q × 1/s, both channels of a rotated pair alike

A LayerNorm has a mean: the stream gets one sign for all channels. A norm that multiplies by 1 + weight cannot be scaled
exactly: its output takes the stream's signs. Queries and keys that pass a norm of their own have lost their size: signs only.

Locate draws gauges at random, and a healthy device must not notice (`twins.py`). Harden chooses one in which a faulty device
does less harm, and leaves it in the weights.

For a twin the weights are swapped inside of the module that is on the device, for the time of one call: a copy of the layer
would be another layer, with its own memory and its own kernels' luck.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shaketable.locate.wiring import Circuit, Map, Norm


@dataclass
class Gauge:
    """A new basis for every space: a factor per channel."""

    spaces: dict[str, Tensor]
    """Factor of each channel, as the twin has it over the original."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Factors of parameters that are not maps: norms, by their path in the layer."""
    attributes: dict[tuple[str, str], float] = field(default_factory=dict)
    """Factor of a module's number: eps."""


def free_spaces(circuit: Circuit) -> list[str]:
    """The spaces inside of a layer that can be scaled by powers of two, channel by channel; the rest follows from them."""
    norms = [n.writes for n in circuit.norms if n.kind != "rmsnorm_one" and n.writes != "stream"]
    keys = [] if circuit.head_norms else ["k"]
    return [*norms, "v", *keys, *(space for space in ("up", "shared up") if space in circuit.sizes)]


def gauge_of(circuit: Circuit, factors: Mapping[str, Tensor], stream: Tensor | None = None) -> Gauge:
    """The gauge that follows from the factors of `free_spaces`, 1 where none are given, and of the stream."""
    spaces = {name: factors.get(name, torch.ones(size)) for name, size in circuit.sizes.items()}
    stream = spaces["stream"] if stream is None else stream
    spaces.update({name: stream for name in ("stream", "attended", "fed") if name in spaces})
    head, groups = circuit.head, circuit.groups
    spaces["mixed"] = spaces["v"].view(-1, head).repeat_interleave(groups, 0).flatten()
    spaces["q"] = (1 / spaces["k"]).view(-1, head).repeat_interleave(groups, 0).flatten()
    for prefix in ("", "shared "):
        if f"{prefix}up" in spaces:
            spaces[f"{prefix}hidden"] = spaces[f"{prefix}up"]
    gauge = Gauge(spaces)
    for norm in circuit.norms:
        _gauge_norm(gauge, norm, stream)
    return gauge


def _gauge_norm(gauge: Gauge, norm: Norm, stream: Tensor) -> None:
    signs = stream.sign()
    size = float(stream[0].abs())
    if size != 1:
        gauge.attributes[norm.module, norm.eps] = size * size
    if norm.kind == "rmsnorm_one":
        gauge.spaces[norm.writes] = signs
        return
    after = gauge.spaces[norm.writes]
    gauge.weights[f"{norm.module}.weight"] = after * signs
    if norm.kind == "layernorm":
        gauge.weights[f"{norm.module}.bias"] = after


def paired(factors: Tensor, rotary: int) -> Tensor:
    """Both channels of a rotated pair alike."""
    half = rotary // 2
    return torch.cat([factors[:half], factors[:half], factors[rotary:]]) if half else factors


def rescaled(layer: nn.Module, circuit: Circuit, gauge: Gauge) -> dict[str, Tensor]:
    """The parameters that a gauge changes, by their paths in the layer, as it has them."""
    changed = {}
    for m in circuit.maps:
        rows = torch.cat([gauge.spaces[s] for s in m.writes])
        changed[m.parameter] = _scaled(layer.get_parameter(m.parameter), rows, 1 / gauge.spaces[m.reads], m)
        if m.bias is not None:
            changed[m.bias] = _times(layer.get_parameter(m.bias), rows)
    for path, factor in gauge.weights.items():
        owner, _, name = path.rpartition(".")
        if layer.get_submodule(owner)._parameters.get(name) is not None:
            changed[path] = _times(layer.get_parameter(path), factor)
    return changed


@contextmanager
def gauged(layer: nn.Module, circuit: Circuit, gauge: Gauge) -> Iterator[None]:
    """The layer with the gauge's weights, for as long as the context is open."""
    with swapped(layer, rescaled(layer, circuit, gauge), gauge.attributes):
        yield


@contextmanager
def swapped(layer: nn.Module, changed: dict[str, Tensor], attributes: dict[tuple[str, str], float]) -> Iterator[None]:
    """Other values in the layer's own modules; what was there comes back whatever happens."""
    owners = {path: (layer.get_submodule(path.rpartition(".")[0])._parameters, path.rpartition(".")[2]) for path in changed}
    before = {path: table[name] for path, (table, name) in owners.items()}
    numbers = {(path, name): getattr(layer.get_submodule(path), name) for path, name in attributes}
    try:
        for path, (table, name) in owners.items():
            table[name] = nn.Parameter(changed[path], requires_grad=False)
        for (path, name), factor in attributes.items():
            setattr(layer.get_submodule(path), name, numbers[path, name] * factor)
        yield
    finally:
        for path, (table, name) in owners.items():
            table[name] = before[path]
        for (path, name), number in numbers.items():
            setattr(layer.get_submodule(path), name, number)


def _times(tensor: Tensor, factor: Tensor) -> Tensor:
    return tensor.detach() * factor.to(tensor)


def _scaled(weight: Tensor, rows: Tensor, columns: Tensor, m: Map) -> Tensor:
    rows, columns = rows.to(weight), columns.to(weight)
    if m.layout == "in,out":
        rows, columns = columns, rows
    return (weight.detach() * rows[:, None]).mul_(columns)
