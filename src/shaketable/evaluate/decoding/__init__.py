"""Decoding: one batch, which rows leave when they have ended."""
