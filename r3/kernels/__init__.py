"""CUDA kernels, each with the plain torch that it replaces."""

NOWHERE = -1e30
"""A logit whose probability is exactly 0 after the softmax. Unlike infinity, 0 times it is 0."""
