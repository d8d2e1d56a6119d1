"""Sampler against trainer: how far their probabilities of the same tokens are apart, and which operator does it."""
