"""Intervals, tests and power for scores on problems and seeds."""
