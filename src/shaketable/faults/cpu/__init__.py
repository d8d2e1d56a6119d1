"""The C++ kernels of faults on a CPU."""
