"""Round values to a few bits of mantissa, as a rollout in eight bits or fewer does."""

from __future__ import annotations

from torch import Tensor, frexp, ldexp


def rounded(value: Tensor, bits: int) -> Tensor:
    """Round to nearest with `bits` bits of mantissa; the exponent keeps its range."""
    mantissa, exponent = frexp(value.float())  # 0.5 <= |mantissa| < 1
    steps = 2.0 ** (bits + 1)
    return ldexp((mantissa * steps).round() / steps, exponent).to(value.dtype)
