"""Experts of an engine on CPU: what vLLM's kernel computes, with weights that are asked for early.

An engine that samples multiplies a few tokens by all the weights of a layer, and mostly waits for
these. vLLM's kernel (0.30, csrc/cpu/cpu_fused_moe.cpp) reads a weight when it needs it. Here, while
tokens are multiplied by one tile of weights, the processor already brings the next one into its
cache. Every sum has the terms and the order of vLLM's, so that the bits are the same.

One thread runs the loop, on processors with AVX-512: vLLM's build for others has another
exponential function. The function at the end checks sizes and types, the loop experts' numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from r3.runtime.compiled import compiled, like, wide

LANES = 16
"""Columns of weights that lie beside each other, and numbers in a register."""
TILE = 2 * LANES
"""Columns of a tile, which vLLM asks experts' sizes to be multiples of."""
ROWS = 8
"""Tokens that are multiplied by a tile at once: two registers of sums each."""


# --- what Numba has no words for ----------------------------------------------------------------

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _BITS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)


@intrinsic
def _at(typingctx: Any, address: Any, similar: Any) -> Any:
    """Return a pointer to numbers of the type in the array `similar`."""
    pointer = types.CPointer(similar.dtype)

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(pointer))

    return pointer(types.intp, similar), build


@intrinsic
def _fused(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32 numbers, rounded once."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_FLOAT, [_FLOAT] * 3)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), values
        )

    return types.float32(types.float32, types.float32, types.float32), build


@intrinsic(prefer_literal=True)
def _multiply(
    typingctx: Any,
    rows: Any,
    tokens: Any,
    inputs: Any,
    weights: Any,
    sums: Any,
    width: Any,
    ahead: Any,
    similar: Any,
) -> Any:
    """Multiply a constant number of tokens by a tile of weights, and ask for memory meanwhile.

    Args:
        rows: number of tokens, a literal.
        tokens: address of their float32 numbers, one token after the other.
        inputs: numbers of a token.
        weights: address of the tile, [2, inputs, 16].
        sums: address of the float32 results, 32 for each token.
        width: numbers from one token's results to the next one's.
        ahead: address of the memory to ask for, as much as the tile's.
        similar: array of the weights' type.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    count, is_float = rows.literal_value, similar.dtype == types.float32
    size = 4 if is_float else 2
    signature = types.void(rows, *[types.intp] * 6, similar)

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, tokens, inputs, weights, sums, width, ahead, _ = values
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), _INT32, _INT32, _INT32])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, into the second-level cache, of data
        how = [ir.Constant(_INT32, number) for number in (0, 2, 1)]

        def number(value: int) -> Any:
            return ir.Constant(_INT64, value)

        def pointer(address: Any, offset: Any, to: Any) -> Any:
            return builder.inttoptr(builder.add(address, offset), to.as_pointer())

        half = builder.mul(inputs, number(LANES * size))
        before, loop, after = (
            builder.block,
            builder.append_basic_block("inputs"),
            builder.append_basic_block("results"),
        )
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(_INT64)
        step.add_incoming(number(0), before)
        totals = [builder.phi(_VECTOR) for _ in range(2 * count)]
        for total in totals:
            total.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
        offset = builder.mul(step, number(LANES * size))
        factors = []
        for column in (offset, builder.add(offset, half)):
            builder.call(fetch, [pointer(ahead, column, ir.IntType(8)), *how])
            stored = _VECTOR if is_float else ir.VectorType(ir.IntType(16), LANES)
            loaded = builder.load(pointer(weights, column, stored), align=size)
            if not is_float:  # bfloat16 is the upper half of a float32
                bits = builder.zext(loaded, _BITS)
                bits = builder.shl(bits, ir.Constant(_BITS, [16] * LANES))
                loaded = builder.bitcast(bits, _VECTOR)
            factors.append(loaded)
        nothing, same = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_BITS, [0] * LANES)
        added = []
        for row in range(count):
            offset = builder.add(builder.mul(inputs, number(row)), step)
            value = builder.load(pointer(tokens, builder.mul(offset, number(4)), _FLOAT), align=4)
            value = builder.insert_element(nothing, value, ir.Constant(_INT32, 0))
            value = builder.shuffle_vector(value, nothing, same)
            for factor, total in zip(factors, totals[2 * row : 2 * row + 2], strict=True):
                added.append(builder.call(fused, [value, factor, total]))
        following = builder.add(step, number(1))
        for phi, value in ((step, following), *zip(totals, added, strict=True)):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, inputs), loop, after)
        builder.position_at_end(after)
        for i, total in enumerate(added):
            offset = builder.add(builder.mul(width, number(i // 2)), number(i % 2 * LANES))
            builder.store(total, pointer(sums, builder.mul(offset, number(4)), _VECTOR), align=4)
        return context.get_dummy_value()

    return signature, build


# --- the loop -----------------------------------------------------------------------------------


def _exponential(value: Any) -> Any:
    """Return exp(value) with the bits that vLLM's kernel has."""


@overload(_exponential, strict=False)
def _exponential_compiled(value: Any) -> Any:
    # The approximation of ATen's `exp_u20` (aten/src/ATen/cpu/vec/vec512/vec512_float.h), which
    # vLLM has too. Its constants decide the last bits.
    one, half, two, log2_e = (np.float32(number) for number in (1, 0.5, 2, 1.4426950408889634))
    log_2, least, most = (
        np.uint32(bits).view(np.float32) for bits in (0x3F317218, 0xC2AEAC50, 0x42B17218)
    )
    c1, c2, c3, c4, c5 = (
        np.float32(number)
        for number in (0.999999701, 0.499991506, 0.166676521, 0.0418978221, 0.00828929059)
    )
    bias, shift = np.int32(126), np.int32(23)

    def exponential(value: Any) -> Any:
        x = max(min(value, most), least)
        n = np.floor(_fused(x, log2_e, half))
        rest = _fused(-n, log_2, x)
        series = _fused(rest, _fused(rest, _fused(rest, _fused(rest, c5, c4), c3), c2), c1)
        # 2^n may be too large for a number where exp(x) is not.
        power = np.int32((np.int32(n) + bias) << shift).view(np.float32)
        found = _fused(rest, series, one) * power * two
        return np.float32(0) if value < least else found

    return exponential


@compiled
def _product(
    tokens: Any,
    inputs: Any,
    weights: Any,
    sums: Any,
    width: Any,
    count: Any,
    following: Any,
    similar: Any,
) -> None:
    """Multiply `count` tokens by a packed weight, [width / 16, inputs, 16]; all are addresses.

    `following` is the address of what is read after it.
    """
    tile = TILE * inputs * similar.itemsize
    for column in range(0, width, TILE):
        ahead = weights + tile if column + TILE < width else following
        of_tokens, of_sums = tokens, sums + column * 4
        for left in range(count, 0, -ROWS):
            if left >= ROWS:
                _multiply(8, of_tokens, inputs, weights, of_sums, width, ahead, similar)
            elif left == 1:
                _multiply(1, of_tokens, inputs, weights, of_sums, width, ahead, similar)
            elif left == 2:
                _multiply(2, of_tokens, inputs, weights, of_sums, width, ahead, similar)
            elif left == 3:
                _multiply(3, of_tokens, inputs, weights, of_sums, width, ahead, similar)
            elif left == 4:
                _multiply(4, of_tokens, inputs, weights, of_sums, width, ahead, similar)
            elif left == 5:
                _multiply(5, of_tokens, inputs, weights, of_sums, width, ahead, similar)
            elif left == 6:
                _multiply(6, of_tokens, inputs, weights, of_sums, width, ahead, similar)
            else:
                _multiply(7, of_tokens, inputs, weights, of_sums, width, ahead, similar)
            of_tokens += ROWS * inputs * 4
            of_sums += ROWS * width * 4
        weights += tile


@compiled
def _activate(both: Any, inner: Any, count: Any, stored: Any) -> None:
    """Compute silu(gate) * up of the first rows, rounded to the type of `stored`."""
    width = inner.shape[1]
    for row in range(count):
        for f in range(width):
            gate, up = both[row, f], both[row, width + f]
            sigmoid = np.float32(1) / (np.float32(1) + _exponential(-gate))
            inner[row, f] = wide(like(up * (gate * sigmoid), stored))


@compiled
def _experts(addresses: Any, sizes: Any, similar: Any) -> None:
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
    tokens, out = carray(_at(at_tokens, similar), (N, D)), carray(_at(at_out, similar), (N, D))
    outputs = np.empty((N * K, D), np.float32)  # in the order of experts
    gates = carray(_at(at_gates, outputs), (N, K))
    slots, places = np.empty(N * K, np.int32), np.empty((N, K), np.int32)
    ends = np.zeros(E + 1, np.int32)
    chosen = carray(_at(at_chosen, ends), (N, K))
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
                    total[d] = _fused(of_slot[d], gate, total[d])
        token = out[n]
        for d in range(D):
            token[d] = like(total[d], stored)


# --- the same for tensors -----------------------------------------------------------------------


_SIMILAR = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}


def can_compute(dtype: torch.dtype) -> bool:
    """Whether `experts` computes with such weights here: one thread, AVX-512."""
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_wide and torch.get_num_threads() == 1 and dtype in _SIMILAR


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
    _experts(addresses, (N, K, E, D, F), _SIMILAR[dtype])
    return out_ND
