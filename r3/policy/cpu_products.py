"""Matrix products of float32 numbers on CPU, by the tiles of `r3.runtime.cpu_tiles`.

MKL, which torch calls, uses half of an AVX-512 register on AMD processors. These loops use all of
it. One thread runs them. Where the processor has AVX2 only, tiles have 16 columns instead of 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from r3.runtime import cpu_tiles
from r3.runtime.compiled import array, compiled
from r3.runtime.cpu_tiles import LANES, ROWS, TILE, multiply

DEEP = 256
"""Terms of a sum that are added at once: a tile of so many rows stays in the first-level cache."""
BLOCK = 128 // ROWS * ROWS
"""Rows that meet all tiles before the next rows do: they stay in the second-level cache. They are
whole calls of the product, which takes ROWS at once."""


@compiled
def columns_loop(weights: Any, out: Any) -> None:
    """Arrange rows of weights [n, k] as the columns of tiles [n / 32, k, 32]."""
    for n in range(weights.shape[0]):
        tile, column = out[n // TILE], n % TILE
        for k in range(weights.shape[1]):
            tile[k, column] = weights[n, k]


@compiled
def tiles_loop(weights: Any, out: Any) -> None:
    """Arrange weights [k, n] as tiles [n / 32, k, 32]."""
    for k in range(weights.shape[0]):
        for t in range(len(out)):
            part, tile = weights[k, t * TILE : (t + 1) * TILE], out[t, k]
            for n in range(TILE):
                tile[n] = part[n]


@compiled
def products_loop(
    rows: Any,
    distance: Any,
    step: Any,
    count: Any,
    terms: Any,
    tiles: Any,
    out: Any,
    wide: Any,
    adds: Any,
) -> None:
    """Multiply rows by all tiles.

    Args:
        rows: address of float32 numbers, of which a row has `terms`.
        distance: from one row to the next.
        step: from one number of a row to the next.
        count: number of rows.
        tiles: [tiles, terms or more, 32].
        out: address of the results, 32 per row and tile.
        wide: distance from one row of results to the next.
        adds: whether to add to what is there.
    """
    of_tile = tiles.shape[1] * TILE * 4
    similar = tiles
    for first in range(0, terms, DEEP):
        deep = min(DEEP, terms - first)
        of = rows + first * step * 4, distance, step
        for t in range(len(tiles)):
            tile = tiles.ctypes.data + t * of_tile + first * TILE * 4, TILE, LANES
            to = out + t * TILE * 4, wide
            multiply(count, of, deep, tile, to, adds or first > 0, None, similar)


@compiled
def _product(left: Any, right: Any, is_transposed: Any, out: Any) -> None:
    """Multiply left [M, K] by right [K, N] or transposed [N, K]."""
    (rows, terms), columns = left.shape, out.shape[1]
    tiles = np.empty((columns // TILE, DEEP, TILE), np.float32)
    for term in range(0, terms, DEEP):
        deep = min(DEEP, terms - term)
        if is_transposed:
            columns_loop(right[:, term : term + deep], tiles)
        else:
            tiles_loop(right[term : term + deep], tiles)
        for row in range(0, rows, BLOCK):
            count = min(BLOCK, rows - row)
            at_left = left.ctypes.data + (row * terms + term) * 4
            at_out = out.ctypes.data + row * columns * 4
            products_loop(at_left, terms, 1, count, deep, tiles, at_out, columns, term > 0)


def can_compute(left_MK: torch.Tensor, right_KN: torch.Tensor) -> bool:
    """Whether `product` has loops for these: float32 on CPU, one thread, AVX2, whole tiles.

    Not for a transposed left side, a sum over all tokens: torch adds parts of it before their sums,
    and rounds less.
    """
    is_here = left_MK.device.type == "cpu" and left_MK.dtype == right_KN.dtype == torch.float32
    is_whole = left_MK.is_contiguous() and not right_KN.shape[1] % TILE
    return is_here and is_whole and cpu_tiles.can_compute(torch.float32)


def prepare() -> None:
    """Compile the loops, or load them from disk. Otherwise the first step would."""
    square = torch.zeros(TILE, TILE)
    product(square, square)
    product(square, square.t())


def product(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Return left @ right, [M, N], without a gradient. The right side may be transposed at no cost.

    Every row of the result depends on its own row of left only.
    """
    (rows, terms), columns = left_MK.shape, right_KN.shape[1]
    assert can_compute(left_MK, right_KN) and len(right_KN) == terms > 0, (left_MK, right_KN)
    is_transposed = right_KN.t().is_contiguous()
    right = right_KN.t() if is_transposed else right_KN.contiguous()
    out_MN = left_MK.new_empty(rows, columns)
    _product(array(left_MK), array(right), is_transposed, array(out_MN))
    return out_MN
