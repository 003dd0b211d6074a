"""Triton kernels of `r3.layers.kernels` and `r3.backends.expert_kernels`.

Only this module imports Triton, and only CUDA and tests import it. One program works on some rows,
or on one block of a row's columns, and nothing is added atomically: the same input gives the same
bits, whatever else runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from r3.layers.kernels import NOWHERE

_LARGEST_BLOCK = 1024
_TILE = 8192  # values that a program has at a time where it works on whole rows
_PARTIAL_SUMS = 1024  # most programs that add up a weight's gradient


def _block(width: int) -> int:
    return min(_LARGEST_BLOCK, triton.next_power_of_2(width))


@triton.jit
def _weighted_swiglu(both, gates, inner, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    start = both + row * 2 * width
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up * tl.load(gates + row)
    tl.store(inner + row * width + columns, result.to(inner.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_swiglu_backward(  # type: ignore[no-untyped-def]
    both, gates, d_inner, inner, d_both, d_gates, width, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(gates + row)
    d_weight = tl.zeros([block], tl.float32)
    start, d_start = both + row * 2 * width, d_both + row * 2 * width
    kind = d_both.dtype.element_ty
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        inside = columns < width
        gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(start + width + columns, mask=inside, other=0.0).to(tl.float32)
        d_out = tl.load(d_inner + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        swish = gate * sigmoid
        product = swish * up
        d_product = d_out * weight
        d_gate = d_product * up * (sigmoid + swish * (1 - sigmoid))
        tl.store(inner + row * width + columns, (product * weight).to(kind), mask=inside)
        tl.store(d_start + columns, d_gate.to(kind), mask=inside)
        tl.store(d_start + width + columns, (d_product * swish).to(kind), mask=inside)
        d_weight += d_out * product
    tl.store(d_gates + row, tl.sum(d_weight, 0))


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    rows, places, out, count, width, topk: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(topk):
        place = tl.load(places + token * topk + k)
        here = (columns < width) & (place < count)
        total += tl.load(rows + place * width + columns, mask=here, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + token * width + columns, total.to(kind), mask=columns < width)


@triton.jit
def _logit_sums(  # type: ignore[no-untyped-def]
    logits, index, sums, count, width, columns, scale, nowhere, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    # Sums are relative to the largest z so far. The first one is larger than this.
    top, total, weighted = -3.0e38, 0.0, 0.0
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        z = tl.load(start + at, mask=at < columns, other=0.0).to(tl.float32) * scale
        z = tl.where(at < columns, z, nowhere)
        before, top = top, tl.maximum(top, tl.max(z, 0))
        e = tl.where(at < width, tl.exp(z - top), 0.0)
        shrink = tl.exp(before - top)
        weighted = shrink * (weighted + (before - top) * total) + tl.sum(e * (z - top), 0)
        total = shrink * total + tl.sum(e, 0)
    place = tl.load(index + row)
    target = tl.where(place < columns, tl.load(start + place).to(tl.float32) * scale, nowhere)
    tl.store(sums + row, top)
    tl.store(sums + count + row, total)
    tl.store(sums + 2 * count + row, weighted)
    tl.store(sums + 3 * count + row, target - top)


@triton.jit
def _logit_gradient(  # type: ignore[no-untyped-def]
    logits,
    index,
    tops,
    totals,
    grads,
    at_targets,
    entropy_grads,
    excesses,
    out,
    count,
    width,
    columns,
    scale,
    has_entropy: tl.constexpr,
    halves: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    z = tl.load(logits + row * width + at, mask=at < columns, other=0.0).to(tl.float32) * scale
    z -= tl.load(tops + row)
    factor = tl.load(grads + row)
    if has_entropy:
        factor += tl.load(entropy_grads + row) * (z + tl.load(excesses + row))
    grad = -tl.exp(z) * factor / tl.load(totals + row)
    grad = tl.where(at < columns, grad, 0.0)
    grad += tl.where(at == tl.load(index + row), tl.load(at_targets + row), 0.0)
    kind = out.dtype.element_ty
    high = grad.to(kind)
    tl.store(out + row * width + at, high, mask=at < width)
    if halves:
        low = (grad - high.to(tl.float32)).to(kind)
        tl.store(out + (row + count) * width + at, low, mask=at < width)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, weight, out, scales, count, width, eps, tile: tl.constexpr, block: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    columns = tl.arange(0, block)
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    at = rows[:, None] * width + columns[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    kind = out.dtype.element_ty
    normed = (value * scale[:, None]).to(kind).to(tl.float32)
    factor = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * factor[None, :]).to(kind), mask=inside)
    tl.store(scales + rows, scale, mask=rows < count)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    gradient,
    d_x,
    sums,
    count,
    width,
    turns,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    factor = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for turn in range(turns):
        rows = (program * turns + turn) * tile + tl.arange(0, tile)
        inside = (rows < count)[:, None] & (columns < width)[None, :]
        at = rows[:, None] * width + columns[None, :]
        scale = tl.load(scales + rows, mask=rows < count, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(grad * normed, 0)
        d_normed = grad * factor[None, :]
        mean = tl.sum(d_normed * normed, 1) / width
        d_value = (d_normed - normed * mean[:, None]) * scale
        tl.store(d_x + at, d_value.to(d_x.dtype.element_ty), mask=inside)
    tl.store(sums + program * width + columns, total, mask=columns < width)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    count,
    width,
    half,
    way: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, columns = tl.program_id(1) * tile + tl.arange(0, tile), tl.arange(0, block)
    inside = (heads < count)[:, None] & (columns < half)[None, :]
    first = (token * count + heads[:, None]) * width + columns[None, :]
    angles, known = token * 2 * half + columns, columns < half
    kind = out.dtype.element_ty
    left = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + first + half, mask=inside, other=0.0).to(tl.float32)
    cos_left = tl.load(cos + angles, mask=known, other=0.0).to(tl.float32)[None, :]
    cos_right = tl.load(cos + angles + half, mask=known, other=0.0).to(tl.float32)[None, :]
    sin_left = tl.load(sin + angles, mask=known, other=0.0).to(tl.float32)[None, :]
    sin_right = tl.load(sin + angles + half, mask=known, other=0.0).to(tl.float32)[None, :]
    # Plain torch rounds the first product, too.
    left_out = (left * cos_left).to(kind).to(tl.float32) + way * (right * sin_left)
    right_out = (right * cos_right).to(kind).to(tl.float32) + way * (left * sin_right)
    tl.store(out + first, left_out.to(kind), mask=inside)
    tl.store(out + first + half, right_out.to(kind), mask=inside)
    for done in range(2 * half, width, block):
        rest = done + columns
        inside = (heads < count)[:, None] & (rest < width)[None, :]
        at = (token * count + heads[:, None]) * width + rest[None, :]
        tl.store(out + at, tl.load(x + at, mask=inside), mask=inside)


def weighted_swiglu(both_SF: torch.Tensor, gates_S: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up * weight, [S, F]."""
    count, width = len(both_SF), both_SF.shape[1] // 2
    inner, block = both_SF.new_empty(count, width), _block(width)
    _weighted_swiglu[count, triton.cdiv(width, block)](both_SF, gates_S, inner, width, block=block)
    return inner


def weighted_swiglu_backward(
    both_SF: torch.Tensor, gates_S: torch.Tensor, d_inner_SF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the forward's result, d_both [S, 2F] and d_gates [S]."""
    count, width = d_inner_SF.shape
    inner, d_both = torch.empty_like(d_inner_SF), torch.empty_like(both_SF)
    d_gates = torch.empty_like(gates_S)
    _weighted_swiglu_backward[(count,)](
        both_SF, gates_S, d_inner_SF, inner, d_both, d_gates, width, block=_block(width)
    )
    return inner, d_both, d_gates


def sum_rows(rows_SD: torch.Tensor, places_NK: torch.Tensor) -> torch.Tensor:
    """Add K rows for each token, in the order of K: [N, D]."""
    (count, width), (tokens, topk) = rows_SD.shape, places_NK.shape
    out, block = rows_SD.new_empty(tokens, width), _block(width)
    grid = (tokens, triton.cdiv(width, block))
    _sum_rows[grid](rows_SD, places_NK, out, count, width, topk=topk, block=block)
    return out


def logit_sums(
    logits_NV: torch.Tensor, index_N: torch.Tensor, columns: int, scale: float
) -> torch.Tensor:
    """Return largest z, sum of e, sum of e * (z - largest), and target's z - largest: [4, N]."""
    count, width = logits_NV.shape
    sums = logits_NV.new_empty(4, count, dtype=torch.float32)
    _logit_sums[(count,)](
        logits_NV,
        index_N,
        sums,
        count,
        width,
        columns,
        scale,
        NOWHERE,
        block=min(4 * _LARGEST_BLOCK, triton.next_power_of_2(width)),
        num_warps=8,
    )
    return sums


def logit_gradient(
    logits_NV: torch.Tensor,
    index_N: torch.Tensor,
    columns: int,
    scale: float,
    top_N: torch.Tensor,
    total_N: torch.Tensor,
    grad_N: torch.Tensor,
    at_target_N: torch.Tensor,
    entropy_grad_N: torch.Tensor | None,
    excess_N: torch.Tensor | None,
    halves: bool,
) -> torch.Tensor:
    """Return the logits' gradient [N, V], or two bfloat16 halves of it [2N, V]."""
    count, width = logits_NV.shape
    kind = torch.bfloat16 if halves else logits_NV.dtype
    out = logits_NV.new_empty((1 + halves) * count, width, dtype=kind)
    block = _block(width)
    _logit_gradient[count, triton.cdiv(width, block)](
        logits_NV,
        index_N,
        top_N,
        total_N,
        grad_N,
        at_target_N,
        grad_N if entropy_grad_N is None else entropy_grad_N,
        grad_N if excess_N is None else excess_N,
        out,
        count,
        width,
        columns,
        scale,
        has_entropy=entropy_grad_N is not None,
        halves=halves,
        block=block,
    )
    return out


def norm(
    x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight * x / sqrt(mean(x^2) + eps), and 1 / sqrt(...) of each row, [N]."""
    count, width = x_ND.shape
    out, scales = torch.empty_like(x_ND), x_ND.new_empty(count, dtype=torch.float32)
    tile, block = _tile(width)
    _norm[(triton.cdiv(count, tile),)](
        x_ND, weight_D, out, scales, count, width, eps, tile=tile, block=block, num_warps=8
    )
    return out, scales


def norm_backward(
    x_ND: torch.Tensor, weight_D: torch.Tensor, scale_N: torch.Tensor, gradient_ND: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight."""
    count, width = x_ND.shape
    tile, block = _tile(width)
    turns = triton.cdiv(triton.cdiv(count, tile), _PARTIAL_SUMS)
    programs = triton.cdiv(count, tile * turns) if count else 0
    d_x, sums = torch.empty_like(x_ND), scale_N.new_empty(programs, width)
    _norm_backward[(programs,)](
        *(x_ND, weight_D, scale_N, gradient_ND, d_x, sums, count, width, turns),
        tile=tile,
        block=block,
        num_warps=8,
    )
    return d_x, sums.sum(0).to(weight_D.dtype)


def turn(x_Nhd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, way: int) -> torch.Tensor:
    """Return x * cos + way * (x with swapped halves) * sin, of the columns that have angles."""
    tokens, count, width = x_Nhd.shape
    out, half = torch.empty_like(x_Nhd), cos.shape[-1] // 2
    block = triton.next_power_of_2(half)
    tile = max(1, min(triton.next_power_of_2(count), _TILE // 2 // block))
    _turn[tokens, triton.cdiv(count, tile)](
        x_Nhd, cos, sin, out, count, width, half, way=way, tile=tile, block=block
    )
    return out


def _tile(width: int) -> tuple[int, int]:
    """How many rows a program has at a time, and how many columns, both powers of two."""
    block = triton.next_power_of_2(width)
    return max(1, _TILE // block), block
