"""The engine's experts on CPU, with prefetched weights: computes what vLLM's kernel computes.

vLLM's kernel (0.30, csrc/cpu/cpu_fused_moe.cpp) reads a weight when it needs it; `tiles` says what
differs here. The function at the end checks sizes and types, the loop checks expert ids.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray

from r3.kernels.compiled import compiled, inlined, like, wide
from r3.kernels.tiles import LANES, SIMILAR, TILE, at, exponential, fused, multiply

_PACKED = 16  # weights of an input that follow each other, whatever the processor's registers are


@inlined
def _product(tokens, inputs, weights, sums, width, count, following, similar):
    """Multiply `count` tokens by a packed weight, [width / 16, inputs, 16]; all are addresses.

    `following` is the address of what is read after it.
    """
    size = TILE * inputs * similar.itemsize
    for column in range(0, width, TILE):
        ahead = weights + size if column + TILE < width else following
        half = _PACKED * inputs if LANES == _PACKED else LANES
        tile, of_sums = (weights, _PACKED, half), (sums + column * 4, width)
        multiply(count, (tokens, inputs), inputs, tile, of_sums, False, (ahead, TILE), similar)
        weights += size


@compiled
def _activate(both, inner, count, stored):
    """Compute silu(gate) * up of the first rows, rounded to the type of `stored`."""
    width = inner.shape[1]
    for row in range(count):
        for f in range(width):
            gate, up = both[row, f], both[row, width + f]
            sigmoid = np.float32(1) / (np.float32(1) + exponential(-gate))
            inner[row, f] = wide(like(up * (gate * sigmoid), stored))


@compiled
def _experts(addresses, sizes, similar):
    """Compute `experts`.

    Args:
        addresses: of its tensors, in their order.
        sizes: N, K, E, D, F.
        similar: array of the type of tokens and weights.
    """
    at_tokens, w13, w2, at_gates, at_chosen, at_out = addresses
    N, K, E, D, F = sizes
    if not N:
        return
    tokens, out = carray(at(at_tokens, similar), (N, D)), carray(at(at_out, similar), (N, D))
    outputs = np.empty((N * K, D), np.float32)  # in the order of experts
    gates = carray(at(at_gates, outputs), (N, K))
    slots, places = np.empty(N * K, np.int32), np.empty((N, K), np.int32)
    ends = np.zeros(E + 1, np.int32)
    chosen = carray(at(at_chosen, ends), (N, K))
    size, stored = similar.itemsize, tokens[0, 0]  # of the type that is stored

    for n in range(N):
        for k in range(K):
            if chosen[n, k] < 0 or chosen[n, k] >= E:
                raise IndexError("an expert that the layer does not have")
            ends[chosen[n, k] + 1] += 1
    most = ends.max()  # slots of one expert
    rows = np.empty((most, D), np.float32)
    both, inner = np.empty((most, 2 * F), np.float32), np.empty((most, F), np.float32)
    for expert in range(E):
        ends[expert + 1] += ends[expert]
    for n in range(N):
        for k in range(K):
            place = ends[chosen[n, k]]
            ends[chosen[n, k]] += 1
            slots[place], places[n, k] = n, place

    begin, of_w13, of_w2 = 0, 2 * F * D * size, D * F * size
    for expert in range(E):
        end = ends[expert]  # by now, of this expert
        count = end - begin
        if not count:
            continue
        for row in range(count):
            token, numbers = tokens[slots[begin + row]], rows[row]
            for d in range(D):
                numbers[d] = wide(token[d])
        following = expert + 1
        while following < E and ends[following] == end:
            following += 1
        w13_here, w2_here = w13 + expert * of_w13, w2 + expert * of_w2
        w13_next = w13 + following % E * of_w13
        _product(rows.ctypes.data, D, w13_here, both.ctypes.data, 2 * F, count, w2_here, similar)
        _activate(both, inner, count, stored)
        here = outputs.ctypes.data + begin * D * 4
        _product(inner.ctypes.data, F, w2_here, here, D, count, w13_next, similar)
        begin = end

    total = rows[0]
    for n in range(N):
        for k in range(K):
            of_slot, gate = outputs[places[n, k]], gates[n, k]
            if k == 0:
                for d in range(D):
                    total[d] = of_slot[d] * gate
            else:
                for d in range(D):
                    total[d] = fused(of_slot[d], gate, total[d])
        token = out[n]
        for d in range(D):
            token[d] = like(total[d], stored)


# --- the same for tensors -----------------------------------------------------------------------


def prepare(dtype: torch.dtype) -> None:
    """Compile the loop for a data type, or load it from disk. Otherwise the first step would."""
    weight = torch.zeros(1, 2 * TILE, TILE, dtype=dtype)
    gates, chosen = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    experts(weight[0, :1], weight, weight[:, :TILE], gates, chosen)


def experts(
    tokens_ND: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    gates_NK: torch.Tensor,
    experts_NK: torch.Tensor,
) -> torch.Tensor:
    """Return sum_k gate_k * w2[e_k] (silu(gate part of w13[e_k] x) * up part), [N, D].

    Args:
        tokens_ND: x, of the type of the weights.
        w13, w2: [E, 2F, D] and [E, D, F], packed by vLLM's `cpu_prepack_moe_weight` for "vec".
        gates_NK: float32.
        experts_NK: int32.

    Raises:
        AssertionError: sizes, types or strides are not these.
        IndexError: the layer has no such expert.
    """
    (E, both, D), (N, K), dtype = w13.shape, experts_NK.shape, w13.dtype
    F, out_ND = both // 2, torch.empty(tokens_ND.shape, dtype=dtype)
    tensors = tokens_ND, w13, w2, gates_NK, experts_NK, out_ND
    assert (tokens_ND.shape, w2.shape, gates_NK.shape) == ((N, D), (E, D, F), (N, K)), (
        f"sizes do not belong together: {[tuple(each.shape) for each in tensors]}"
    )
    assert D % TILE == F % TILE == both % 2 == 0, f"{D} or {F} is no multiple of {TILE}"
    assert tokens_ND.dtype == w2.dtype == dtype and gates_NK.dtype == torch.float32, (
        f"types {[each.dtype for each in tensors]}"
    )
    assert experts_NK.dtype == torch.int32, f"numbers of experts in {experts_NK.dtype}"
    assert all(map(torch.Tensor.is_contiguous, tensors)), (
        f"a tensor with gaps: strides {[each.stride() for each in tensors]}"
    )
    addresses = tuple(map(torch.Tensor.data_ptr, tensors))
    _experts(addresses, (N, K, E, D, F), SIMILAR[dtype])
    return out_ND
