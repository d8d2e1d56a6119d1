"""Repairs of `shaketable harden`, cheapest first, each scored before the next one is tried."""
