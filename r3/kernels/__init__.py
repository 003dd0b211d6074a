"""Compiled loops for CPU and kernels for CUDA, each beside the plain torch that it stands for."""

NOWHERE = -1e30
"""A logit whose probability is exactly 0 after the softmax. Unlike infinity, 0 times it is 0."""
