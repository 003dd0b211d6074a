"""Compiled loops for CPU and kernels for CUDA, each beside the plain torch that it stands for."""
