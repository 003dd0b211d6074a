"""Compiled loops for CPU compute what torch's operators compute, and round as torch rounds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numba.core.caching
import numpy as np
import pytest
import torch
from numba import njit

from r3.kernels import compiled as runtime_compiled
from r3.kernels import loop_attention, loop_experts, products, rows, sampled_experts, tiles
from r3.kernels.compiled import compiled, like
from r3.policy import rope
from r3.policy.modules import _Norm, plain_norm, plain_norm_backward

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

# A result is rounded once, to nearest: by half of the last of 24 or 8 bits, or of 53.
HALF = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-9}
ALL = pytest.mark.parametrize("dtype", list(HALF))
S, D, HEADS, HEAD = 21, 48, 3, 16


def _numbers(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def _compare(found: Any, exact: Any, roundings: float, dtype: torch.dtype) -> None:
    """Assert that the largest difference is within so many roundings of the largest value."""
    for one, other in zip(found, exact, strict=True):
        kind = dtype if one.dtype == dtype else torch.promote_types(dtype, torch.float32)
        assert one.dtype == kind and one.shape == other.shape
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error <= roundings * HALF[kind], (error, kind)


@ALL
def test_a_norm_and_its_gradients_equal_the_formula_in_float64(dtype: torch.dtype) -> None:
    """bfloat16 rounds twice, before and after the weight; float32 has some roundings of sums."""
    x_ND, gradient_ND = (_numbers(S, D, dtype=dtype, seed=seed) for seed in (5, 6))
    weight_D = 1 + _numbers(D, dtype=dtype, seed=7)
    exact = [one.to(torch.float64, copy=True) for one in (x_ND, weight_D)]
    length_N1 = exact[0].square().mean(-1, keepdim=True).add(1e-2).sqrt()
    out_ND, scale_N = rows.norm(x_ND, weight_D, 1e-2)
    roundings = 4.0 if dtype == torch.bfloat16 else 12.0
    _compare([out_ND], [exact[1] * exact[0] / length_N1], roundings, dtype)
    _compare([scale_N], [1 / length_N1[:, 0]], 12.0, scale_N.dtype)
    leaves = [one.requires_grad_() for one in exact]
    again = torch.nn.functional.rms_norm(leaves[0], (D,), leaves[1], 1e-2)
    expected = torch.autograd.grad(again, leaves, gradient_ND.double())
    found = rows.norm_backward(x_ND, weight_D, scale_N, gradient_ND)
    _compare(found, expected, roundings, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_equals_the_one_of_torchs_operators(dtype: torch.dtype) -> None:
    """Theirs is what CUDA uses. Both round what differs in the last bits of float32."""
    x_ND, gradient_ND = (_numbers(S, D, dtype=dtype, seed=seed) for seed in (5, 6))
    weight_D = 1 + _numbers(D, dtype=dtype, seed=7)
    (out_ND, scale_N), plain = (
        rows.norm(x_ND, weight_D, 1e-6),
        plain_norm(x_ND, weight_D, 1e-6),
    )
    found = (out_ND, scale_N, *rows.norm_backward(x_ND, weight_D, scale_N, gradient_ND))
    theirs = (*plain, *plain_norm_backward(x_ND, weight_D, plain[1], gradient_ND))
    _compare(found, [one.double() for one in theirs], 12.0, dtype)


@ALL
def test_heads_are_turned_with_the_bits_of_two_products_and_a_sum(dtype: torch.dtype) -> None:
    """As transformers writes it in float32 and float64; in bfloat16 as torch's addcmul rounds."""
    x_Nhd = _numbers(S, HEADS, HEAD, dtype=dtype, seed=8)
    turned = rope.Rotation(torch.arange(S), torch.rand(HEAD // 2), dtype)
    swapped = x_Nhd.roll(HEAD // 2, -1)
    for way in (1, -1):
        found = rows.rotate(x_Nhd, turned.cos, turned.sin, way=way)
        expected = x_Nhd * turned.cos
        if dtype == torch.bfloat16:
            expected = expected.addcmul(swapped, turned.sin, value=way)
        else:
            expected = expected + way * (swapped * turned.sin)
        assert torch.equal(found, expected)
    parts = x_Nhd.transpose(0, 1).contiguous().transpose(0, 1)
    assert not parts.is_contiguous()
    assert torch.equal(rows.rotate(parts, turned.cos, turned.sin, way=-1), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x_ND, weight = _numbers(S, D, dtype=dtype, seed=0), torch.rand(D).to(dtype)
    whole, some = (rows.norm(x, weight, 1e-6) for x in (x_ND, x_ND[7:9]))
    assert all(torch.equal(one[7:9], other) for one, other in zip(whole, some, strict=True))


@njit
def _round(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = like(values[i], out[i])


@njit
def _both_sigmoids(values: Any, sigmoids: Any, rests: Any) -> None:
    for i in range(len(values)):
        sigmoids[i], rests[i] = rows.sigmoids(values[i])


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """All exponents and signs with bits around ties; infinities, denormals and NaNs among them."""
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = (high + low).flatten().to(torch.uint32).view(torch.float32)
    out = torch.empty(len(values), dtype=torch.uint16)
    _round(values.numpy(), out.numpy())
    found, expected = out.view(torch.bfloat16), values.bfloat16()
    is_nan = values.isnan()
    assert is_nan.sum() > 1000 and found[is_nan].isnan().all()
    # As integers, because a comparison of numbers takes -0 for 0.
    assert torch.equal(found[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_logistic_function_is_exact_to_a_few_last_bits(kind: Any) -> None:
    values = np.linspace(-80, 80, 100_001).astype(kind)
    sigmoids, rests = np.empty_like(values), np.empty_like(values)
    _both_sigmoids(values, sigmoids, rests)
    exact = 1 / (1 + np.exp(-values.astype(np.longdouble)))
    # Four roundings of half a last bit; an exponential of 80 also takes its argument's rounding.
    bound = 8 * np.finfo(kind).eps if kind == np.float32 else 64 * np.finfo(kind).eps
    assert 0 < (abs(sigmoids - exact) / exact).max() <= bound
    assert abs(rests - (1 - exact)).max() <= 2 * np.finfo(kind).eps


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_not_finite_stay_visible(dtype: torch.dtype, value: float) -> None:
    x_ND = _numbers(S, D, dtype=dtype, seed=0)
    x_ND[3, 5] = value
    out_ND, _ = rows.norm(x_ND, torch.ones(D).to(dtype), 1e-6)
    assert not out_ND[3].isfinite().all() and out_ND[4:].isfinite().all()


def test_torchs_operators_run_where_they_have_several_threads() -> None:
    """They give other bits, so that a choice that is ignored would show."""
    x, weight = _numbers(64, 256, dtype=torch.float32, seed=9), torch.rand(256)
    assert rows.is_faster(x, "norm") and not rows.is_faster(x.to("meta"), "norm")
    in_loop, plain = rows.norm(x, weight, 1e-6)[0], plain_norm(x, weight, 1e-6)[0]
    assert not torch.equal(in_loop, plain)
    assert torch.equal(_Norm.apply(x, weight, 1e-6), in_loop)
    torch.set_num_threads(2)
    assert not rows.is_faster(x, "norm")
    assert torch.equal(_Norm.apply(x, weight, 1e-6), plain_norm(x, weight, 1e-6)[0])


def test_without_a_folder_for_compiled_code_a_loop_is_compiled_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numba.core.caching.CompileResultCacheImpl, "_locator_classes", [])

    def double(values: Any) -> None:
        for i in range(len(values)):
            values[i] *= 2

    with pytest.raises(RuntimeError, match="cannot cache"):
        njit(cache=True)(double)
    values = np.ones(3)
    compiled(double)(values)
    assert values.tolist() == [2, 2, 2]


def test_machine_code_on_disk_is_not_used_after_its_functions_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba itself compares only the file of the loop, which stays the same here."""
    (tmp_path / "halving.py").write_text(
        "from r3.kernels.compiled import wide\n"
        "def halve(values):\n"
        "    for i in range(len(values)):\n"
        "        values[i] = wide(values[i]) / 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def uses_of_disk(version: str) -> int:
        monkeypatch.setattr(runtime_compiled, "_version", lambda _names: version)
        monkeypatch.delitem(sys.modules, "halving", raising=False)
        loop: Any = compiled(importlib.import_module("halving").halve)
        loop(np.ones(3))
        return sum(loop.stats.cache_hits.values())

    assert [uses_of_disk(version) for version in ("one", "one", "two")] == [0, 1, 0]


@pytest.mark.parametrize(
    ("loops", "files"),
    [
        (sampled_experts, {tiles, runtime_compiled}),
        # those of `products`, which has those of `tiles`
        (loop_experts, {tiles, runtime_compiled, rows, products}),
    ],
)
def test_machine_code_is_of_the_files_that_its_functions_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loops: ModuleType, files: set[ModuleType]
) -> None:
    names = vars(loops)
    found = {runtime_compiled._version(names)}
    other = tmp_path / "changed.py"
    other.write_text("")
    for module in (tiles, runtime_compiled, rows, products, loop_attention):
        with monkeypatch.context() as context:
            context.setattr(module, "__file__", str(other))
            found.add(runtime_compiled._version(names))
    assert len(found) == 1 + len(files)


def test_memory_that_a_loop_has_seen_can_still_be_resized() -> None:
    """Megatron frees outputs that it will recompute; `Tensor.numpy` would keep it from that."""
    out_ND, _ = rows.norm(torch.ones(3, 4), torch.ones(4), 1e-6)
    out_ND.untyped_storage().resize_(0)
    other = torch.ones(3)
    other.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        other.untyped_storage().resize_(0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    """The loops would read and write memory of other tensors."""
    x_ND, weight, scale_N = torch.ones(S, D), torch.ones(D), torch.ones(S)
    cos = torch.ones(S, 1, HEAD)
    x_Nhd = _numbers(S, HEADS, HEAD, dtype=torch.float32, seed=8)
    for call in (
        lambda: rows.norm(x_ND, weight[1:], 1e-6),
        lambda: rows.norm_backward(x_ND, weight, scale_N[1:], x_ND),
        lambda: rows.norm_backward(x_ND, weight, scale_N, x_ND[1:]),
        lambda: rows.rotate(x_Nhd, cos[1:], cos[1:], way=1),
    ):
        with pytest.raises(AssertionError):
            call()


def test_a_tensor_with_gaps_is_refused_and_one_without_numbers_is_not() -> None:
    with pytest.raises(AssertionError, match="strides"):
        runtime_compiled.array(torch.ones(4, 8)[:, ::2])
    assert rows.norm(torch.ones(0, D), torch.ones(D), 1e-6)[0].shape == (0, D)
