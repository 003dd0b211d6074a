"""Causal attention of packed sequences on CPU, forward and backward, by compiled loops.

torch's attention for CPU is made for long sequences: with the hundreds of tokens of a response it
reaches a quarter of the speed of products. Here scores of 32 tokens (with AVX2 of 16) and all
tokens before them stay in the processor's cache from the product that makes them to the one that
uses them, and parts that the mask would remove are not computed. Everything between inputs and
results is float32.

One thread runs the loops, on processors with AVX-512 or AVX2. The result of a token depends on its
own sequence only, not on the batch: forward and recomputation have the same bits. The backward pass
computes the scores again, as in FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numba import njit

from r3.kernels import tiles
from r3.kernels.compiled import array, compiled, like, wide
from r3.kernels.rows import exponential, sum_of
from r3.kernels.switch import is_on
from r3.kernels.tiles import LANES, TILE, multiply

MOST_TOKENS = 4096
"""Of a sequence. Scores of 32 tokens with more than these would leave the cache."""

_MASKED = np.float32(-1e30)
"""Score of a token that comes later. Infinity would make `_exponentials` return NaN."""


@compiled
def _padded(count: Any) -> Any:
    """Round up to whole tiles."""
    return -(-count // TILE) * TILE


@compiled
def _copy(row: Any, factor: Any, out: Any) -> None:
    """Copy a row times a factor to the beginning of another."""
    if len(row) == TILE:  # a length that the compiler knows: no loop over single numbers
        for d in range(TILE):
            out[d] = like(wide(row[d]) * factor, out[d])
    else:
        for d in range(len(row)):
            out[d] = like(wide(row[d]) * factor, out[d])


@compiled
def _take(values: Any, start: Any, count: Any, head: Any, factor: Any, out: Any) -> None:
    """Copy rows of a head times a factor, and zeros up to a whole tile. out: [rows, padded D]."""
    for i in range(count):
        _copy(values[start + i, head], factor, out[i])
    out[count : _padded(count)] = 0


@compiled
def _give(rows: Any, count: Any, start: Any, head: Any, factors: Any, out: Any) -> None:
    """Copy rows, each times its factor, to a head of the tokens from `start` on."""
    for i in range(count):
        to = out[start + i, head]
        _copy(rows[i, : len(to)], factors[i], to)


@compiled
def _take_columns(values: Any, start: Any, count: Any, head: Any, out: Any) -> None:
    """Copy rows of a head as columns of tiles, with zeros. out: [tiles, padded D, 32]."""
    for t in range(0, count, TILE):
        tile, here = out[t // TILE], min(TILE, count - t)
        for i in range(here):
            for d in range(values.shape[2]):
                tile[d, i] = wide(values[start + t + i, head, d])
        tile[:, here:] = 0


@compiled
def _products(rows: Any, count: Any, columns: Any, tokens: Any, out: Any) -> None:
    """Multiply rows by the columns of all tokens up to a whole tile, into out."""
    width = rows.shape[1]
    similar, of_rows = rows, (rows.ctypes.data, width)
    for t in range(0, tokens, TILE):
        tile = columns.ctypes.data + t * width * 4, TILE, LANES
        into = out.ctypes.data + t * 4, out.shape[1]
        multiply(count, of_rows, width, tile, into, False, None, similar)


@compiled
def _weigh(weights: Any, count: Any, terms: Any, rows: Any, out: Any, adds: Any) -> None:
    """Compute weighted sums of rows. weights: address, distances between results and terms."""
    width, similar = rows.shape[1], rows
    for column in range(0, width, TILE):
        tile = rows.ctypes.data + column * 4, width, LANES
        into = out.ctypes.data + column * 4, width
        multiply(count, weights, terms, tile, into, adds, None, similar)


@njit(fastmath={"reassoc"})
def _dot(one: Any, other: Any) -> Any:
    """Sum the products of two padded rows, in an order that is always the same."""
    total = np.float32(0)
    if len(one) == TILE:
        for d in range(TILE):
            total += one[d] * other[d]
    else:
        for d in range(len(one)):
            total += one[d] * other[d]
    return total


@compiled
def _mask(scores: Any, count: Any, first: Any) -> None:
    """Mask scores of later tokens. Row i is the token first + i, a column is a token."""
    for i in range(count):
        scores[i, first + i + 1 : first + TILE] = _MASKED


@compiled
def _exponentials(scores: Any, largest: Any) -> None:
    """Replace scores by exp(score - largest): 0 for masked ones, NaN for NaN and infinity."""
    zero, least = np.float32(0), np.float32(-87)
    for t in range(len(scores)):
        value = scores[t] - largest
        found = exponential(value)
        scores[t] = (zero if value < least else found) + (value - value)


@compiled
def _largest(scores: Any) -> Any:
    """Return the largest score, of at least one. A NaN may count as anything.

    The bits of a float32, as an integer, have its order if those of negative numbers are flipped.
    """
    largest, flip, sign = np.int32(-(2**31)), np.int32(2**31 - 1), np.int32(31)
    integers = scores.view(np.int32)
    for t in range(len(integers)):
        bits = integers[t]
        ordered = np.int32(bits ^ np.int32(np.int32(bits >> sign) & flip))
        largest = np.int32(max(largest, ordered))  # without the cast, a loop of single numbers
    return np.int32(largest ^ np.int32(np.int32(largest >> sign) & flip)).view(np.float32)


@compiled
def _forward(
    query: Any, key: Any, value: Any, borders: Any, scale: Any, out: Any, lse: Any
) -> None:
    heads, (key_heads, width) = query.shape[1], value.shape[1:]
    group, of_keys, of_values = heads // key_heads, _padded(query.shape[2]), _padded(width)
    longest, one, number = _padded(np.diff(borders).max()), np.float32(1), np.float32
    queries, values = np.zeros((TILE, of_keys), number), np.zeros((longest, of_values), number)
    keys = np.zeros((longest // TILE, of_keys, TILE), number)
    scores, sums = np.empty((TILE, longest), number), np.empty((TILE, of_values), number)
    inverses = np.empty(TILE, number)
    for s in range(len(borders) - 1):
        start, length = borders[s], borders[s + 1] - borders[s]
        for head in range(heads):
            if head % group == 0:
                _take_columns(key, start, length, head // group, keys)
                _take(value, start, length, head // group, one, values)
            for first in range(0, length, TILE):
                count, seen = min(TILE, length - first), first + TILE
                _take(query, start + first, count, head, scale[0], queries)
                _products(queries, count, keys, seen, scores)
                _mask(scores, count, first)
                for i in range(count):
                    largest = _largest(scores[i, :seen])
                    _exponentials(scores[i, :seen], largest)
                    total = sum_of(scores[i, :seen])
                    lse[start + first + i, head] = largest + np.log(total)
                    inverses[i] = one / total
                weights = scores.ctypes.data, longest, 1
                _weigh(weights, count, min(seen, length), values, sums, False)
                _give(sums, count, start + first, head, inverses, out)


@compiled
def _backward(
    query: Any,
    key: Any,
    value: Any,
    borders: Any,
    scale: Any,
    out: Any,
    lse: Any,
    upstream: Any,
    d_query: Any,
    d_key: Any,
    d_value: Any,
) -> None:
    heads, size, (key_heads, width) = query.shape[1], query.shape[2], value.shape[1:]
    group, of_keys, of_values = heads // key_heads, _padded(size), _padded(width)
    longest, one, number = _padded(np.diff(borders).max()), np.float32(1), np.float32
    queries, d_queries = np.zeros((TILE, of_keys), number), np.zeros((TILE, of_keys), number)
    ups, outs = np.zeros((TILE, of_values), number), np.zeros((TILE, of_values), number)
    ones, scales = np.ones(longest, number), np.full(TILE, scale[0], number)
    keys, d_keys = np.zeros((longest, of_keys), number), np.zeros((longest, of_keys), number)
    d_values = np.zeros((longest, of_values), number)
    key_columns = np.zeros((longest // TILE, of_keys, TILE), number)
    value_columns = np.zeros((longest // TILE, of_values, TILE), number)
    scores, d_scores = np.empty((TILE, longest), number), np.empty((TILE, longest), number)
    for s in range(len(borders) - 1):
        start, length = borders[s], borders[s + 1] - borders[s]
        for head in range(heads):
            if head % group == 0:
                _take(key, start, length, head // group, one, keys)
                _take_columns(key, start, length, head // group, key_columns)
                _take_columns(value, start, length, head // group, value_columns)
                d_keys[:length], d_values[:length] = 0, 0
            for first in range(0, length, TILE):
                count, seen = min(TILE, length - first), first + TILE
                tokens = min(seen, length)
                _take(query, start + first, count, head, scale[0], queries)
                _take(upstream, start + first, count, head, one, ups)
                _take(out, start + first, count, head, one, outs)
                _products(queries, count, key_columns, seen, scores)
                _products(ups, count, value_columns, seen, d_scores)
                _mask(scores, count, first)
                for i in range(count):
                    row = start + first + i
                    _exponentials(scores[i, :seen], lse[row, head])
                    mean = _dot(ups[i], outs[i])
                    for t in range(seen):
                        d_scores[i, t] = scores[i, t] * (d_scores[i, t] - mean)
                by_token = scores.ctypes.data, 1, longest
                _weigh(by_token, tokens, count, ups, d_values, True)
                by_token = d_scores.ctypes.data, 1, longest
                _weigh(by_token, tokens, count, queries, d_keys, True)
                by_query = d_scores.ctypes.data, longest, 1
                _weigh(by_query, count, tokens, keys, d_queries, False)
                _give(d_queries, count, start + first, head, scales, d_query)
            if head % group == group - 1:
                _give(d_keys, length, start, head // group, ones, d_key)
                _give(d_values, length, start, head // group, ones, d_value)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        borders: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[2])
        lse = torch.empty(query.shape[:2])
        _forward(*map(array, (query, key, value, borders, scale, out, lse)))
        ctx.save_for_backward(query, key, value, borders, scale, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        saved, (d_out,) = ctx.saved_tensors, upstream
        d_out = d_out.contiguous()  # an array does not keep its tensor
        gradients = [torch.empty_like(tensor) for tensor in saved[:3]]
        _backward(*map(array, (*saved, d_out, *gradients)))
        return *gradients, None, None


def is_faster(query: torch.Tensor, longest: int) -> bool:
    """Whether to use `attend`: float32 or bfloat16 on CPU, with what loops need."""
    is_here = query.device.type == "cpu" and tiles.can_compute(query.dtype)
    return is_on("attention") and is_here and longest <= MOST_TOKENS


def prepare(dtype: torch.dtype) -> None:
    """Compile the loops for a data type, or load them. Otherwise the first step would."""
    tokens = torch.zeros(1, 1, TILE, dtype=dtype, requires_grad=True)
    attend(tokens, tokens, tokens, [1], 1.0).sum().backward()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Return causal attention within each sequence, [t, h, dv], of the queries' type.

    Query head i reads key head i // (h / g).

    Args:
        query: [t, h, d]. key: [t, g, d]. value: [t, g, dv].
        lengths: of the sequences, t in all.
        scale: factor of the scores.
    """
    tokens, heads, size = query.shape
    shapes = query.shape, key.shape, value.shape
    assert key.shape[::2] == (tokens, size) and value.shape[:2] == key.shape[:2], shapes
    assert heads % key.shape[1] == 0, shapes
    assert sum(lengths) == tokens and min(lengths) >= 0, (lengths, tokens)
    assert query.dtype == key.dtype == value.dtype, (query.dtype, key.dtype, value.dtype)
    borders = torch.tensor([0, *accumulate(lengths)])
    # An array, because Numba would compute in float64 with a number of Python.
    factor = torch.tensor([scale], dtype=torch.float32)
    qkv = (x.contiguous() for x in (query, key, value))
    return _Causal.apply(*qkv, borders, factor)
