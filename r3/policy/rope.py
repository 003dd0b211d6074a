"""Rotary frequencies, with the scaling of config.json.

Megatron's own Llama 3 scaling has constants for some keys of config.json. The arithmetic here is
that of transformers and vLLM, in float32 and in the same order: at position 100000 the last bit of
a frequency changes the angle.
"""

from __future__ import annotations

import math

import torch

from r3.models.shape import RopeScaling


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
