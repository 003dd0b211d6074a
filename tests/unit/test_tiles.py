"""Rows times a tile of weights, of which an engine's experts and attention on CPU are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from r3.kernels import tiles
from r3.kernels.tiles import LANES, PAIRS, SIMILAR, TILE, multiply
from tests.processor import needs_pairs, needs_tiles

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


@needs_pairs
@pytest.mark.parametrize("count", [1, 8, 9, 17])
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_pairs_equal_those_in_float64(count: int, turned: bool) -> None:
    """Rows of pairs, or the columns of an array of pairs; nothing is asked for."""
    random, pairs = torch.Generator().manual_seed(0), 7
    rows, weights = (
        torch.randn(size, pairs, 2, generator=random).bfloat16() for size in (count, TILE)
    )
    tile = weights.view(torch.int32).squeeze(2).t().contiguous()  # [pairs, 32]
    of = rows.view(torch.int32).squeeze(2)
    of = of.t().contiguous() if turned else of.contiguous()
    distances = (1, count) if turned else (pairs, 1)
    sums = np.zeros((count, TILE), np.float32)
    multiply(
        count,
        (of.data_ptr(), *distances),
        pairs,
        (tile.data_ptr(), TILE, LANES),
        (sums.ctypes.data, TILE),
        False,
        None,
        PAIRS,
    )
    exact = torch.einsum("npk,mpk->nm", rows.double(), weights.double()).numpy()
    # Products of bfloat16 are exact in float32; 14 sums round by 2^-24 of 16 each.
    np.testing.assert_allclose(sums, exact, rtol=0, atol=1.4e-5)


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
