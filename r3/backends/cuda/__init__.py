"""CUDA: Triton kernels, experts, page-locked memory."""
