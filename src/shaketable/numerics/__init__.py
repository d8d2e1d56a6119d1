"""Operators in float64 with the rounding that a correct device may show, and the classes of error beyond it."""
