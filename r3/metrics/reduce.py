"""Reduce the parts of a metric from all micro-batches and ranks to one number; parts of the
mismatch between policy and engine.

A metric travels as a *partial*: a frozen dataclass with what is needed to merge it. `reduce(parts)`
takes the parts of all micro-batches and ranks, in any order with the same result. It returns one
float, or None if nothing was counted; the meter then leaves the key out. Nothing is averaged before
all parts are here, because a mean of means depends on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Partial(Protocol):
    """The part of a metric from one micro-batch or rank; all parts of a metric have one type."""

    @staticmethod
    def reduce(parts: Sequence[Any]) -> float | None:
        """The metric over all parts; None if nothing was counted."""


@dataclass(frozen=True, slots=True)
class Mean:
    """sum of totals / sum of counts."""

    total: float
    count: float

    @staticmethod
    def reduce(parts: Sequence[Mean]) -> float | None:
        # fsum rounds once, at the end, so the result does not depend on how it was split.
        count = math.fsum(part.count for part in parts)
        return math.fsum(part.total for part in parts) / count if count else None


@dataclass(frozen=True, slots=True)
class UsersMean:
    """Mean of a metric that users' functions report, under a name that the glossary does not have.

    All values travel: exact over any split, whatever the values are.
    """

    values: tuple[float, ...]

    @staticmethod
    def reduce(parts: Sequence[UsersMean]) -> float | None:
        values = [value for part in parts for value in part.values]
        return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Sum:
    """sum of values."""

    value: float

    @staticmethod
    def reduce(parts: Sequence[Sum]) -> float | None:
        return math.fsum(part.value for part in parts) if parts else None


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Rows per layer: slots of all ranks / layers. Exact if every layer counts the same rows."""

    slots: int
    layers: int

    @staticmethod
    def reduce(parts: Sequence[PerLayer]) -> float | None:
        if len(layers := {part.layers for part in parts}) > 1:
            raise ValueError(
                "parts of one metric come from models with different numbers of layers: "
                f"{sorted(layers)}"
            )
        return sum(part.slots for part in parts) / parts[0].layers if parts else None


@dataclass(frozen=True, slots=True)
class StandardDeviation:
    """Population standard deviation, from the values themselves: exact over any split."""

    values: tuple[float, ...]

    @staticmethod
    def reduce(parts: Sequence[StandardDeviation]) -> float | None:
        values = [value for part in parts for value in part.values]
        return pstdev(values) if values else None


@dataclass(frozen=True, slots=True)
class Max:
    """Largest value; None if this part has no value."""

    value: float | None

    @staticmethod
    def reduce(parts: Sequence[Max]) -> float | None:
        # numpy's max returns nan if there is one; Python's depends on its place in the list.
        values = [part.value for part in parts if part.value is not None]
        return float(np.max(values)) if values else None


@dataclass(frozen=True, slots=True, eq=False)
class Quantile:
    """Quantile q of all values, linear between neighbours. It is exact: every value travels."""

    values: np.ndarray
    q: float

    @staticmethod
    def reduce(parts: Sequence[Quantile]) -> float | None:
        if len(wanted := {part.q for part in parts}) > 1:
            raise ValueError(f"parts of one metric have different quantiles: {sorted(wanted)}")
        values = np.concatenate([part.values for part in parts]) if parts else np.empty(0)
        return float(np.quantile(values.astype(np.float64), parts[0].q)) if len(values) else None


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """(sum w)^2 / (n sum w^2), in (0, 1] (Kish 1965)."""

    sum_w: float
    sum_w2: float
    count: float

    @staticmethod
    def reduce(parts: Sequence[EffectiveSampleSize]) -> float | None:
        scale = math.fsum(part.count for part in parts) * math.fsum(part.sum_w2 for part in parts)
        return math.fsum(part.sum_w for part in parts) ** 2 / scale if scale else None


@dataclass(frozen=True, slots=True, eq=False)
class LoadMax:
    """Largest load of an expert / mean load: 1 is an even load."""

    load_E: np.ndarray

    @staticmethod
    def reduce(parts: Sequence[LoadMax]) -> float | None:
        load_E = _total_load([part.load_E for part in parts])
        return float(load_E.max() / load_E.mean()) if load_E.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class LoadEntropy:
    """Entropy of the load, -sum_e f_e ln f_e / ln E, f_e the share of expert e: 1 is even."""

    load_E: np.ndarray

    @staticmethod
    def reduce(parts: Sequence[LoadEntropy]) -> float | None:
        load_E = _total_load([part.load_E for part in parts])
        if not load_E.any() or len(load_E) < 2:
            return None
        shares = load_E[load_E > 0] / load_E.sum()
        return float(-(shares * np.log(shares)).sum() / math.log(len(load_E))) + 0.0


@dataclass(frozen=True, slots=True, eq=False)
class DeadExperts:
    """Number of experts that no token chose."""

    load_E: np.ndarray

    @staticmethod
    def reduce(parts: Sequence[DeadExperts]) -> float | None:
        load_E = _total_load([part.load_E for part in parts])
        return float((load_E == 0).sum()) if load_E.any() else None


def _total_load(loads: Sequence[np.ndarray]) -> np.ndarray:
    """Sum of loads, int64 [E]; empty without parts."""
    return np.array(loads, np.int64).sum(0) if loads else np.zeros(0, np.int64)


DEPTHS = {"0-1k": 0, "1-4k": 1024, "4-16k": 4096, "16k_up": 16384}
"""Ranges of positions in a conversation, and their first position."""

# exp of a larger difference would overflow when squared, and ess would be nan.
_MAX_LOG_WEIGHT = 300.0


def mismatch(
    policy_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    loss_mask_N: Tensor,
    positions_N: Tensor | None = None,
) -> dict[str, Partial]:
    """Partials of the mismatch between policy and engine on the n loss tokens of a micro-batch.

    Delta_t = log pi_old(x_t) - log mu(x_t). pi_old is the policy at the rollout's weights, mu the
    distribution from which the engine sampled the token. Delta is measured before any update, so
    only the two programs make a difference.

        k3        mean( e^Delta - Delta - 1 )   estimates KL(mu || pi_old) (arXiv 2510.11370)
        f2        mean( |Delta| > ln 2 )        share of tokens whose probabilities differ by > 2x
        abs_mean  mean |Delta|
        k1        mean( -Delta )                noisier estimate of the KL; its sign shows a bias
        weight    mean( e^Delta )               1 in expectation
        abs_p50, abs_p90, abs_p99, abs_p999     quantiles of |Delta|
        abs_max   max |Delta|
        ess       (sum w)^2 / (n sum w^2)       for the importance weights w = e^Delta

    Routing differences show in the tail first: f2, p99 and max grow tenfold where k3 doubles.
    k3, f2 and abs_mean come per range of `DEPTHS` too (`k3_depth/0-1k`): what is wrong at late
    positions alone drowns in one mean.

    Args:
        policy_logprobs_N: log pi_old of the target tokens.
        rollout_logprobs_N: log mu of the target tokens.
        loss_mask_N: 1 at loss tokens.
        positions_N: of each token in its conversation; None: nothing comes per range.

    Raises:
        ValueError: the shapes differ.
        FloatingPointError: a log-probability at a loss token is not finite.
    """
    import torch  # the rest of this module does without

    shapes = [list(tensor.shape) for tensor in (policy_logprobs_N, rollout_logprobs_N, loss_mask_N)]
    if any(shape != shapes[0] or len(shape) != 1 for shape in shapes):
        raise ValueError(
            f"policy and rollout log-probabilities and the loss mask must all be [N], got {shapes}"
        )
    delta_N = policy_logprobs_N.detach().float() - rollout_logprobs_N.float()
    # One transfer from the device; all sums are float64.
    delta, mask = torch.stack([delta_N, loss_mask_N.float()]).cpu().numpy()
    delta = delta[mask > 0].astype(np.float64)
    if broken := int((~np.isfinite(delta)).sum()):
        raise FloatingPointError(
            f"log-probabilities are not finite at {broken} of {len(delta)} loss tokens"
        )
    count = len(delta)
    size = np.abs(delta)
    limited = np.minimum(delta, _MAX_LOG_WEIGHT)
    weights = np.exp(limited)
    sizes = size.astype(np.float32)  # one array object: pickle sends it once
    means = {"k3": np.expm1(limited) - delta, "f2": size > math.log(2.0), "abs_mean": size}
    by_depth: dict[str, Partial] = {}
    if positions_N is not None:
        positions = positions_N.cpu().numpy()[mask > 0]
        place = np.searchsorted(list(DEPTHS.values()), positions, side="right") - 1
        for number, depth in enumerate(DEPTHS):
            here = place == number
            for key, values in means.items():
                total, rows = float(values[here].sum()), float(here.sum())
                by_depth[f"{key}_depth/{depth}"] = Mean(total=total, count=rows)
    return by_depth | {
        "k1": Mean(total=float(-delta.sum()), count=count),
        **{key: Mean(total=float(values.sum()), count=count) for key, values in means.items()},
        "weight": Mean(total=float(weights.sum()), count=count),
        "abs_p50": Quantile(values=sizes, q=0.5),
        "abs_p90": Quantile(values=sizes, q=0.9),
        "abs_p99": Quantile(values=sizes, q=0.99),
        "abs_p999": Quantile(values=sizes, q=0.999),
        "abs_max": Max(value=float(size.max()) if count else None),
        "ess": EffectiveSampleSize(
            sum_w=float(weights.sum()), sum_w2=float((weights**2).sum()), count=count
        ),
    }


def means(
    reported: Iterable[Mapping[str, float]], *, without: Iterable[str] = ()
) -> dict[str, UsersMean]:
    """Return the partial of every metric, over the conversations that report it.

    Args:
        without: keys that are left out, because the round counts them.
    """
    values: dict[str, list[float]] = {}
    for metrics in reported:
        for key, value in metrics.items():
            values.setdefault(key, []).append(value)
    for key in without:
        values.pop(key, None)
    return {key: UsersMean(tuple(numbers)) for key, numbers in sorted(values.items())}
