"""Norms in place of TransformerEngine's, and rotary positions: the same on CPU and CUDA.

Megatron's own Llama 3 scaling has constants for some keys of config.json. The arithmetic of
frequencies here is that of transformers and vLLM, in float32 and in the same order: at position
100000 the last bit of a frequency changes the angle. Megatron computes cosines and sines in each
layer, for queries and for keys; here each micro-batch has one `Rotation`. Latent attention uses
Megatron's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import nn

from r3.layers import kernels  # noqa: F401  (defines torch.ops.r3)
from r3.models.hf_config import RopeScaling
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


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Return radians per position, float32 [dim / 2], fastest first: theta^(-2 i / dim), scaled.

    turns is how often a wavelength fits into the original context.

    llama3  f' = f / factor                   where turns < slow
            f' = f                            where turns > fast
            f' = (1 - s) f / factor + s f     between, s = (turns - slow) / (fast - slow)
    yarn    f' = r f / factor + (1 - r) f     r goes from 0 to 1 between the dimensions with
                                              turns = fast and turns = slow
    """
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / powers
    if scaling is None:
        return plain
    if scaling.kind == "llama3":
        turns = scaling.original / (2 * math.pi / plain)
        share = (turns - scaling.slow) / (scaling.fast - scaling.slow)
        slowed = torch.where(
            turns < scaling.slow,
            plain / scaling.factor,
            (1 - share) * plain / scaling.factor + share * plain,
        )
        return torch.where(turns > scaling.fast, plain, slowed)

    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.fast), dimension(scaling.slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - keep) + plain * keep


class Rotation:
    """Turns pairs (x_i, x_{i + d / 2}) of a head's first d values by position * frequency_i.

    (x cos - y sin, y cos + x sin) is head * (cos, cos) + (head with swapped halves) * (-sin, sin).

    Attributes:
        cos, sin: (cos, cos) and (-sin, sin) of the angles, [t, 1, d], in the type of what is
            turned.
        interleaved: turn pairs (x_{2 i}, x_{2 i + 1}), and put the first of all pairs before the
            second ones. Products of queries and keys have the same value in any order.
    """

    def __init__(
        self,
        positions_N: torch.Tensor,
        inverse: torch.Tensor,
        dtype: torch.dtype,
        *,
        interleaved: bool = False,
    ) -> None:
        self.interleaved = interleaved
        angles = torch.outer(positions_N.float(), inverse)[:, None]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.cos, self.sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def __call__(self, x_Nhd: torch.Tensor) -> torch.Tensor:
        """Return x with every token's heads turned, [t, h, d]."""
        if self.interleaved:
            turned, rest = x_Nhd.split([size := self.cos.shape[-1], x_Nhd.shape[-1] - size], -1)
            pairs = turned.unflatten(-1, (-1, 2))
            x_Nhd = torch.cat([pairs[..., 0], pairs[..., 1], rest], -1)
        return _Rotate.apply(x_Nhd, self.cos, self.sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_Nhd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.ops.r3.turn(x_Nhd, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.ops.r3.turn(upstream[0], *ctx.saved_tensors, -1), None, None
