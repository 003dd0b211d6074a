"""All experts of a MoE layer on CPU in float32, products included, in the processor's cache.

Between `fused_experts`' products lie results of hundreds of rows, which leave the cache before the
next loop reads them. Here a block of an expert's rows goes through all of them at once: what lies
between stays in the second-level cache. Products are those of `cpu_products`.

One thread runs the loops, on processors with AVX-512. The result of a row depends on no other row:
forward and recomputation have the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from r3.policy.cpu_kernels import (
    AHEAD,
    add_rows_loop,
    fetch_row,
    take_rows_loop,
    weighted_swiglu_backward_loop,
    weighted_swiglu_loop,
)
from r3.policy.cpu_products import columns_loop, products_loop, tiles_loop
from r3.runtime import cpu_tiles
from r3.runtime.compiled import array, compiled
from r3.runtime.cpu_tiles import LANES, TILE

BLOCK = 128
"""Rows that are in the cache together."""


@compiled
def _take_tiles(values: Any, rows: Any, out: Any) -> None:
    """Copy rows as tiles [D / 32, rows, 32]."""
    for i in range(len(rows)):
        fetch_row(values, rows, i + AHEAD)
        row = rows[i]
        if row < 0 or row >= len(values):
            raise IndexError("a row that the values do not have")
        for t in range(len(out)):
            part, tile = values[row, t * TILE : (t + 1) * TILE], out[t, i]
            for column in range(TILE):
                tile[column] = part[column]


@compiled
def _forward(
    tokens: Any, rows: Any, gates: Any, sizes: Any, w1: Any, w2: Any, both: Any, out: Any
) -> None:
    experts, double, D = w1.shape
    F, number = double // 2, np.float32
    up, down = np.empty((double // TILE, D, TILE), number), np.empty((D // TILE, F, TILE), number)
    x, inner, outputs = (
        np.empty((BLOCK, D), number),
        np.empty((BLOCK, F), number),
        np.empty((BLOCK, D), number),
    )
    at_x, at_inner, at_outputs = x.ctypes.data, inner.ctypes.data, outputs.ctypes.data
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
            at_both = both.ctypes.data + first * double * 4
            products_loop(at_x, D, 1, count, D, up, at_both, double, False)
            weighted_swiglu_loop(both[first:last], gates[first:last], inner[:count])
            products_loop(at_inner, F, 1, count, F, down, at_outputs, D, False)
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
) -> None:
    experts, double, D = w1.shape
    F, number = double // 2, np.float32
    up, down = np.empty((D // TILE, double, TILE), number), np.empty((F // TILE, D, TILE), number)
    # Columns of these are rows of products too, and would lie at distances that are powers of two,
    # which share few lines of the first-level cache.
    wide, wider = D + LANES, double + LANES
    ups, d_both = np.empty((BLOCK, wide), number), np.empty((BLOCK, wider), number)
    d_inner, inner = np.empty((BLOCK, F), number), np.empty((BLOCK, F), number)
    inner_tiles, x_tiles = (
        np.empty((F // TILE, BLOCK, TILE), number),
        np.empty((D // TILE, BLOCK, TILE), number),
    )
    d_x = np.empty((BLOCK, D), number)
    at_ups, at_d_both, at_d_x = ups.ctypes.data, d_both.ctypes.data, d_x.ctypes.data
    end = 0
    for expert in range(experts):
        begin, end = end, end + sizes[expert]
        if begin == end:
            continue
        tiles_loop(w1[expert], up)
        tiles_loop(w2[expert], down)
        for first in range(begin, end, BLOCK):
            last = min(first + BLOCK, end)
            count = last - first
            take_rows_loop(upstream, rows[first:last], ups[:count])
            products_loop(at_ups, wide, 1, count, D, down, d_inner.ctypes.data, F, False)
            of_block = both[first:last], gates[first:last], d_inner[:count]
            weighted_swiglu_backward_loop(*of_block, inner[:count], d_both, d_gates[first:last])
            if len(d_w2):
                tiles_loop(inner[:count], inner_tiles)
                at_w2 = d_w2[expert].ctypes.data
                products_loop(at_ups, 1, wide, D, count, inner_tiles, at_w2, F, True)
            if len(d_w1):
                _take_tiles(tokens, rows[first:last], x_tiles)
                at_w1 = d_w1[expert].ctypes.data
                products_loop(at_d_both, 1, wider, double, count, x_tiles, at_w1, D, True)
            products_loop(at_d_both, wider, 1, count, double, up, at_d_x, D, False)
            add_rows_loop(d_tokens, rows[first:last], d_x[:count])


def is_faster(tokens_ND: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether to use these functions: on CPU in float32, with what the loops need."""
    is_here = tokens_ND.device.type == "cpu" and tokens_ND.dtype == w1.dtype == torch.float32
    return (
        is_here
        and cpu_tiles.can_compute(torch.float32)
        and not any(size % TILE for size in w2.shape[1:])
    )


def prepare() -> None:
    """Compile the loops, or load them from disk. Otherwise the first step would."""
    x, gates, rows = torch.zeros(1, TILE), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    w1, w2 = torch.zeros(1, 2 * TILE, TILE), torch.zeros(1, TILE, TILE)
    out, both = forward(x, gates, rows, [1], w1, w2)
    backward(x, gates, rows, [1], w1, w2, both, out, w1, w2)


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
        tokens_ND: tokens.
        gates_S: weights of slots, in the order of their experts.
        rows_S: tokens of the slots.
        sizes: number of slots of each expert.
        w1: [E, 2F, D], gate over up. w2: [E, D, F].

    Returns:
        Sums [N, D], and outputs of w1 [S, 2F] for `backward`.

    Raises:
        IndexError: a row is not among the tokens.
    """
    _check(tokens_ND, gates_S, rows_S, sizes, w1, w2)
    out_ND = torch.zeros(tokens_ND.shape)
    both_SF = torch.empty(len(rows_S), w1.shape[1])
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

    Raises:
        IndexError: a row is not among the tokens.
    """
    _check(tokens_ND, gates_S, rows_S, sizes, w1, w2)
    totals = []
    for total, weight in ((d_w1, w1), (d_w2, w2)):
        assert total is None or total.shape == weight.shape, (total, weight.shape)
        totals.append(weight.new_empty(0, *weight.shape[1:]) if total is None else total)
    shapes = upstream_ND.shape, tokens_ND.shape, both_SF.shape
    assert shapes == (shapes[1], shapes[1], (len(rows_S), w1.shape[1])), shapes
    d_tokens_ND, d_gates_S = torch.zeros(tokens_ND.shape), torch.empty_like(gates_S)
    inputs = tokens_ND.contiguous(), rows_S, gates_S, torch.tensor(sizes), w1, w2
    outputs = both_SF, upstream_ND.contiguous(), d_tokens_ND, d_gates_S, *totals
    _backward(*map(array, (*inputs, *outputs)))
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
    tensors = tokens_ND, gates_S, w1, w2
    assert all(tensor.dtype == torch.float32 for tensor in tensors), [t.dtype for t in tensors]
    assert not D % TILE and not F % TILE, f"{w2.shape}: not multiples of {TILE}"
    assert w1.shape == (experts, 2 * F, D), f"{w1.shape}, {w2.shape}"
    assert tokens_ND.shape[1] == D, f"{tokens_ND.shape}, {w2.shape}"
    assert len(sizes) == experts and min(sizes) >= 0, f"{sizes} of {experts} experts"
    assert sum(sizes) == len(rows_S) == len(gates_S), f"{sizes}, {rows_S.shape}, {gates_S.shape}"
