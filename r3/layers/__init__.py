"""Parts of the policy's decoder layers, the same on CPU and CUDA."""

from r3.layers.attention import CausalAttention, packed_params
from r3.layers.layout import LocalTokens, local_rows, local_tokens, zigzag_rows
from r3.layers.norms import RMSNorm, Rotation, inverse_frequencies
