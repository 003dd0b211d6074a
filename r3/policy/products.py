"""Matrix products of the policy: large float32 ones by oneDNN where that is faster, else by torch.

torch leaves float32 products on CPU to MKL, which uses half of an AVX-512 register on AMD
processors. AMD processors of family 26 and later compute a whole register at once, and oneDNN takes
half of MKL's time there. On family 25 both take the same time, but oneDNN needs preparation for
every new number of rows. Processors of other vendors keep MKL; oneDNN was not measured there.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

from r3.runtime.device import processor

SMALLEST = 2**20
"""Multiplications from which on oneDNN computes a product. It takes longer to begin."""


def _is_onednn_faster(vendor: str, family: int) -> bool:
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    is_whole = vendor == "AuthenticAMD" and family >= 26
    return torch.backends.mkldnn.is_available() and has_avx512 and is_whole


_BY_ONEDNN = _is_onednn_faster(*processor())


def is_by_onednn(tensor: torch.Tensor) -> bool:
    """Whether oneDNN computes large products with this tensor: float32 on CPU, if it is faster."""
    return _BY_ONEDNN and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def product(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Return left @ right, [M, N], without a gradient. The right side may be transposed at no cost.

    Source: torch/_inductor/mkldnn_ir.py (LinearUnary), which calls the same operator.
    """
    if not is_by_onednn(left_MK) or left_MK.numel() * right_KN.shape[1] < SMALLEST:
        return left_MK @ right_KN
    return torch.ops.mkldnn._linear_pointwise(left_MK, right_KN.t(), None, "none", [], "")


def use_product(model: nn.Module) -> None:
    """Let Megatron's linear layers compute by `product`, where that makes a difference.

    Not with tensor parallelism: there, layers also gather their input and sum its gradient.

    Args:
        model: a chunk of Megatron's GPTModel, on its device.
    """
    if model.config.tensor_model_parallel_size > 1 or not is_by_onednn(next(model.parameters())):
        return
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module._forward_impl = _linear


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    **_: Any,
) -> torch.Tensor:
    """Compute what a layer of megatron/core/tensor_parallel/layers.py does in `_forward_impl`."""
    assert not (allreduce_dgrad or sequence_parallel), "only without tensor parallelism"
    out = _Linear.apply(input, weight)
    return out if bias is None else out + bias


class _Linear(torch.autograd.Function):
    """input @ weight.T, for an input of any number of dimensions."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return product(input.flatten(0, -2), weight.t()).view(*input.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        d_out = upstream[0].flatten(0, -2)
        d_input = product(d_out, weight).view_as(input) if ctx.needs_input_grad[0] else None
        d_weight = product(d_out.t(), input.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return d_input, d_weight
