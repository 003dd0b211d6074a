"""The engine's attention on CPU for sampled tokens, with prefetched keys and values.

In such a step every conversation has one new token, which looks at all tokens before it. vLLM's
kernel (0.30, csrc/cpu/cpu_attn_impl.hpp) reads keys and values when it needs them; `tiles` says
what differs here. New keys and values are stored in the same pass. Attention with a window, sinks
or other extras keeps vLLM's kernels; with AVX-512, where they have the same bits, so do steps with
prompts.

The cache is vLLM's. For each block and key head it has the keys as [size of a head, tokens], and
then the values as [tokens, size of a head]. A tile is the part of either that 32 tokens have, and
with AVX2 16.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray

from r3.kernels.compiled import compiled, like, wide
from r3.kernels.tiles import LANES, SIMILAR, TILE, at, exponential, multiply

MOST_TOKENS = 4096
"""Of a conversation, with AVX-512. vLLM's kernel divides longer ones, by the size of the
processor's cache, and then has other bits."""
_ROWS_AT_ONCE = 256
"""New tokens of prompts in one call. The list of tiles has an entry per token, head and tile."""
_AHEAD = 8
"""Tiles from the one that is used to the one that is asked for."""


@compiled
def _reading_order(cache, table, lengths, key_heads, D, block, size):
    """List the tiles in the order in which they are read.

    Args:
        cache: address.
        table: blocks of each conversation, [N, ...].
        lengths: tokens of each conversation, [N].
        size: bytes of a number.

    Returns:
        Address of each tile, and the distance from one of its rows to the next.
    """
    of_head, count = 2 * block * D, 0
    for length in lengths:
        count += 2 * key_heads * -(-length // TILE)
    tiles, distances = np.empty(count + _AHEAD, np.int64), np.empty(count + _AHEAD, np.int64)
    place = 0
    for n in range(len(lengths)):
        for head in range(key_heads):
            for t in range(0, lengths[n], TILE):
                start = (table[n, t // block] * key_heads + head) * of_head + t % block
                tiles[place], distances[place] = cache + start * size, block
                place += 1
            for t in range(0, lengths[n], TILE):
                start = (table[n, t // block] * key_heads + head) * of_head + block * D
                tiles[place], distances[place] = cache + (start + t % block * D) * size, TILE
                place += 1
    tiles[count:], distances[count:] = tiles[count - 1], TILE
    return tiles, distances


@compiled
def _softmax(scores, length, lanes):
    """Replace scores by exp(score - largest), those from `length` on by 0; return their sum.

    Args:
        scores: a multiple of `LANES`.
        lanes: memory of `LANES` numbers.
    """
    for t in range(length, len(scores)):
        scores[t] = -np.inf
    for lane in range(LANES):
        lanes[lane] = scores[lane]
    for t in range(LANES, len(scores), LANES):
        for lane in range(LANES):
            score = scores[t + lane]
            lanes[lane] = score if score > lanes[lane] else lanes[lane]
    largest = lanes[0]
    for lane in range(1, LANES):
        largest = max(largest, lanes[lane])
    for t in range(len(scores)):
        scores[t] = exponential(scores[t] - largest)
    for lane in range(LANES):
        lanes[lane] = 0
    for t in range(0, len(scores), LANES):
        for lane in range(LANES):
            lanes[lane] += scores[t + lane]
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@compiled
def _attend(addresses, distances, sizes, scale, similar):
    """Compute `attend`.

    Args:
        addresses: of its tensors, in their order, and of the result.
        distances: numbers between rows of query, key, value and table.
        sizes: N, number of heads, of key heads, size of a head, blocks, tokens of a block.
        scale: float32.
        similar: array of the type of tokens and cache.
    """
    at_query, at_key, at_value, at_cache, at_slots, at_table, at_lengths, at_out = addresses
    of_query, of_key, of_value, of_table = distances
    N, heads, key_heads, D, blocks, block = sizes
    if not N:
        return
    group, size = heads // key_heads, similar.itemsize
    ints, longs = np.empty(0, np.int32), np.empty(0, np.int64)
    lengths, slots = carray(at(at_lengths, ints), N), carray(at(at_slots, longs), N)
    table = carray(at(at_table, ints), (N, of_table))
    cache = carray(at(at_cache, similar), (blocks, key_heads, 2 * block * D))
    out = carray(at(at_out, similar), (N, heads, D))

    longest = 0
    for n in range(N):
        longest = max(longest, lengths[n])
        if lengths[n] < 1 or lengths[n] > of_table * block or slots[n] >= blocks * block:
            raise IndexError("the length or slot of a conversation is outside the cache")
        for b in range(-(-lengths[n] // block)):
            if table[n, b] < 0 or table[n, b] >= blocks:
                raise IndexError("a block number of a conversation is outside the cache")
    longest = -(-longest // TILE) * TILE
    tiles, between = _reading_order(at_cache, table, lengths, key_heads, D, block, size)

    queries, found = np.empty((group, D), np.float32), np.empty((group, D), np.float32)
    scores, lanes = np.empty((group, longest), np.float32), np.empty(LANES, np.float32)
    sums = np.empty(group, np.float32)
    place = 0
    for n in range(N):
        length = lengths[n]
        padded = -(-length // TILE) * TILE
        for head in range(key_heads):
            if slots[n] >= 0:
                stored, row = cache[slots[n] // block, head], slots[n] % block
                key = carray(at(at_key + (n * of_key + head * D) * size, similar), D)
                value = carray(at(at_value + (n * of_value + head * D) * size, similar), D)
                for d in range(D):
                    stored[d * block + row] = key[d]
                for d in range(D):
                    stored[(block + row) * D + d] = value[d]
            start = n * of_query + head * group * D
            query = carray(at(at_query + start * size, similar), (group, D))
            for g in range(group):
                for d in range(D):
                    queries[g, d] = wide(query[g, d]) * scale
            for t in range(0, padded, TILE):
                ahead = tiles[place + _AHEAD], between[place + _AHEAD]
                tile, results = (tiles[place], block, LANES), (scores.ctypes.data + t * 4, longest)
                multiply(group, (queries.ctypes.data, D), D, tile, results, False, ahead, similar)
                place += 1
            for g in range(group):
                sums[g] = _softmax(scores[g, :padded], length, lanes)
            for t in range(0, padded, TILE):
                parts, tokens = (scores.ctypes.data + t * 4, longest), min(TILE, length - t)
                for column in range(0, D, TILE):
                    distance = between[place + _AHEAD]
                    ahead = tiles[place + _AHEAD] + column * distance * size, distance
                    tile = tiles[place] + column * size, D, LANES
                    results = found.ctypes.data + column * 4, D
                    multiply(group, parts, tokens, tile, results, t > 0, ahead, similar)
                place += 1
            for g in range(group):
                inverse = np.float32(1) / sums[g]
                for d in range(D):
                    out[n, head * group + g, d] = like(found[g, d] * inverse, query[0, 0])


def prepare(dtype: torch.dtype) -> None:
    """Compile the loop for a data type, or load it from disk. Otherwise the first step would."""
    row, cache = (
        torch.zeros(1, 1, TILE, dtype=dtype),
        torch.zeros(1, 1, TILE, 2 * TILE, dtype=dtype),
    )
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    attend(row, row, row, cache, torch.zeros(1, dtype=torch.int64), table, lengths, 1.0)


def attend(
    query_NHD: torch.Tensor,
    key_NGD: torch.Tensor,
    value_NGD: torch.Tensor,
    cache: torch.Tensor,
    slots_N: torch.Tensor,
    table: torch.Tensor,
    lengths_N: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Store new keys and values in the cache; return softmax(scale * q k^T) v, [N, H, D].

    Head h reads keys and values of key head h // (H / G).

    Args:
        query_NHD, key_NGD, value_NGD: of the new token of each conversation.
        cache: [blocks, G, tokens of a block, 2 * D], as vLLM's kernels for "vec" fill it.
        slots_N: where the new tokens belong: block * tokens of a block + place in the block, int64.
            Nothing is stored for -1.
        table: blocks of each conversation, int32, in the order of its tokens.
        lengths_N: tokens of each conversation, the new one included, int32.
        scale: of the scores.

    Raises:
        AssertionError: sizes, types or strides are not these.
        IndexError: a length, a slot or a block number is outside the cache.
    """
    (N, H, D), (blocks, G, block, both), dtype = query_NHD.shape, cache.shape, cache.dtype
    out_NHD, row = torch.empty(N, H, D, dtype=dtype), (N, G, D)
    tensors = query_NHD, key_NGD, value_NGD, cache, slots_N, table, lengths_N
    strides = [each.stride() for each in tensors]
    (of_query, *query), (of_key, *key), (of_value, *value), *_, (of_table, column), _ = strides
    sizes = key_NGD.shape, value_NGD.shape, slots_N.shape, lengths_N.shape, len(table), both
    assert sizes == (row, row, (N,), (N,), N, 2 * D) and H % G == 0, (
        f"sizes do not belong together: {[tuple(each.shape) for each in tensors]}"
    )
    assert D % TILE == block % TILE == 0, f"{D} or {block} is no multiple of {TILE}"
    types = [each.dtype for each in tensors]
    assert types == [dtype] * 4 + [torch.int64, torch.int32, torch.int32], f"types {types}"
    is_dense = (column, *strides[4], *strides[6]) == (1, 1, 1) and cache.is_contiguous()
    assert query == key == value == [D, 1] and is_dense, (
        f"a row or a cache with gaps: strides {strides}"
    )
    _attend(
        tuple([each.data_ptr() for each in (*tensors, out_NHD)]),
        (of_query, of_key, of_value, of_table),
        (N, H, G, D, blocks, block),
        np.float32(scale),
        SIMILAR[dtype],
    )
    return out_NHD


def attend_prompts(
    query_NHD: torch.Tensor,
    key_NGD: torch.Tensor,
    value_NGD: torch.Tensor,
    cache: torch.Tensor,
    slots_N: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute `attend` of conversations that have any number of new tokens each.

    Each new token counts as the last one of a conversation of its own. Its key and value are stored
    before the next token looks at them, so that its result has the bits of a sampled token's.

    Args:
        query_NHD, key_NGD, value_NGD, slots_N: of all new tokens, one conversation after another.
        cache, scale: as `attend`.
        starts: first new token of each conversation, and after the last the number of all, int32.
        table: blocks of each conversation, int32.
        lengths: tokens of each conversation, the new ones included, int32.

    Raises:
        AssertionError, IndexError: as `attend`.
    """
    conversations = torch.arange(len(lengths)).repeat_interleave(starts.diff())
    after_N = starts[1:][conversations] - torch.arange(1, len(slots_N) + 1, dtype=torch.int32)
    lengths_N, parts = lengths[conversations] - after_N, [query_NHD[:0]]
    for first in range(0, len(slots_N), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        new = query_NHD[rows], key_NGD[rows], value_NGD[rows], cache, slots_N[rows]
        parts.append(attend(*new, table[conversations[rows]], lengths_N[rows], scale))
    return torch.cat(parts)
