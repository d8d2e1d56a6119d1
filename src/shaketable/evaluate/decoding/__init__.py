"""Decoding: one batch whose rows leave, or fixed memory that a GPU replays."""
