"""Matrix products of the policy on CPU: by what is fastest on the processor.

torch leaves float32 products on CPU to MKL, which uses half of an AVX-512 register on AMD
processors. AMD processors of family 26 and later compute a whole register at once, and oneDNN takes
half of MKL's time there. On family 25 both take the same time, but oneDNN needs preparation for
every new number of rows, and loops of R3's own take a seventh less (`cpu_products`), with AVX-512
and on older models with AVX2. Processors of other vendors keep MKL; nothing else was measured
there. Experts do not use these products where `cpu_experts` computes them.

oneDNN multiplies bfloat16 with AVX-512 only. Without it torch falls back to a plain loop, which
takes 80 times as long as MKL with float32, so that such products are computed in float32 and
rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

from r3.kernels.switch import is_on
from r3.policy import cpu_products
from r3.runtime.device import processor

SMALLEST = 2**20
"""Multiplications of a product; torch computes smaller ones. Other ways take longer to begin."""


_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def _is_onednn_faster(vendor: str, family: int) -> bool:
    is_whole = vendor == "AuthenticAMD" and family >= 26
    return torch.backends.mkldnn.is_available() and _HAS_AVX512 and is_whole


def _are_tiles_faster(vendor: str, family: int) -> bool:
    return vendor == "AuthenticAMD" and family == 25


_BY_ONEDNN, _BY_TILES = _is_onednn_faster(*processor()), _are_tiles_faster(*processor())
_HAS_BFLOAT16 = (
    torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)


def is_by_onednn(tensor: torch.Tensor) -> bool:
    """Whether oneDNN computes large products with this tensor: float32 on CPU, if it is faster."""
    return _BY_ONEDNN and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def is_by_float32(tensor: torch.Tensor) -> bool:
    """Whether products with this tensor are computed in float32: bfloat16 on CPU without them."""
    return not _HAS_BFLOAT16 and tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def product(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Return left @ right, [M, N], without a gradient. The right side may be transposed at no cost.

    Source: torch/_inductor/mkldnn_ir.py (LinearUnary), which calls the same operator.
    """
    if is_by_float32(left_MK):
        return (left_MK.float() @ right_KN.float()).to(left_MK.dtype)
    if left_MK.numel() * right_KN.shape[1] < SMALLEST:
        return left_MK @ right_KN
    if is_on("linear") and _BY_TILES and cpu_products.can_compute(left_MK, right_KN):
        return cpu_products.product(left_MK, right_KN)
    if not (is_on("linear") and is_by_onednn(left_MK)):
        return left_MK @ right_KN
    return torch.ops.mkldnn._linear_pointwise(left_MK, right_KN.t(), None, "none", [], "")


def use_product(model: nn.Module) -> None:
    """Let Megatron's linear layers compute by `product`, where that makes a difference.

    With tensor parallelism, layers also gather their input and sum its gradient. There, they only
    compute in float32 what the processor cannot in bfloat16.

    Args:
        model: a chunk of Megatron's GPTModel, on its device.
    """
    first = next(model.parameters())
    linear = [
        module
        for module in model.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    ]
    if model.config.tensor_model_parallel_size > 1:
        if is_by_float32(first):
            for module in linear:
                module._forward_impl = _in_float32(module._forward_impl)
        return
    by_tiles = _BY_TILES and cpu_products.can_compute(first, first.new_empty(0, 0))
    if by_tiles:
        cpu_products.prepare()
    if by_tiles or is_by_onednn(first) or is_by_float32(first):
        for module in linear:
            module._forward_impl = _linear


def _in_float32(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let a layer's forward, and its backward, compute in float32."""

    def wide(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        bias = None if bias is None else bias.float()
        return forward(input.float(), weight.float(), bias, **options).to(input.dtype)

    return wide


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
