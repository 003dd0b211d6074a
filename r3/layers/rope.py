"""Rotary positions: frequencies with the scaling of config.json, and the rotation itself.

Megatron's own Llama 3 scaling has constants for some keys of config.json. The arithmetic here is
that of transformers and vLLM, in float32 and in the same order: at position 100000 the last bit of
a frequency changes the angle. Megatron computes cosines and sines in each layer, for queries and
for keys; here each micro-batch has one `Rotation`. Latent attention uses Megatron's.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from r3.kernels import norm_rope  # noqa: F401  (defines torch.ops.r3)
from r3.models.hf_config import RopeScaling


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
