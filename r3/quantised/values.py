"""Values of quantised tensors, in bfloat16. `r3.quantised.formats` describes the formats."""

from __future__ import annotations

import torch

from r3.models.hf_checkpoint import CheckpointReader, Place
from r3.models.hf_config import ShapeError
from r3.quantised.formats import BLOCK, PER_INT

# Of the four bits of a value: sign, two of exponent, one of mantissa (OCP MX specification, E2M1).
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_E2M1, -_E2M1])
_BIAS = 127  # of an exponent
_MIDDLE = 8  # stands for zero in int4


def read(reader: CheckpointReader, place: Place, group: int) -> torch.Tensor:
    """Read a slice of a tensor of a checkpoint that has quantised ones.

    Args:
        reader: of the files.
        place: of the slice.
        group: int4: columns that share a factor; 0 = all of them.

    Raises:
        ShapeError: bytes have no factors, or factors belong to no bytes.
    """
    stored, rows = place.stored, place.rows
    if blocks := reader.part(f"{stored}_blocks"):
        scales, count = reader.part(f"{stored}_scales"), blocks.get_shape()[1] // place.size[0]
        expert, number = divmod(place.begin // place.size[0], count)
        at = expert, slice(count * rows.start, count * rows.stop)
        packed = reader.counted(blocks[at][number::count])
        return from_mxfp4(packed, scales[at][number::count])[(slice(None), *place.others)]
    if source := reader.part(f"{stored}_packed"):
        mine = slice(place.begin + rows.start, place.begin + rows.stop)
        zeros = torch.full((1, 1), _MIDDLE, dtype=torch.int8)
        if of_groups := reader.part(f"{stored}_zero_point"):
            zeros = unpacked(of_groups[:].t()).t()[mine]
        columns = place.size[1]
        packed, scales = reader.counted(source[mine]), reader.part(f"{stored}_scale")[mine]
        values = from_int4(packed, scales, zeros, group=group or columns, columns=columns)
        return values[:, place.others[0]]
    piece, at = reader.plain(place)
    is_quantised, factors = piece.dtype.itemsize == 1, reader.part(f"{stored}_scale_inv")
    if is_quantised != (factors is not None):
        fault = f"{stored} is {piece.dtype} with{'out' * is_quantised} {stored}_scale_inv"
        raise ShapeError(f"{reader.folder}: {fault}")
    if not is_quantised:
        return piece
    *_, row, column = at
    scales = factors[(*at[:-2], slice(None), slice(None))]
    return from_fp8(piece, scales, row.start, column.start)


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
