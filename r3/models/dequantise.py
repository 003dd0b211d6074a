"""Values of quantised tensors, in bfloat16. The formats are described in r3/models/quantised.py."""

from __future__ import annotations

import torch

from r3.models.quantised import BLOCK

# Of the four bits of a value: sign, two of exponent, one of mantissa (OCP MX specification, E2M1).
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_E2M1, -_E2M1])
_BIAS = 127  # of an exponent


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return values [..., 32 groups] of `blocks` [..., groups, 16] and `scales` [..., groups].

    The low half of a byte comes first.
    """
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = _VALUES[halves.int()]
    return torch.ldexp(values, scales[..., None].int() - _BIAS).flatten(-2).bfloat16()


def from_fp8(values: torch.Tensor, scales: torch.Tensor, row: int, column: int) -> torch.Tensor:
    """Return a slice of a matrix, begun at `row` and `column`, times the factors of its blocks.

    Args:
        scales: of the whole matrix.
    """
    rows, columns = (
        (torch.arange(first, first + count) // BLOCK)
        for first, count in zip((row, column), values.shape, strict=True)
    )
    return (values.float() * scales.float()[rows][:, columns]).bfloat16()
