"""The probes that judge what was recorded, and the rounding that a correct device is allowed."""
