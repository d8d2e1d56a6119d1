"""The wiring of the layers of a model that is trained: with plans on its modules, and with LoRA adapters, if it has them.

The wiring is read from the model's class built anew from its config, which no plan has touched. An adapter is two more maps:
A reads what its module reads and writes a space of its own, which B reads, and B writes what the module writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from shaketable.capture.reference import rebuilt
from shaketable.locate.twins import Circuit, Map, circuit_of
from shaketable.sites.structure import find_layers


def circuits_of(model: Any) -> list[Circuit | str]:
    """The wiring of every layer, LoRA adapters with it, or why there is none."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain = rebuilt(base)
    if plain is None:
        return [f"no gauge is known for a {type(base).__name__}"]
    found: list[Circuit | str] = []
    for layer, own in zip(find_layers(plain)[0], find_layers(model)[0], strict=True):
        circuit = circuit_of(layer, base.config)
        found.append(circuit if isinstance(circuit, str) else _with_adapters(circuit, own))
    return found


def _with_adapters(circuit: Circuit, layer: nn.Module) -> Circuit:
    """The same wiring where modules are wrapped by PEFT."""
    maps, sizes = [], dict(circuit.sizes)
    for m in circuit.maps:
        module = layer.get_submodule(m.module)
        if not hasattr(module, "base_layer"):
            maps.append(m)
            continue
        base = f"{m.module}.base_layer"
        maps.append(replace(m, parameter=f"{base}.weight", bias=m.bias and f"{base}.bias"))
        for name, part in module.named_modules():
            if name.startswith("lora_A."):
                sizes[f"{m.module}.{name}"] = part.get_parameter("weight").shape[0]
                maps.append(Map(f"{m.module}.{name}.weight", m.reads, (f"{m.module}.{name}",)))
            if name.startswith("lora_B."):
                maps.append(Map(f"{m.module}.{name}.weight", f"{m.module}.{name.replace('lora_B', 'lora_A')}", m.writes))
    return replace(circuit, maps=tuple(maps), sizes=sizes)
