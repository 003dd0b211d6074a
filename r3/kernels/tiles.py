"""Multiply rows by a tile of weights on CPU while the next tile is prefetched.

An engine that samples multiplies a few tokens by all weights and by all keys and values of their
conversations, and mostly waits for these. vLLM's kernels read them when they need them. Here the
processor brings the next tile into its cache while rows are multiplied by this one. With AVX-512,
sums have the terms and the order of vLLM's, so that the bits are the same. vLLM's kernels for other
processors have another exponential function and truncate results where these round to the nearest
bfloat16.

One thread runs the loops, on processors with AVX-512 or AVX2.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from r3.kernels.compiled import compiled

IS_WIDE: bool = get_host_cpu_features().get("avx512f", False)
"""Whether the processor has AVX-512: registers of 16 numbers instead of 8, and 32 of them instead
of 16. Not whether torch uses it: machine code on disk is found again by the processor alone."""
IS_USED = torch.backends.cpu.get_cpu_capability() == ("AVX512" if IS_WIDE else "AVX2")
"""Whether torch uses all of it: not on processors without AVX2, nor with ATEN_CPU_CAPABILITY."""
LANES = 16 if IS_WIDE else 8
"""Numbers in a register."""
TILE = 2 * LANES
"""Columns of a tile."""
ROWS = 8 if IS_WIDE else 6
"""Rows that are multiplied by a tile at once: two registers of sums each."""

SIMILAR = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}
"""Array of each type that a tile may have."""


_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _BITS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)


def can_compute(dtype: torch.dtype) -> bool:
    """Whether loops compute with such tiles here: one thread, AVX-512 or AVX2."""
    return IS_USED and torch.get_num_threads() == 1 and dtype in SIMILAR


@intrinsic
def at(typingctx, address, similar):
    """Return a pointer to numbers of the type in the array `similar`."""
    pointer = types.CPointer(similar.dtype)

    def build(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(pointer))

    return pointer(types.intp, similar), build


@intrinsic
def fused(typingctx, a, b, c):
    """Return a * b + c of float32 numbers, rounded once."""

    def build(context, builder, signature, values):
        kind = ir.FunctionType(_FLOAT, [_FLOAT] * 3)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), values
        )

    return types.float32(types.float32, types.float32, types.float32), build


def exponential(value):
    """Return exp(value) with the bits that vLLM's kernels for AVX-512 have."""


@overload(exponential, strict=False)
def _exponential_compiled(value):
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

    def exponential(value):
        x = max(min(value, most), least)
        n = np.floor(fused(x, log2_e, half))
        rest = fused(-n, log_2, x)
        series = fused(rest, fused(rest, fused(rest, fused(rest, c5, c4), c3), c2), c1)
        # 2^n may be too large for a number where exp(x) is not.
        power = np.int32((np.int32(n) + bias) << shift).view(np.float32)
        found = fused(rest, series, one) * power * two
        return np.float32(0) if value < least else found

    return exponential


@intrinsic(prefer_literal=True)
def _multiply(typingctx, count, rows, inputs, tile, sums, adds, ahead, similar):
    """Compute `multiply` for a number of rows that is a literal."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    number_of_rows, is_float = count.literal_value, similar.dtype == types.float32
    size = 4 if is_float else 2
    two, three = (types.UniTuple(types.intp, n) for n in (2, 3))
    signature = types.void(count, two, types.intp, three, two, types.boolean, two, similar)

    def build(context, builder, signature, values):
        _, rows, inputs, tile, sums, adds, ahead, _ = values
        (row, width), (column, step, half), (total, wide) = (
            cgutils.unpack_tuple(builder, each) for each in (rows, tile, sums)
        )
        kind, name = ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        multiplied = cgutils.get_or_insert_function(builder.module, kind, name)
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), _INT32, _INT32, _INT32])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, into the second-level cache, of data
        how = [ir.Constant(_INT32, number) for number in (0, 2, 1)]

        def number(value):
            return ir.Constant(_INT64, value)

        def pointer(address, index, of, bytes_of):
            offset = builder.mul(index, number(bytes_of))
            return builder.inttoptr(builder.add(address, offset), of.as_pointer())

        places = [  # of the sums
            pointer(total, builder.add(builder.mul(wide, number(i)), number(lane)), _VECTOR, 4)
            for i in range(number_of_rows)
            for lane in (0, LANES)
        ]
        zeros = ir.Constant(_VECTOR, [0.0] * LANES)
        is_adding = builder.trunc(adds, ir.IntType(1))
        starts = [
            builder.select(is_adding, builder.load(place, align=4), zeros) for place in places
        ]
        before, loop, after = (
            builder.block,
            builder.append_basic_block("inputs"),
            builder.append_basic_block("results"),
        )
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(_INT64)
        index.add_incoming(number(0), before)
        totals = [builder.phi(_VECTOR) for _ in places]
        for phi, start in zip(totals, starts, strict=True):
            phi.add_incoming(start, before)
        factors = []
        stored = _VECTOR if is_float else ir.VectorType(ir.IntType(16), LANES)
        for lane in (0, 1):
            if IS_WIDE or lane == 0:  # at most 64 bytes with AVX2: one line
                fetched, stride = cgutils.unpack_tuple(builder, ahead)
                asked = builder.add(builder.mul(index, stride), number(lane * LANES))
                builder.call(fetch, [pointer(fetched, asked, ir.IntType(8), size), *how])
            place = builder.add(builder.mul(index, step), builder.mul(half, number(lane)))
            loaded = builder.load(pointer(column, place, stored, size), align=size)
            if not is_float:  # bfloat16 is the upper half of a float32
                bits = builder.zext(loaded, _BITS)
                bits = builder.shl(bits, ir.Constant(_BITS, [16] * LANES))
                loaded = builder.bitcast(bits, _VECTOR)
            factors.append(loaded)
        nothing, same = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_BITS, [0] * LANES)
        added = []
        for i in range(number_of_rows):
            place = builder.add(builder.mul(width, number(i)), index)
            value = builder.load(pointer(row, place, _FLOAT, 4), align=4)
            value = builder.insert_element(nothing, value, ir.Constant(_INT32, 0))
            value = builder.shuffle_vector(value, nothing, same)
            for factor, phi in zip(factors, totals[2 * i : 2 * i + 2], strict=True):
                added.append(builder.call(multiplied, [value, factor, phi]))
        following = builder.add(index, number(1))
        for phi, value in ((index, following), *zip(totals, added, strict=True)):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, inputs), loop, after)
        builder.position_at_end(after)
        for value, place in zip(added, places, strict=True):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    return signature, build


@compiled
def multiply(count, rows, inputs, tile, sums, adds, ahead, similar):
    """Multiply rows by a tile of `inputs` times 32 weights, and ask for memory meanwhile.

    With AVX2, read 16 for 32 and 8 for 16 here.

    Distances are in numbers, addresses in bytes.

    Args:
        count: number of rows.
        rows: address of their numbers, and distance from one row to the next.
        inputs: numbers of a row, at least 1.
        tile: address, distance from one input's weights to the next, and from the first 16 of its
            weights to the other 16.
        sums: address of the float32 results, 32 for each row, and distance from row to row.
        adds: whether to add to them what they are.
        ahead: address of the memory to ask for, 32 numbers per input, and distance between these.
        similar: array of the weights' type. Rows are float32.
    """
    row, (total, wide), left = rows[0], sums, count
    while left > 0:  # few sizes, because each is compiled for itself
        of, to = (row, rows[1]), (total, wide)
        if left >= ROWS:
            done = ROWS
            _multiply(ROWS, of, inputs, tile, to, adds, ahead, similar)
        elif left >= 4:
            done = 4
            _multiply(4, of, inputs, tile, to, adds, ahead, similar)
        elif left >= 2:
            done = 2
            _multiply(2, of, inputs, tile, to, adds, ahead, similar)
        else:
            done = 1
            _multiply(1, of, inputs, tile, to, adds, ahead, similar)
        row += done * rows[1] * 4
        total += done * wide * 4
        left -= done
