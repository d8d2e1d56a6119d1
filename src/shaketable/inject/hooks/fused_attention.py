"""Attention that is one kernel: which of the operators that a plan names it hides, known before the model is called.

`op.softmax` on a model with sdpa or flash attention hits no softmax of attention, and `op.matmul` two products per layer less
than one may think. That is in the ledger when it is over (`SiteLedger.fused`); here it is said when the plan is attached, with
the setting that helps. Attention of a module that names no implementation is counted when it is met, and not announced.
"""

from __future__ import annotations

from torch import nn

from shaketable.inject.hooks.math_attention import only_math
from shaketable.inject.hooks.operator_taps import families
from shaketable.plan import Site
from shaketable.sites.engine_modules import is_engine_module

OPEN = ("eager", "eager_paged")
"""Implementations of transformers that call one operator after the other."""
_HIDDEN = {"matmul": "two matrix products (op.matmul)", "softmax": "softmax (op.softmax)"}


def hidden_by_attention(model: nn.Module, site: Site) -> list[str]:
    """One line for each implementation of attention in a model that hides operators which a site names."""
    met = families(site.names) if site.level == "op" else ()
    what = " and ".join(words for family, words in _HIDDEN.items() if family in met)
    return [_line(name, what) for name in _implementations(model)] if what else []


def _implementations(model: nn.Module) -> list[str]:
    """How the attention modules of a model compute, those apart that can be seen into; "" stands for an engine's kernel."""
    found = {}
    for module in model.modules():
        if "attention" in type(module).__name__.lower():
            own = "" if is_engine_module(module) else getattr(getattr(module, "config", None), "_attn_implementation", None)
            found[own] = own is not None and own not in OPEN and not (own == "sdpa" and only_math())
    return sorted(name for name, hides in found.items() if name is not None and hides)


def _line(name: str, what: str) -> str:
    kernel = f"attention is one kernel ({name or 'of the engine'}), inside of which its {what} cannot be hit"
    return f"{kernel}; {'load the model with attn_implementation=eager' if name else 'op.sdpa hits what it returns'}"
