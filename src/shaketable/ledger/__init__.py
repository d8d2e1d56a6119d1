"""The ledger: what really happened at which place, and the error that was measured there."""
