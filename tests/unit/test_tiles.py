"""Rows times a tile of weights, of which an engine's experts and attention on CPU are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from r3.kernels import tiles
from r3.kernels.compiled import like
from r3.kernels.tiles import LANES, SIMILAR, TILE, multiply
from tests.processor import needs_tiles

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread"), needs_tiles]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("count", [0, *range(1, 10), 17])
def test_products_equal_those_in_float64(count: int, is_packed: bool, dtype: torch.dtype) -> None:
    """Both layouts: half a tile of all inputs before the other half, and rows of it with a gap."""
    random, inputs = np.random.default_rng(0), 7
    rows = random.standard_normal((count, inputs + 2), np.float32)
    weights = torch.from_numpy(random.standard_normal((inputs, TILE), np.float32)).to(dtype)
    if is_packed:
        stored = weights.view(inputs, 2, LANES).transpose(0, 1).contiguous()
        step, half = LANES, 7 * LANES
    else:
        stored, step, half = torch.nn.functional.pad(weights, (0, 8)), TILE + 8, LANES
    for adds in (False, True):
        sums = random.standard_normal((count, TILE + 3), np.float32)
        before = sums.copy()
        # Memory that is asked for may be anyone's: nothing is read there.
        multiply(
            count,
            (rows.ctypes.data, rows.shape[1]),
            inputs,
            (stored.data_ptr(), step, half),
            (sums.ctypes.data, sums.shape[1]),
            adds,
            (0, TILE),
            SIMILAR[dtype],
        )
        exact = rows[:, :inputs].astype(np.float64) @ weights.double().numpy()
        exact += before[:, :TILE] if adds else 0
        # Sums of 7 or 8 numbers of size 1 in float32; each of 8 roundings is 2^-24 of at most 16.
        np.testing.assert_allclose(sums[:, :TILE], exact, rtol=0, atol=8e-6)
        np.testing.assert_array_equal(sums[:, TILE:], before[:, TILE:])


def test_the_exponential_is_near_the_exact_one_at_all_sizes() -> None:
    """Its series has an error of 2e-7 of the value, and its products round."""

    @njit
    def of_all(values: Any, found: Any) -> None:
        for i in range(len(values)):
            found[i] = tiles.exponential(values[i])

    values = np.array([*np.linspace(-86, 88, 10001), -1e4, -200, 200, 1e4, np.nan], np.float32)
    found = np.empty_like(values)
    of_all(values, found)
    exact = np.exp(values[:10001].astype(np.float64))
    np.testing.assert_allclose(found[:10001], exact, rtol=1e-6)
    assert found[-5:-3].tolist() == [0, 0]
    assert (found[-3:-1] > 3e38).all()  # vLLM's ends at the largest number or infinity, too


def test_loops_are_for_one_thread_two_types_and_processors_with_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tiles.can_compute(torch.float32) and tiles.can_compute(torch.bfloat16)
    assert not tiles.can_compute(torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "IS_USED", False)
        assert not tiles.can_compute(torch.float32)
    torch.set_num_threads(2)
    assert not tiles.can_compute(torch.float32)


@njit
def _round(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = like(values[i], out[i])


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
