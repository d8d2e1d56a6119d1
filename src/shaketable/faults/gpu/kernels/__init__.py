"""The Triton kernels, one file for each family."""
