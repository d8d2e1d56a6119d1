"""Zero biases enabled by config flags, so that offsets can be folded into products that have no bias.

The products that a flag concerns are not guessed from names: the model's class is built from a config with the flag set, and
its Linears with a bias are the ones. A composite config (Gemma 3, multimodal models) keeps the flags in its text config.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from shaketable.capture.reference import rebuilt

FLAGS = ("attention_bias", "mlp_bias")
"""Settings of a config that give products a bias."""


def flags(model: Any) -> dict[str, bool]:
    """The values of these settings, for models that have them."""
    config = model.config.get_text_config()
    return {name: getattr(config, name) for name in FLAGS if hasattr(config, name)}


def set_flags(model: Any, values: dict[str, bool]) -> None:
    """Restore these settings."""
    for name, value in values.items():
        setattr(model.config.get_text_config(), name, value)


def add_biases(model: Any) -> dict[str, list[nn.Linear]]:
    """Biases of 0 for products that a flag of the config can give one, by flag."""
    config = model.config.get_text_config()
    found: dict[str, list[nn.Linear]] = {}
    for flag in FLAGS:
        if getattr(config, flag, None) is not False:
            continue
        other = copy.deepcopy(model.config)
        setattr(other.get_text_config(), flag, True)
        skeleton = rebuilt(model, other)
        assert skeleton is not None
        with_bias = [n for n, m in skeleton.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
        found[flag] = [m for m in map(model.get_submodule, with_bias) if m.bias is None]
    for module in (m for modules in found.values() for m in modules):
        module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
    return found


def keep_biases(model: Any, added: dict[str, list[nn.Linear]]) -> list[nn.Linear]:
    """Switch on the flags whose biases are of use, and take the others off again; those that stayed."""
    kept: list[nn.Linear] = []
    for flag, modules in added.items():
        if any(bool(m.bias.any()) for m in modules):
            setattr(model.config.get_text_config(), flag, True)
            kept += modules
        else:
            for module in modules:
                module.register_parameter("bias", None)
    return kept
