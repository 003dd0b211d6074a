"""Kernels for CPU in one pass over memory: norms, rotations, what an expert does between products.

torch has an operator for each step (conversion, silu, product, sum), and the numbers leave the
processor's cache between two operators. Here Numba, which vLLM installs, compiles one loop for all
steps. It compiles a loop at its first call, in less than a second, and keeps the machine code on
disk for the next process.

As in `r3.kernels.moe`, loops compute in float32 or float64 and round results once. Norms and
rotations round their first product too, as transformers does. Every sum has a fixed order: the same
row has the same bits in any batch. One thread runs a loop.

The loops check no index, so that the functions at the end of this file check shapes, and
`add_rows_loop` and `take_rows_loop` their rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from r3.kernels.compiled import array, compiled, like, wide
from r3.kernels.switch import is_on

# --- exponential and logistic function ----------------------------------------------------------


def exponential(value: Any) -> Any:
    """Return exp(value), in float32 for values from -87 to 87; others count as these."""


@overload(exponential, strict=False)
def _exponential_compiled(value: Any) -> Any:
    if value == types.float64:
        return lambda value: math.exp(value)

    # A call of the C library's exp would keep the loop from working on many numbers at once.
    # exp(x) = 2^n exp(r) with |r| <= log(2) / 2, and Taylor's series for exp(r): the rest after
    # r^7 / 7! is below 2^-27.
    one, half, log2_e = np.float32(1), np.float32(0.5), np.float32(1 / math.log(2))
    # log(2) in two parts: n times the first is exact.
    high = np.float32(0.693359375)
    low = np.float32(math.log(2) - 0.693359375)
    largest, bias, shift = np.float32(87), np.int32(127), np.int32(23)
    c2, c3, c4, c5, c6, c7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))

    def fast(value: Any) -> Any:
        x = min(max(value, -largest), largest)
        n = np.floor(x * log2_e + half)
        r = (x - n * high) - n * low
        series = ((((c7 * r + c6) * r + c5) * r + c4) * r + c3) * r + c2
        power = np.int32((np.int32(n) + bias) << shift).view(np.float32)
        return (series * r * r + r + one) * power

    return fast


def sigmoids(value: Any) -> Any:
    """Return 1 / (1 + exp(-value)) and 1 minus that."""


@overload(sigmoids, strict=False)
def _sigmoids_compiled(value: Any) -> Any:
    one = np.float64(1) if value == types.float64 else np.float32(1)

    def sigmoids(value: Any) -> Any:
        sigmoid = one / (one + exponential(-value))
        return sigmoid, one - sigmoid

    return sigmoids


# --- the loops ----------------------------------------------------------------------------------


@compiled
def weighted_swiglu_loop(both: Any, gates: Any, inner: Any) -> None:
    rows, width = inner.shape
    for row in range(rows):
        weight = gates[row]
        for column in range(width):
            gate, up = wide(both[row, column]), wide(both[row, width + column])
            swish = gate * sigmoids(gate)[0]
            inner[row, column] = like(swish * up * weight, inner[row, column])


@njit(fastmath={"reassoc"})
def sum_of(values: Any) -> Any:
    """Add numbers in an order in which the processor adds several at once, always the same."""
    total = values.dtype.type(0)
    for i in range(len(values)):
        total += values[i]
    return total


@compiled
def weighted_swiglu_backward_loop(
    both: Any, gates: Any, d_inner: Any, inner: Any, d_both: Any, d_gates: Any
) -> None:
    rows, width = inner.shape
    terms = np.empty(width, gates.dtype)
    for row in range(rows):
        weight = gates[row]
        for column in range(width):
            gate, up = wide(both[row, column]), wide(both[row, width + column])
            upstream = wide(d_inner[row, column])
            sigmoid, rest = sigmoids(gate)
            swish = gate * sigmoid
            product = swish * up
            terms[column] = upstream * product
            d_product = upstream * weight
            # d silu = sigmoid * (1 + gate * (1 - sigmoid)) = sigmoid + swish * (1 - sigmoid)
            d_gate = d_product * up * (sigmoid + swish * rest)
            inner[row, column] = like(product * weight, inner[row, column])
            d_both[row, column] = like(d_gate, d_both[row, column])
            d_both[row, width + column] = like(d_product * swish, d_both[row, column])
        d_gates[row] = sum_of(terms)


@compiled
def _norm(x: Any, weight: Any, eps: Any, out: Any, scale: Any) -> None:
    rows, width = x.shape
    squares = np.empty(width, scale.dtype)
    count, one = scale.dtype.type(width), scale.dtype.type(1)
    for row in range(rows):
        for column in range(width):
            value = wide(x[row, column])
            squares[column] = value * value
        factor = one / np.sqrt(sum_of(squares) / count + eps[0])
        scale[row] = factor
        for column in range(width):
            normed = wide(like(wide(x[row, column]) * factor, x[row, column]))
            out[row, column] = like(normed * wide(weight[column]), x[row, column])


@compiled
def _norm_backward(x: Any, weight: Any, scale: Any, gradient: Any, d_x: Any, d_weight: Any) -> None:
    rows, width = x.shape
    terms = np.empty(width, scale.dtype)
    count = scale.dtype.type(width)
    for row in range(rows):
        factor = scale[row]
        for column in range(width):
            product = wide(gradient[row, column]) * (wide(x[row, column]) * factor)
            d_weight[column] += product
            terms[column] = product * wide(weight[column])
        mean = sum_of(terms) / count
        for column in range(width):
            normed = wide(x[row, column]) * factor
            d_normed = wide(gradient[row, column]) * wide(weight[column])
            d_x[row, column] = like((d_normed - normed * mean) * factor, x[row, column])


@compiled
def _rotate(x: Any, cos: Any, sin: Any, way: Any, out: Any) -> None:
    tokens, heads, width = x.shape
    half = width // 2
    for token in range(tokens):
        for head in range(heads):
            for column in range(half):
                one, other = x[token, head, column], x[token, head, half + column]
                for at, value, swapped in ((column, one, other), (half + column, other, one)):
                    first = wide(like(wide(value) * wide(cos[token, 0, at]), value))
                    second = way[0] * wide(swapped) * wide(sin[token, 0, at])
                    out[token, head, at] = like(first + second, value)


@compiled
def add_rows_loop(total: Any, rows: Any, values: Any) -> None:
    count, width = values.shape
    for i in range(count):
        row = rows[i]
        if row < 0 or row >= len(total):
            raise IndexError("a row that the total does not have")
        for column in range(width):
            total[row, column] += wide(values[i, column])


@compiled
def take_rows_loop(values: Any, rows: Any, out: Any) -> None:
    count, width = len(out), values.shape[1]
    for i in range(count):
        row = rows[i]
        if row < 0 or row >= len(values):
            raise IndexError("a row that the values do not have")
        for column in range(width):
            out[i, column] = values[row, column]


# --- the same for tensors -----------------------------------------------------------------------


def is_faster(tensor: torch.Tensor, name: str) -> bool:
    """Whether to use a function: on CPU with one thread. torch's operators use all threads."""
    return is_on(name) and tensor.device.type == "cpu" and torch.get_num_threads() == 1


def prepare(dtype: torch.dtype) -> None:
    """Compile the loops for a model's data type, or load them from disk.

    Otherwise the first step would. Called before `r3.runtime.device.settle`, so that no later
    search for garbage looks at the compiler's objects.
    """
    x_ND = torch.zeros(1, 4, dtype=dtype)
    _, scale_N = norm(x_ND, x_ND[0], 1.0)
    norm_backward(x_ND, x_ND[0], scale_N, x_ND)
    rotate(x_ND[None], x_ND[None], x_ND[None], way=1)


def norm(
    x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight * x / sqrt(mean(x^2) + eps), and 1 / sqrt(...) of each row, [N]."""
    assert weight_D.shape == x_ND.shape[1:], (weight_D.shape, x_ND.shape)
    x_ND, out_ND = x_ND.contiguous(), torch.empty(x_ND.shape, dtype=x_ND.dtype)
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    # An array, because Numba would compute in float64 with a number of Python.
    scale_N, eps_1 = torch.empty(len(x_ND), dtype=dtype), torch.tensor([eps], dtype=dtype)
    _norm(*map(array, (x_ND, weight_D, eps_1, out_ND, scale_N)))
    return out_ND, scale_N


def norm_backward(
    x_ND: torch.Tensor, weight_D: torch.Tensor, scale_N: torch.Tensor, gradient_ND: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight, for what `norm` returned."""
    assert gradient_ND.shape == x_ND.shape == (*scale_N.shape, *weight_D.shape), (
        f"{gradient_ND.shape}, {x_ND.shape}, {scale_N.shape}, {weight_D.shape}"
    )
    x_ND, gradient_ND = x_ND.contiguous(), gradient_ND.contiguous()
    d_x_ND = torch.empty_like(x_ND)
    d_weight_D = torch.zeros(len(weight_D), dtype=torch.float64)  # of as many terms as rows
    _norm_backward(*map(array, (x_ND, weight_D, scale_N, gradient_ND, d_x_ND, d_weight_D)))
    return d_x_ND, d_weight_D.to(weight_D.dtype)


def rotate(x_Nhd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, way: int) -> torch.Tensor:
    """Return x * cos + way * (x with swapped halves) * sin; the first product is rounded.

    Args:
        x_Nhd: heads of tokens.
        cos, sin: [N, 1, d].
        way: 1, or -1 to turn back.
    """
    tokens, _, width = x_Nhd.shape
    assert cos.shape == sin.shape == (tokens, 1, width), (cos.shape, sin.shape, x_Nhd.shape)
    x_Nhd, signs = x_Nhd.contiguous(), torch.tensor([way], dtype=torch.float32)
    out_Nhd = torch.empty_like(x_Nhd)
    _rotate(*map(array, (x_Nhd, cos, sin, signs, out_Nhd)))
    return out_Nhd
