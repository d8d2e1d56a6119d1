"""Faults on a GPU: fused Triton kernels, and what chooses and launches them."""
