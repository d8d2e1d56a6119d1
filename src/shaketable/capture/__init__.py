"""Recorded operators and layer calls of a running model, and the weights and config it should have."""
