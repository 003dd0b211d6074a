"""The output layer except its matmuls: one kernel on CUDA, plain torch elsewhere.

As in `r3.kernels.moe`, torch.ops.r3 chooses by device. Below, V are the rows of the output weight
on this rank. Rows from `columns` on pad the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from r3.kernels import NOWHERE
from r3.kernels.moe import operator, wide


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
