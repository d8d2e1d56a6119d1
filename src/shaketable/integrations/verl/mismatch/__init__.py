"""How far sampler and trainer are apart, every so many steps of a verl training: `+shaketable.mismatch.every=50`.

trainer.py   verl's trainer: the gap of every rollout of the step, and when the others are asked
actor.py     verl's workers: their weights, and one whole model to read a few rollouts with
engine.py    a sampler as an actor sees it, through Ray
sampler.py   the extension of vLLM's worker that answers
"""
