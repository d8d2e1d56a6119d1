"""Plans and AQN in TRL's trainers, colocated vLLM included; see `integrations/hf/callback.py`, which does the work.

trainer = GRPOTrainer(model, ..., callbacks=[ShaketableCallback(plan="mxfp4@module.linear", aqn="constant:0.01")])
"""

from shaketable.integrations.hf.callback import ShaketableCallback

__all__ = ["ShaketableCallback"]
