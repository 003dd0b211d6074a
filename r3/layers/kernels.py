"""Operations of the policy that are one kernel on CUDA, and plain torch elsewhere.

torch.ops.r3 has the operators, so that torch chooses by device: Triton kernels for CUDA tensors
(R3_KERNELS turns them off), the functions of this module for those on CPU. Both compute in float32
at least, round once at the end, and take every sum in a fixed order. Operators are called inside
autograd functions only.

Matrix products of bfloat16 (`product`) are computed in float32 on a processor without them, where
torch falls back to a plain loop that takes 80 times as long.

V are the rows of the output weight on this rank. Rows from `columns` on pad the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

from r3 import extras
from r3.runtime.kernel_switch import is_on

NOWHERE = -1e30
"""A logit whose probability is exactly 0 after the softmax. Unlike infinity, 0 times it is 0."""
_LIBRARY = torch.library.Library("r3", "DEF")
_Function = Callable[..., Any]


def operator(*, fake: _Function) -> Callable[[_Function], _Function]:
    """Make an operator of torch.ops.r3 from a function in plain torch.

    Triton's kernel of the same name runs for CUDA tensors. Triton is imported with the first call.

    Args:
        fake: returns results of the right shapes, for fake tensors.
    """

    def register(plain: _Function) -> _Function:
        name = plain.__name__

        def on_device(*arguments: Any) -> Any:
            if not is_on("triton"):
                return plain(*arguments)
            return getattr(extras.triton_kernels(), name)(
                *(one.contiguous() if torch.is_tensor(one) else one for one in arguments)
            )

        _LIBRARY.define(torch.library.infer_schema(plain, op_name=name, mutates_args=()))
        _LIBRARY.impl(name, plain, "CPU")
        _LIBRARY.impl(name, on_device, "CUDA")
        torch.library.register_fake(f"r3::{name}", fake, lib=_LIBRARY)
        return plain

    return register


def wide(values: torch.Tensor) -> torch.Tensor:
    """Return values in float32, or float64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@operator(
    fake=lambda x_ND, _weight_D, _eps: (
        x_ND.new_empty(x_ND.shape),
        x_ND.new_empty(len(x_ND), dtype=torch.promote_types(x_ND.dtype, torch.float32)),
    )
)
def norm(
    x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight * x / sqrt(mean(x^2) + eps), and 1 / sqrt(...) of each row, [N].

    What is multiplied by the weight is rounded to the type of x before.
    """
    x = wide(x_ND)
    length_N1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale_N1 = length_N1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale_N1).to(x_ND.dtype).mul_(weight_D), scale_N1[:, 0]


@operator(fake=lambda x_ND, weight_D, *_: (x_ND.new_empty(x_ND.shape), torch.empty_like(weight_D)))
def norm_backward(
    x_ND: torch.Tensor, weight_D: torch.Tensor, scale_N: torch.Tensor, gradient_ND: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight, for what `norm` returned.

    With n = x * scale and d = gradient * weight: dx = (d - n mean(d n)) * scale.
    """
    scale_N1 = scale_N[:, None]
    normed = wide(x_ND) * scale_N1
    product = wide(gradient_ND) * normed
    d_weight_D = product.sum(0).to(weight_D.dtype)
    # mean(d n) = mean(gradient n weight)
    mean_N1 = (product @ weight_D.to(product.dtype)).div_(x_ND.shape[-1]).unsqueeze(-1)
    d_normed = product.copy_(gradient_ND).mul_(weight_D)
    d_x_ND = d_normed.addcmul_(normed, mean_N1, value=-1).mul_(scale_N1)
    return d_x_ND.to(x_ND.dtype), d_weight_D


@operator(fake=lambda x_Nhd, *_: x_Nhd.new_empty(x_Nhd.shape))
def turn(x_Nhd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, way: int) -> torch.Tensor:
    """Return x * cos + way * (x with swapped halves) * sin, [t, h, d].

    Args:
        x_Nhd: heads.
        cos, sin: of a token's angles, [t, 1, at most d]; further columns are returned as they are.
        way: 1 or -1.
    """
    size = cos.shape[-1]
    if size < x_Nhd.shape[-1]:
        turned = turn(x_Nhd[..., :size], cos, sin, way)
        return torch.cat([turned, x_Nhd[..., size:]], -1)
    # In bfloat16 the rounding of an operation depends on the layout of its inputs.
    x_Nhd = x_Nhd.contiguous()
    return (x_Nhd * cos).addcmul_(x_Nhd.roll(size // 2, -1), sin, value=way)


@operator(
    fake=lambda logits_NV, *_: logits_NV.new_empty(
        4, len(logits_NV), dtype=torch.promote_types(logits_NV.dtype, torch.float32)
    )
)
def logit_sums(
    logits_NV: torch.Tensor, index_N: torch.Tensor, columns: int, scale: float
) -> torch.Tensor:
    """Return largest z, sum of e, sum of e * (z - largest), and target's z - largest: [4, N].

    z = scale * logit, and e = exp(z - largest).

    Args:
        logits_NV: logits of any type.
        index_N: column of each target.
        columns: how many are tokens.
        scale: 1 / temperature.
    """
    scaled_NV = _scaled(logits_NV, columns, scale)
    top_N = scaled_NV.amax(-1)
    scaled_NV.sub_(top_N.unsqueeze(-1))
    target_N = scaled_NV.gather(-1, index_N.unsqueeze(-1)).squeeze(-1)
    probs_NV = scaled_NV.exp()
    return torch.stack([top_N, probs_NV.sum(-1), scaled_NV.mul_(probs_NV).sum(-1), target_N])


def _fake_gradient(logits_NV: torch.Tensor, *rest: Any) -> torch.Tensor:
    if not rest[-1]:  # halves
        return torch.empty_like(logits_NV)
    return logits_NV.new_empty(2 * len(logits_NV), logits_NV.shape[1], dtype=torch.bfloat16)


@operator(fake=_fake_gradient)
def logit_gradient(
    logits_NV: torch.Tensor,
    index_N: torch.Tensor,
    columns: int,
    scale: float,
    top_N: torch.Tensor,
    total_N: torch.Tensor,
    grad_N: torch.Tensor,
    at_target_N: torch.Tensor,
    entropy_grad_N: torch.Tensor | None,
    excess_N: torch.Tensor | None,
    halves: bool,
) -> torch.Tensor:
    """Return -p (grad + entropy_grad * (z - top + excess)), and at targets + at_target: [N, V].

    p = exp(z - top) / total.

    Args:
        logits_NV, index_N, columns, scale: see `logit_sums`.
        top_N, total_N: of all ranks.
        grad_N, at_target_N: gradient of the log-probability; 0 if the target is on another rank.
        entropy_grad_N, excess_N: gradient of the entropy; None: it has none.
        halves: return the sum of two bfloat16 numbers, the larger ones above the others: [2N, V].
            It has 16 of the 24 bits of float32. Otherwise the result has the type of the logits.
    """
    scaled_NV = _scaled(logits_NV, columns, scale)
    scaled_NV.sub_(top_N[:, None])
    factor_NV = -grad_N[:, None]
    if entropy_grad_N is not None and excess_N is not None:
        factor_NV = (scaled_NV + excess_N[:, None]).mul_(-entropy_grad_N[:, None])
        factor_NV.sub_(grad_N[:, None])
    grad_NV = scaled_NV.exp_().mul_(factor_NV.div_(total_N[:, None]))
    del factor_NV
    grad_NV.scatter_add_(-1, index_N.unsqueeze(-1), at_target_N.unsqueeze(-1))
    return halves_of(grad_NV) if halves else grad_NV.to(logits_NV.dtype)


def halves_of(values_NV: torch.Tensor) -> torch.Tensor:
    """Return two bfloat16 numbers for each float32: the nearest, above the nearest to the rest."""
    high_NV = values_NV.bfloat16()
    return torch.cat([high_NV, (values_NV - high_NV).bfloat16()])


def _scaled(logits_NV: torch.Tensor, columns: int, scale: float) -> torch.Tensor:
    scaled_NV = wide(logits_NV) * scale
    scaled_NV[:, columns:] = NOWHERE
    return scaled_NV


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
