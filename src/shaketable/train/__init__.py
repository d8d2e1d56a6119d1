"""GRPO under faults, from a configuration to a run record."""
