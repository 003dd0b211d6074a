"""All experts of a MoE layer on CPU, products included, in the processor's cache.

Between `fused_experts`' products lie results of hundreds of rows, which leave the cache before the
next loop reads them. Here a block of an expert's rows goes through all of them at once: what lies
between stays in the second-level cache. Products are those of `products`.

In bfloat16, products multiply numbers in pairs and add in float32; what a product reads is
bfloat16, and so are the outputs of `w1`. A processor without such products gets float32 copies of
the numbers (`type_for`).

One thread runs the loops, on processors with AVX-512 or AVX2. The result of a row depends on no
other row: forward and recomputation have the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from r3.kernels import tiles
from r3.kernels.compiled import array, compiled, like
from r3.kernels.products import columns_loop, products_loop, tiles_loop
from r3.kernels.rows import (
    add_rows_loop,
    take_rows_loop,
    weighted_swiglu_backward_loop,
    weighted_swiglu_loop,
)
from r3.kernels.switch import is_on
from r3.kernels.tiles import LANES, PAIRS, ROWS, SIMILAR, TILE

BLOCK = 128 // ROWS * ROWS
"""Rows that are in the cache together. They are whole calls of the product, which takes ROWS."""


# --- bfloat16 numbers in pairs; float32 numbers are used as they are ----------------------------


def _tiles(rows: Any, out: Any) -> None:
    """Arrange rows [k, n] as tiles [n / 32, k, 32], or [n / 32, pairs of k, 32]."""


def _turned(rows: Any, space: Any) -> Any:
    """Return address, distance and step with which the columns of [k, n] are rows of products.

    Args:
        space: memory of [pairs of k, n].
    """


@overload(_tiles, strict=False)
def _tiles_compiled(rows: Any, out: Any) -> Any:
    if rows.dtype != types.uint16:
        return lambda rows, out: tiles_loop(rows, out)

    def of_pairs(rows: Any, out: Any) -> None:
        for k in range(0, len(rows), 2):
            for t in range(len(out)):
                part, tile = rows[k, t * TILE : (t + 1) * TILE], out[t, k // 2]
                if k + 1 < len(rows):
                    other = rows[k + 1, t * TILE : (t + 1) * TILE]
                    for n in range(TILE):
                        tile[n] = np.int32(part[n]) | np.int32(np.int32(other[n]) << np.int32(16))
                else:
                    for n in range(TILE):
                        tile[n] = np.int32(part[n])

    return of_pairs


@overload(_turned, strict=False)
def _turned_compiled(rows: Any, space: Any) -> Any:
    if rows.dtype != types.uint16:
        return lambda rows, space: (rows.ctypes.data, 1, rows.shape[1])

    def of_pairs(rows: Any, space: Any) -> Any:
        for k in range(0, len(rows), 2):
            part, pairs = rows[k], space[k // 2]
            if k + 1 < len(rows):
                other = rows[k + 1]
                for n in range(len(part)):
                    pairs[n] = np.int32(part[n]) | np.int32(np.int32(other[n]) << np.int32(16))
            else:
                for n in range(len(part)):
                    pairs[n] = np.int32(part[n])
        return space.ctypes.data, 1, space.shape[1]

    return of_pairs


@compiled
def _store(values: Any, out: Any) -> None:
    """Copy float32 rows to rows of out's type."""
    for i in range(len(out)):
        for column in range(out.shape[1]):
            out[i, column] = like(values[i, column], out[i, column])


# --- the loops ----------------------------------------------------------------------------------


@compiled
def _forward(
    tokens: Any, rows: Any, gates: Any, sizes: Any, w1: Any, w2: Any, both: Any, out: Any
) -> None:
    """Compute `forward`; w1 and w2 are [E, 2F, D] and [E, D, F], or have pairs in their rows."""
    (experts, double, deep1), D, deep2 = w1.shape, tokens.shape[1], w2.shape[2]
    F, number = double // 2, np.float32
    up = np.empty((double // TILE, deep1, TILE), w1.dtype)
    down = np.empty((D // TILE, deep2, TILE), w2.dtype)
    x, inner = np.empty((BLOCK, D), tokens.dtype), np.empty((BLOCK, F), tokens.dtype)
    results, outputs = np.empty((BLOCK, double), number), np.empty((BLOCK, D), number)
    at_x, at_inner = x.ctypes.data, inner.ctypes.data
    at_results, at_outputs = results.ctypes.data, outputs.ctypes.data
    end = 0
    for expert in range(experts):
        begin, end = end, end + sizes[expert]
        if begin == end:
            continue
        columns_loop(w1[expert], up)
        columns_loop(w2[expert], down)
        for first in range(begin, end, BLOCK):
            last = min(first + BLOCK, end)
            count = last - first
            take_rows_loop(tokens, rows[first:last], x[:count])
            products_loop(at_x, deep1, 1, count, deep1, up, at_results, double, False)
            _store(results, both[first:last])
            weighted_swiglu_loop(both[first:last], gates[first:last], inner[:count])
            products_loop(at_inner, deep2, 1, count, deep2, down, at_outputs, D, False)
            add_rows_loop(out, rows[first:last], outputs[:count])


@compiled
def _backward(
    tokens: Any,
    rows: Any,
    gates: Any,
    sizes: Any,
    w1: Any,
    w2: Any,
    both: Any,
    upstream: Any,
    d_tokens: Any,
    d_gates: Any,
    d_w1: Any,
    d_w2: Any,
    similar: Any,
) -> None:
    """Compute `backward`; `similar` is an array of what a product's row consists of."""
    experts, double, D = w1.shape
    F, number, pair = double // 2, np.float32, similar.itemsize // tokens.itemsize
    up = np.empty((D // TILE, double // pair, TILE), similar.dtype)
    down = np.empty((F // TILE, D // pair, TILE), similar.dtype)
    # Columns of these are rows of products too, and would lie at distances that are powers of two,
    # which share few lines of the first-level cache.
    wide, wider = D + pair * LANES, double + pair * LANES
    ups, d_both = np.zeros((BLOCK, wide), tokens.dtype), np.zeros((BLOCK, wider), tokens.dtype)
    of_ups = np.empty((BLOCK // 2, wide), np.int32)
    of_d_both = np.empty((BLOCK // 2, wider), np.int32)
    d_inner, inner = np.empty((BLOCK, F), number), np.empty((BLOCK, F), tokens.dtype)
    x, d_x = np.empty((BLOCK, D), tokens.dtype), np.empty((BLOCK, D), number)
    inner_tiles = np.empty((F // TILE, BLOCK // pair, TILE), similar.dtype)
    x_tiles = np.empty((D // TILE, BLOCK // pair, TILE), similar.dtype)
    at_ups, at_d_both, at_d_x = ups.ctypes.data, d_both.ctypes.data, d_x.ctypes.data
    end = 0
    for expert in range(experts):
        begin, end = end, end + sizes[expert]
        if begin == end:
            continue
        _tiles(w1[expert], up)
        _tiles(w2[expert], down)
        for first in range(begin, end, BLOCK):
            last = min(first + BLOCK, end)
            count = last - first
            terms = -(-count // pair)
            take_rows_loop(upstream, rows[first:last], ups[:count])
            at_d_inner, deep = d_inner.ctypes.data, D // pair
            products_loop(at_ups, wide // pair, 1, count, deep, down, at_d_inner, F, False)
            of_block = both[first:last], gates[first:last], d_inner[:count]
            weighted_swiglu_backward_loop(*of_block, inner[:count], d_both, d_gates[first:last])
            if len(d_w2):
                _tiles(inner[:count], inner_tiles)
                at, distance, step = _turned(ups[:count], of_ups)
                at_w2 = d_w2[expert].ctypes.data
                products_loop(at, distance, step, D, terms, inner_tiles, at_w2, F, True)
            if len(d_w1):
                take_rows_loop(tokens, rows[first:last], x[:count])
                _tiles(x[:count], x_tiles)
                at, distance, step = _turned(d_both[:count], of_d_both)
                at_w1 = d_w1[expert].ctypes.data
                products_loop(at, distance, step, double, terms, x_tiles, at_w1, D, True)
            deep = double // pair
            products_loop(at_d_both, wider // pair, 1, count, deep, up, at_d_x, D, False)
            add_rows_loop(d_tokens, rows[first:last], d_x[:count])


_SIMILAR = {torch.float32: SIMILAR[torch.float32], torch.bfloat16: PAIRS}


def is_faster(tokens_ND: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether to use these functions: on CPU, with the type and the sizes that the loops need."""
    is_here = tokens_ND.device.type == "cpu" and tokens_ND.dtype == w1.dtype
    is_whole = not any(size % TILE for size in w2.shape[1:])
    is_on_tiles = tiles.can_compute(tokens_ND.dtype)
    return is_on("experts") and is_here and is_whole and is_on_tiles


def type_for(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which the loops compute what has a data type."""
    return dtype if dtype == torch.bfloat16 and tiles.can_pair() else torch.float32


def prepare(dtype: torch.dtype) -> None:
    """Compile the loops for a data type, or load them. Otherwise the first step would."""
    dtype = type_for(dtype)
    x, rows = torch.zeros(1, TILE, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    w1, w2 = torch.zeros(1, 2 * TILE, TILE, dtype=dtype), torch.zeros(1, TILE, TILE, dtype=dtype)
    of_weights = torch.zeros(w1.shape), torch.zeros(w2.shape)
    gates = torch.zeros(1)
    _, both = forward(x, gates, rows, [1], w1, w2)
    backward(x, gates, rows, [1], w1, w2, both, x, *of_weights)


def forward(
    tokens_ND: torch.Tensor,
    gates_S: torch.Tensor,
    rows_S: torch.Tensor,
    sizes: list[int],
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum gate * w2[e] (silu(gate part of w1[e] x) * up part) over the slots of each token.

    Args:
        tokens_ND: tokens, of the weights' type.
        gates_S: weights of slots, float32, in the order of their experts.
        rows_S: tokens of the slots.
        sizes: number of slots of each expert.
        w1: [E, 2F, D], gate over up. w2: [E, D, F].

    Returns:
        Sums [N, D] in float32, and outputs of w1 [S, 2F] for `backward`.

    Raises:
        IndexError: a row is not among the tokens.
    """
    _check(tokens_ND, gates_S, rows_S, sizes, w1, w2)
    out_ND = torch.zeros(tokens_ND.shape)
    both_SF = tokens_ND.new_empty(len(rows_S), w1.shape[1])
    if tokens_ND.dtype == torch.bfloat16:
        w1, w2 = w1.view(torch.int32), w2.view(torch.int32)
    inputs = tokens_ND.contiguous(), rows_S, gates_S, torch.tensor(sizes), w1, w2
    _forward(*map(array, (*inputs, both_SF, out_ND)))
    return out_ND, both_SF


def backward(
    tokens_ND: torch.Tensor,
    gates_S: torch.Tensor,
    rows_S: torch.Tensor,
    sizes: list[int],
    w1: torch.Tensor,
    w2: torch.Tensor,
    both_SF: torch.Tensor,
    upstream_ND: torch.Tensor,
    d_w1: torch.Tensor | None,
    d_w2: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of tokens and gates; add those of weights to `d_w1` and `d_w2`, if given.

    All of them are float32.

    Raises:
        IndexError: a row is not among the tokens.
    """
    _check(tokens_ND, gates_S, rows_S, sizes, w1, w2)
    totals = []
    for total, weight in ((d_w1, w1), (d_w2, w2)):
        total = torch.empty(0, *weight.shape[1:]) if total is None else total
        assert total.shape[1:] == weight.shape[1:] and len(total) in (0, len(weight)), total.shape
        assert total.dtype == torch.float32, total.dtype
        totals.append(total)
    shapes = upstream_ND.shape, tokens_ND.shape, both_SF.shape
    assert shapes == (shapes[1], shapes[1], (len(rows_S), w1.shape[1])), shapes
    dtypes = upstream_ND.dtype, tokens_ND.dtype, both_SF.dtype
    assert dtypes == (dtypes[1],) * 3, dtypes
    d_tokens_ND, d_gates_S = torch.zeros(tokens_ND.shape), torch.empty_like(gates_S)
    inputs = tokens_ND.contiguous(), rows_S, gates_S, torch.tensor(sizes), w1, w2
    outputs = both_SF, upstream_ND.contiguous(), d_tokens_ND, d_gates_S, *totals
    _backward(*map(array, (*inputs, *outputs)), _SIMILAR[tokens_ND.dtype])
    return d_tokens_ND, d_gates_S


def _check(
    tokens_ND: torch.Tensor,
    gates_S: torch.Tensor,
    rows_S: torch.Tensor,
    sizes: list[int],
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> None:
    """Check what the loops do not: types, and all that an address is computed from."""
    experts, D, F = w2.shape
    dtypes = [tensor.dtype for tensor in (tokens_ND, w1, w2, gates_S)]
    assert dtypes[0] in _SIMILAR and dtypes == [*dtypes[:1] * 3, torch.float32], dtypes
    assert not D % TILE and not F % TILE, f"{w2.shape}: not multiples of {TILE}"
    assert w1.shape == (experts, 2 * F, D), f"{w1.shape}, {w2.shape}"
    assert tokens_ND.shape[1] == D, f"{tokens_ND.shape}, {w2.shape}"
    assert len(sizes) == experts and min(sizes) >= 0, f"{sizes} of {experts} experts"
    assert sum(sizes) == len(rows_S) == len(gates_S), f"{sizes}, {rows_S.shape}, {gates_S.shape}"
