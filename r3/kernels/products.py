"""Rows times whole matrices on CPU, by the tiles of `r3.kernels.tiles`.

One thread runs the loops. With AVX2, read 16 for 32 here.
"""

from __future__ import annotations

from typing import Any

from r3.kernels.compiled import compiled
from r3.kernels.tiles import LANES, TILE, multiply

DEEP = 256
"""Terms of a sum that are added at once: a tile of so many rows stays in the first-level cache."""


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
