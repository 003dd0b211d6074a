"""Norms of Megatron's layer spec, in place of TransformerEngine's: the same on CPU and CUDA."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import nn

from r3.kernels import norm_rope  # noqa: F401  (defines torch.ops.r3)
from r3.runtime.mesh import Axis


class RMSNorm(nn.Module):
    """Root-mean-square norm with float32 statistics.

    It supports sequence parallelism, which Megatron's torch norm refuses.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # finalize_model_grads sums this gradient over tp if tp ranks had slices of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dimension."""
        return _Norm.apply(x, self.weight, self.eps)


class _Norm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps), with a backward that saves only its inputs.

    Rows of the last dimension are normed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out_ND, scale_N = torch.ops.r3.norm(x.flatten(0, -2), weight, eps)
        ctx.save_for_backward(x, weight, scale_N)
        return out_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale_N = ctx.saved_tensors
        of_rows = x.flatten(0, -2), weight, scale_N, upstream[0].flatten(0, -2)
        d_x_ND, d_weight = torch.ops.r3.norm_backward(*of_rows)
        return d_x_ND.view(x.shape), d_weight, None


class CentredNorm(RMSNorm):
    """Norm that multiplies by 1 + weight, in float32 before the result is rounded (Qwen3-Next)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dimension."""
        return _Norm.apply(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)


class LatentNorm(RMSNorm):
    """Norm of the compressed queries, keys and values of latent attention.

    DeepSeek's own code leaves epsilon at 1e-6 whatever rms_norm_eps is. (Moonlight has 1e-5, which
    vLLM uses here too: on latents of usual size the difference is below bfloat16 rounding.)
    """

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class AllHeadsNorm(nn.Module):
    """Root-mean-square norm over all heads together, [..., heads, d]. All ranks of tp must call.

    Each tensor-parallel rank has some of the heads. Every rank has the full weight and uses the
    part of its own heads: Megatron sums the gradients of q_layernorm and k_layernorm over tp, by
    their names, and the gradients of the other parts are zero.
    """

    heads = ""  # field of Megatron's config that counts them

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(getattr(config, self.heads) * hidden_size, dtype=config.params_dtype)
        )
        self.tp: Axis | None = None  # Megatron gives norms no process group; build_chunks does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last two dimensions of all tensor parallel ranks."""
        assert self.tp is not None, "build_chunks gives the norm its axis"
        x32 = x.flatten(-2).float()
        squares, weight = x32.pow(2).sum(-1, keepdim=True), self.weight
        if self.tp.size > 1:
            # Summed in forward and backward: every rank's output depends on every rank's input.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp.group)
            weight = weight.chunk(self.tp.size)[self.tp.rank]
        x32 = x32 * torch.rsqrt(squares / self.weight.numel() + self.eps)
        return (weight * x32.to(x.dtype)).view_as(x)


class QueryHeadsNorm(AllHeadsNorm):
    """Over all query heads."""

    heads = "num_attention_heads"


class KeyHeadsNorm(AllHeadsNorm):
    """Over all key heads."""

    heads = "num_query_groups"
