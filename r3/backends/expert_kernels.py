"""Operators of fused experts: one kernel on CUDA, plain torch elsewhere; see `r3.layers.kernels`.

S are the slots (a token and one of its experts) in the order of their experts.
"""

from __future__ import annotations

import torch

from r3.layers.kernels import operator, wide


@operator(fake=lambda both_SF, _gates_S: both_SF.new_empty(len(both_SF), both_SF.shape[1] // 2))
def weighted_swiglu(both_SF: torch.Tensor, gates_S: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up * weight, [S, F].

    Args:
        both_SF: gate and up next to each other, [S, 2F].
        gates_S: weight of each slot, float32.
    """
    gate, up = wide(both_SF).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up * gates_S[:, None]).to(both_SF.dtype)


@operator(
    fake=lambda both_SF, gates_S, d_inner_SF: (
        d_inner_SF.new_empty(d_inner_SF.shape),
        torch.empty_like(both_SF),
        gates_S.new_empty(gates_S.shape),
    )
)
def weighted_swiglu_backward(
    both_SF: torch.Tensor, gates_S: torch.Tensor, d_inner_SF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `weighted_swiglu` returned, d_both [S, 2F] and d_gates [S]."""
    gate, up = wide(both_SF).chunk(2, -1)
    weight, d_inner = gates_S[:, None], wide(d_inner_SF)
    sigmoid = torch.sigmoid(gate)
    swish = gate * sigmoid
    product, d_product = swish * up, d_inner * weight
    # d silu = sigmoid * (1 + gate * (1 - sigmoid)) = sigmoid + swish * (1 - sigmoid)
    d_gate = d_product * up * (sigmoid + swish * (1 - sigmoid))
    d_both = torch.cat([d_gate, d_product * swish], -1)
    inner = (product * weight).to(both_SF.dtype)
    return inner, d_both.to(both_SF.dtype), (d_inner * product).sum(-1)


@operator(fake=lambda rows_SD, places_NK: rows_SD.new_empty(len(places_NK), rows_SD.shape[1]))
def sum_rows(rows_SD: torch.Tensor, places_NK: torch.Tensor) -> torch.Tensor:
    """Add K rows for each token, in the order of K: [N, D].

    Args:
        rows_SD: the rows.
        places_NK: indices of rows; S or more means no row.
    """
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    total_ND = rows_SD.new_zeros(len(places_NK), rows_SD.shape[1], dtype=dtype)
    for places_N in places_NK.unbind(1):
        tokens = (places_N < len(rows_SD)).nonzero()[:, 0]
        total_ND.index_add_(0, tokens, rows_SD[places_N[tokens]].to(dtype))
    return total_ND.to(rows_SD.dtype)
