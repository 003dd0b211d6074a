"""Values of quantised tensors, in bfloat16. The formats are described in r3/models/quantised.py."""

from __future__ import annotations

import torch

from r3.models.quantised import BLOCK, PER_INT

# Of the four bits of a value: sign, two of exponent, one of mantissa (OCP MX specification, E2M1).
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_E2M1, -_E2M1])
_BIAS = 127  # of an exponent
MIDDLE = 8  # stands for zero in int4


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


def from_int4(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, *, group: int, columns: int
) -> torch.Tensor:
    """Return rows of a matrix with so many columns.

    Args:
        packed: [rows, columns / 8 and padding], see `unpacked`.
        scales: [rows, groups], whose type is the one of the product.
        zeros: the values that stand for zero; they broadcast to the scales.
        group: columns that share a factor.
    """
    values, steps = (
        each.repeat_interleave(group, -1)[:, :columns]
        for each in (zeros.expand(scales.shape), scales)
    )
    return ((unpacked(packed)[:, :columns] - values).to(scales.dtype) * steps).bfloat16()


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the eight values of each int32, 0 to 15, along the last dimension.

    The lowest bits come first.
    """
    halves = packed[..., None] >> torch.arange(0, 32, 32 // PER_INT, dtype=torch.int32)
    return (halves & 15).flatten(-2).to(torch.int8)
