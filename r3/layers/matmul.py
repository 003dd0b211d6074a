"""Matrix products of the policy: bfloat16 in float32 on a processor without bfloat16 products.

torch falls back to a plain loop there, which takes 80 times as long as a float32 product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

_HAS_BFLOAT16 = (
    torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)


def is_by_float32(tensor: torch.Tensor) -> bool:
    """Whether products with this tensor are computed in float32: bfloat16 on CPU without them."""
    return not _HAS_BFLOAT16 and tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def product(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Return left @ right, [M, N], of their type."""
    if is_by_float32(left_MK):
        return (left_MK.float() @ right_KN.float()).to(left_MK.dtype)
    return left_MK @ right_KN


def use_product(model: nn.Module) -> None:
    """Let Megatron's linear layers compute in float32 what the processor cannot in bfloat16.

    Args:
        model: a chunk of Megatron's GPTModel, on its device.
    """
    if is_by_float32(next(model.parameters())):
        for module in model.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module._forward_impl = _in_float32(module._forward_impl)


def _in_float32(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let a layer's forward, and its backward, compute in float32."""

    def wide(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        bias = None if bias is None else bias.float()
        return forward(input.float(), weight.float(), bias, **options).to(input.dtype)

    return wide
