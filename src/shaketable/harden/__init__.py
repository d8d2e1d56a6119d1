"""Hardening: training a model under noise. `guidance` turns a diagnosis into layer-wise AQN."""
