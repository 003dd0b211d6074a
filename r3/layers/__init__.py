"""Parts of the policy's decoder layers, the same on CPU and CUDA."""

from r3.layers.attention import CausalAttention, packed_params
from r3.layers.layout import local_rows, local_tokens, router_rows, zigzag_rows
from r3.layers.norms import RMSNorm, Rotation, inverse_frequencies
