"""Reductions and the mismatch panel against closed forms."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from r3.metrics import (
    DeadExperts,
    EffectiveSampleSize,
    LoadEntropy,
    LoadMax,
    Max,
    Mean,
    Partial,
    PerLayer,
    Quantile,
    Sum,
    UsersMean,
    mismatch,
)
from r3.tools import shadow


def values(panel: dict[str, Partial]) -> dict[str, float | None]:
    return {key: part.reduce([part]) for key, part in panel.items()}


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def loads(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


# --- reductions -------------------------------------------------------------------------------

EXAMPLES: list[tuple[list[Any], float]] = [
    ([Mean(6.0, 2), Mean(0.0, 0), Mean(2.0, 2)], 2.0),
    ([Mean(9.0, 1), Mean(3.0, 3)], 3.0),  # a mean of means would say 5
    ([UsersMean((1e16, 1.0)), UsersMean(()), UsersMean((-1e16,))], 1 / 3),
    ([Sum(1.0), Sum(2.5)], 3.5),
    # Loads 4, 2, 2, 0: shares 1/2, 1/4, 1/4 have 1.5 bits of at most 2.
    ([LoadMax(loads(3, 0, 2, 0)), LoadMax(loads(1, 2, 0, 0))], 2.0),
    ([LoadEntropy(loads(3, 0, 2, 0)), LoadEntropy(loads(1, 2, 0, 0))], 0.75),
    ([DeadExperts(loads(3, 0, 2, 0)), DeadExperts(loads(1, 2, 0, 0))], 1.0),
    ([PerLayer(6, 3), PerLayer(0, 3), PerLayer(3, 3)], 3.0),  # three layers saw three rows each
    ([Max(-3.0), Max(None), Max(-1.0)], -1.0),
    ([Quantile(floats(4, 1), 0.5), Quantile(floats(), 0.5), Quantile(floats(3, 2), 0.5)], 2.5),
    ([Quantile(floats(*range(51)), 0.99), Quantile(floats(*range(51, 101)), 0.99)], 99.0),
    # Weights 1 and 3.
    ([EffectiveSampleSize(1.0, 1.0, 1), EffectiveSampleSize(3.0, 9.0, 1)], 16 / 20),
]


@pytest.mark.parametrize(("parts", "expected"), EXAMPLES)
def test_reduce_by_hand_in_every_order(parts: list[Any], expected: float) -> None:
    for order in itertools.permutations(parts):
        # equal, not close: rank order must not show
        assert type(parts[0]).reduce(order) == expected


NOTHING = [Mean(0.0, 0), UsersMean(()), Max(None), Quantile(floats(), 0.99)]


@pytest.mark.parametrize("nothing", [*NOTHING, EffectiveSampleSize(0.0, 0.0, 0)])
def test_nothing_counted_is_none_and_changes_nothing(nothing: Any) -> None:
    assert nothing.reduce([nothing, nothing]) is None
    assert nothing.reduce([]) is None
    for parts, expected in EXAMPLES:
        if type(parts[0]) is type(nothing) and getattr(parts[0], "q", 0.99) == 0.99:
            assert nothing.reduce([nothing, *parts]) == expected


def test_parts_add_up_however_they_are_cut() -> None:
    """Bitwise: 0.1 + 0.2 + 0.3 depends on the order, the sum of a metric must not."""
    parts = [Mean(x, 1) for x in (0.1, 0.2, 0.3, 1e16, -1e16, 1e-9)]
    assert len({Mean.reduce(order) for order in itertools.permutations(parts)}) == 1
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    for order in itertools.permutations([Max(1.0), Max(math.nan), Max(2.0)]):
        assert math.isnan(Max.reduce(order) or 0.0), "a NaN is never hidden by its place"


def test_quantiles_of_one_metric_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[0\.5, 0\.9\]"):
        Quantile.reduce([Quantile(floats(1), 0.5), Quantile(floats(1), 0.9)])


# --- the mismatch panel -----------------------------------------------------------------------


def test_panel_by_hand() -> None:
    """Delta = 0, ln 3, -ln 2 - 0.01 at loss tokens; what stands elsewhere does not count."""
    delta = [0.0, math.log(3.0), -math.log(2.0) - 0.01]
    rollout_N = torch.tensor([-1.0, 0.0, -2.0, -3.0])
    policy_N = rollout_N + torch.tensor([delta[0], 55.0, delta[1], delta[2]])
    panel = values(mismatch(policy_N, rollout_N, torch.tensor([1.0, 0.0, 1.0, 1.0])))
    weights = [math.exp(d) for d in delta]
    expected = {
        "k1": -sum(delta) / 3,
        "k3": sum(w - d - 1 for w, d in zip(weights, delta, strict=True)) / 3,
        "weight": sum(weights) / 3,
        "abs_p50": math.log(2.0) + 0.01,
        "abs_p90": 0.2 * (math.log(2.0) + 0.01) + 0.8 * math.log(3.0),  # at 1.8 of 0 .. 2
        "abs_p999": 0.002 * (math.log(2.0) + 0.01) + 0.998 * math.log(3.0),
        "f2": 2 / 3,
        "abs_mean": (math.log(3.0) + math.log(2.0) + 0.01) / 3,
        "abs_p99": 0.02 * (math.log(2.0) + 0.01) + 0.98 * math.log(3.0),  # at 1.98 of 0 .. 2
        "abs_max": math.log(3.0),
        "ess": sum(weights) ** 2 / (3 * sum(w * w for w in weights)),
    }
    # Log-probabilities near -3 are given in float32: 2e-7 absolute on a Delta of order 1.
    assert panel == pytest.approx(expected, rel=1e-6)


def test_the_token_that_separates_the_estimators() -> None:
    """mu = e^-5, pi_old = e^-15: k3 is 9.000 (the reverse direction would say 22,015)."""
    panel = values(mismatch(torch.tensor([-15.0]), torch.tensor([-5.0]), torch.ones(1)))
    assert panel["k3"] == pytest.approx(9.000, abs=5e-4)
    assert panel["f2"] == 1.0
    assert panel["abs_max"] == 10.0
    assert panel["ess"] == pytest.approx(1.0)
    reverse = values(mismatch(torch.tensor([-5.0]), torch.tensor([-15.0]), torch.ones(1)))
    assert reverse["k3"] == pytest.approx(22015.47, rel=1e-5)


def test_no_mismatch() -> None:
    logprobs_N = -torch.rand(50, generator=torch.Generator().manual_seed(0))
    panel = values(mismatch(logprobs_N, logprobs_N, torch.ones(50)))
    assert {key for key, value in panel.items() if value == 1.0} == {"ess", "weight"}
    assert all(value == 0.0 for key, value in panel.items() if key not in ("ess", "weight"))


def test_f2_counts_beyond_a_factor_of_two_and_not_at_it() -> None:
    delta_N = torch.tensor([0.69, -0.69, 0.70, -0.70])  # ln 2 = 0.693
    assert values(mismatch(delta_N, torch.zeros(4), torch.ones(4)))["f2"] == 0.5


def test_k3_resolves_a_tiny_mismatch() -> None:
    """Delta = 1e-4 everywhere: 5e-9, which float32's e^Delta - Delta - 1 rounds to 0 or 6e-8."""
    panel = values(mismatch(torch.full((100,), 1e-4), torch.zeros(100), torch.ones(100)))
    assert panel["k3"] == pytest.approx(5e-9, rel=1e-4)


def random_tokens(seed: int, count: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout_N = -torch.rand(count, generator=generator) * 3
    policy_N = rollout_N + 0.2 * torch.randn(count, generator=generator)
    return policy_N, rollout_N, (torch.rand(count, generator=generator) > 0.3).float()


@pytest.mark.parametrize("seed", range(3))
def test_the_panel_does_not_depend_on_micro_batches_or_ranks(seed: int) -> None:
    tokens = random_tokens(seed)
    whole = values(mismatch(*tokens))
    pieces = [(200, 300), (0, 0), (50, 200), (0, 50)]  # another order, and one rank without tokens
    panels = [mismatch(*(tensor[a:b] for tensor in tokens)) for a, b in pieces]
    merged = {key: panels[0][key].reduce([panel[key] for panel in panels]) for key in whole}
    assert merged == pytest.approx(whole, rel=1e-12)  # float64 sums in another order


def test_the_shadow_panel_is_part_of_the_panel() -> None:
    tokens = random_tokens(0)
    panel = values(mismatch(*tokens))
    names = ("k3", "f2", "abs_p99", "abs_max")
    assert values(shadow(*tokens)) == {key: panel[key] for key in names}


def test_no_loss_tokens_report_nothing() -> None:
    panel = values(mismatch(torch.zeros(3), torch.zeros(3), torch.zeros(3)))
    assert set(panel.values()) == {None}


def test_broken_log_probabilities_are_refused_at_loss_tokens_only() -> None:
    policy_N = torch.tensor([-1.0, math.nan, -math.inf])
    rollout_N = torch.full((3,), -1.0)
    assert values(mismatch(policy_N, rollout_N, torch.tensor([1.0, 0.0, 0.0])))["k3"] == 0.0
    with pytest.raises(FloatingPointError, match="at 2 of 3 loss tokens"):
        mismatch(policy_N, rollout_N, torch.ones(3))


def test_absurd_log_probabilities_give_finite_numbers() -> None:
    panel = values(mismatch(torch.tensor([0.0, -1.0]), torch.tensor([-5e4, -5e4]), torch.ones(2)))
    assert all(value is not None and math.isfinite(value) for value in panel.values())


def test_panel_takes_any_float_and_leaves_the_graph_alone() -> None:
    policy_N = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    panel = values(mismatch(policy_N, torch.tensor([-1.5, -2.0]), torch.ones(2)))
    assert panel["abs_max"] == 0.5


def test_panel_refuses_what_would_broadcast() -> None:
    with pytest.raises(ValueError, match=r"\[\[3\], \[1\], \[3\]\]"):
        mismatch(torch.zeros(3), torch.zeros(1), torch.ones(3))
    with pytest.raises(ValueError, match=r"\[3, 1\]"):
        mismatch(torch.zeros(3, 1), torch.zeros(3, 1), torch.ones(3, 1))


def test_the_panel_by_position_by_hand() -> None:
    """Borders belong to the range that they begin; a range without tokens has no figure."""
    positions_N = torch.tensor([0, 1023, 1024, 4095, 16384, 20000])
    delta_N = torch.tensor([0.1, 0.3, 1.0, -1.0, 0.5, 9.0])
    mask_N = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    panel = values(mismatch(delta_N, torch.zeros(6), mask_N, positions_N))
    found = {key: value for key, value in panel.items() if key.startswith("abs_mean_depth/")}
    assert found.pop("abs_mean_depth/4-16k") is None
    assert found == pytest.approx(
        # float32 rounds 0.1.
        {"abs_mean_depth/0-1k": 0.2, "abs_mean_depth/1-4k": 1.0, "abs_mean_depth/16k_up": 0.5},
        rel=1e-6,
    )
    assert panel["f2_depth/1-4k"] == 1.0 and panel["f2_depth/0-1k"] == 0.0
    k3 = {depth: panel[f"k3_depth/{depth}"] for depth in ("0-1k", "1-4k", "16k_up")}
    total = 2 * k3["0-1k"] + 2 * k3["1-4k"] + k3["16k_up"]
    assert total / 5 == pytest.approx(panel["k3"], rel=1e-12)
    assert "k3_depth/0-1k" not in mismatch(delta_N, torch.zeros(6), mask_N)
