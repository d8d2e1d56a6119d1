"""Plans and AQN in TRL's trainers, colocated vLLM included; see `integrations/hf/callback.py`, which does the work.

trainer = GRPOTrainer(model, ..., callbacks=[ShaketableCallback(plan="mxfp4@module.linear", aqn="constant:0.01")])
trainer = GRPOTrainer(model, ..., callbacks=[AQNCallback("global_decay:0.05-0.0005,stages=10")])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.integrations.hf.callback import ShaketableCallback


class AQNCallback(ShaketableCallback):
    """AQN alone: attached when training begins, in step with the trainer, gone when training ends. Prints nothing."""

    def __init__(self, aqn: AQN | str | Path, *, allow_inert: bool = False) -> None:
        super().__init__(aqn=aqn, allow_inert=allow_inert)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """σ under its old name, too."""
        super().on_log(args, state, control, logs, **more)
        if logs is not None and "shaketable/sigma" in logs:
            logs["aqn_sigma"] = state.log_history[-1]["aqn_sigma"] = logs["shaketable/sigma"]

    def _tell(self, ranks: list[dict[str, Any]]) -> None:
        """Nothing: the ledger is in `merged`."""


__all__ = ["AQNCallback", "ShaketableCallback"]
