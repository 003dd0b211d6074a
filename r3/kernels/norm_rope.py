"""Norms and rotary embeddings: one kernel on CUDA, plain torch elsewhere.

As in `r3.kernels.moe`, torch.ops.r3 chooses by device. Called inside autograd functions only.
"""

from __future__ import annotations

import torch

from r3.kernels.moe import operator, wide


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
