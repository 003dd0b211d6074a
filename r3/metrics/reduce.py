"""What is measured about a run, and how the parts of all ranks become one number.

A metric travels as a *partial*: a frozen dataclass with what is needed to merge it. `reduce(parts)` takes the
parts of all micro-batches and ranks, in any order with the same result, and returns one float, or None where
nothing was counted, so that the meter leaves the key out. Nothing is averaged before everything is here: a
mean of means depends on the layout.

The mismatch panel compares two log-probabilities of the same sampled tokens:

    Delta_t = log pi_old(x_t) - log mu(x_t)

pi_old is the trainer's policy at the rollout's weights, mu the engine's distribution the token was drawn
from. It is taken before any update, so it measures the two worlds and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

# --- typed reductions ---------------------------------------------------------------------------------------


class Partial(Protocol):
    """One micro-batch's or one rank's part of a metric. All parts of a metric have the same type."""

    @staticmethod
    def reduce(parts: Sequence[Any]) -> float | None:
        """The metric over all parts; None where nothing was counted."""


@dataclass(frozen=True, slots=True)
class Mean:
    """sum of totals / sum of counts."""

    total: float
    count: float

    @staticmethod
    def reduce(parts: Sequence[Mean]) -> float | None:
        # fsum rounds once, at the end: the result does not depend on how the sum was cut into parts.
        count = math.fsum(part.count for part in parts)
        return math.fsum(part.total for part in parts) / count if count else None


@dataclass(frozen=True, slots=True)
class Sum:
    """sum of values."""

    value: float

    @staticmethod
    def reduce(parts: Sequence[Sum]) -> float | None:
        return math.fsum(part.value for part in parts) if parts else None


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Rows that every one of `layers` layers counts: slots of all ranks / layers. Exact where every layer counted alike."""

    slots: int
    layers: int

    @staticmethod
    def reduce(parts: Sequence[PerLayer]) -> float | None:
        if len(layers := {part.layers for part in parts}) > 1:
            raise ValueError(
                f"parts of one metric are of models with different numbers of layers: {sorted(layers)}"
            )
        return sum(part.slots for part in parts) / parts[0].layers if parts else None


@dataclass(frozen=True, slots=True)
class StandardDeviation:
    """sqrt( sum of squares / count - mean^2 ), from the values themselves so that it is exact over any split."""

    values: tuple[float, ...]

    @staticmethod
    def reduce(parts: Sequence[StandardDeviation]) -> float | None:
        values = [value for part in parts for value in part.values]
        if not values:
            return None
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


@dataclass(frozen=True, slots=True)
class Max:
    """Largest value; None: this part has seen none."""

    value: float | None

    @staticmethod
    def reduce(parts: Sequence[Max]) -> float | None:
        # numpy's max: with Python's, a nan would win or lose by its place in the list.
        values = [part.value for part in parts if part.value is not None]
        return float(np.max(values)) if values else None


@dataclass(frozen=True, slots=True, eq=False)
class Quantile:
    """Quantile q of all values together, linear between neighbours. Exact, so every value travels."""

    values: np.ndarray
    q: float

    @staticmethod
    def reduce(parts: Sequence[Quantile]) -> float | None:
        if len(wanted := {part.q for part in parts}) > 1:
            raise ValueError(f"parts of one metric ask for different quantiles: {sorted(wanted)}")
        values = np.concatenate([part.values for part in parts]) if parts else np.empty(0)
        return float(np.quantile(values.astype(np.float64), parts[0].q)) if len(values) else None


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """(sum w)^2 / (n sum w^2), in (0, 1]: the share of samples that carry the weight (Kish 1965)."""

    sum_w: float
    sum_w2: float
    count: float

    @staticmethod
    def reduce(parts: Sequence[EffectiveSampleSize]) -> float | None:
        scale = math.fsum(part.count for part in parts) * math.fsum(part.sum_w2 for part in parts)
        return math.fsum(part.sum_w for part in parts) ** 2 / scale if scale else None


@dataclass(frozen=True, slots=True)
class LogHistogram:
    """How many sizes fall into each quarter of a decade from 1e-10 to 100; what is smaller, 0 too, is in the first bin.

    It has no single number: the meter draws it, and no row holds it.
    """

    counts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: np.ndarray) -> LogHistogram:
        """Count sizes, which are not negative."""
        logs = np.log10(np.maximum(sizes.astype(np.float64), 1e-300))
        bins, _ = np.histogram(np.clip(logs, LOG10_EDGES[0], LOG10_EDGES[-1]), LOG10_EDGES)
        return cls(counts=tuple(bins.tolist()))

    @staticmethod
    def reduce(parts: Sequence[LogHistogram]) -> float | None:
        return None

    @staticmethod
    def merge(parts: Sequence[LogHistogram]) -> np.ndarray:
        """Counts of all parts together, int64 [bins]."""
        return np.array([part.counts for part in parts], dtype=np.int64).sum(axis=0)


LOG10_EDGES = np.arange(-10.0, 2.01, 0.25)


# --- the mismatch panel -------------------------------------------------------------------------------------


def to_partials(delta_N: Tensor, loss_mask_N: Tensor) -> dict[str, Partial]:
    """The panel of Delta over the n loss tokens, with one transfer from the device; sums in float64.

        k3        mean( e^Delta - Delta - 1 )   of KL(mu || pi_old), tokens being mu's (arXiv 2510.11370)
        f2        mean( |Delta| > ln 2 )        the two probabilities differ by more than 2 times (same paper)
        abs_mean  mean |Delta|
        k1        mean( -Delta )                of KL(mu || pi_old) as well: noisier, and its sign shows a bias
        weight    mean( e^Delta )               1 in expectation; what is above is weight of tokens mu hardly samples
        abs_p50, abs_p90, abs_p99, abs_p999     quantiles of |Delta|
        abs_max   max |Delta|
        abs_log10 histogram of log10 |Delta|
        ess       (sum w)^2 / (n sum w^2)       w = e^Delta, the importance weights, not truncated

    Routing differences show in the tail first: f2, p99 and max move by 10 times and more where k3 moves by 2.
    """
    delta, mask = torch.stack([delta_N.detach().float(), loss_mask_N.float()]).cpu().numpy()
    delta = delta[mask > 0].astype(np.float64)
    if broken := int((~np.isfinite(delta)).sum()):
        raise FloatingPointError(
            f"log-probabilities are not finite at {broken} of {len(delta)} loss tokens"
        )
    count = len(delta)
    size = np.abs(delta)
    # Nothing sane comes near this limit; beyond it the squared weight would overflow, and ess be a nan.
    limited = np.minimum(delta, 300.0)
    weights = np.exp(limited)
    sizes = size.astype(np.float32)  # one array in all its uses: pickle sends it once
    return {
        "k1": Mean(total=float(-delta.sum()), count=count),
        "k3": Mean(total=float((np.expm1(limited) - delta).sum()), count=count),
        "f2": Mean(total=float((size > math.log(2.0)).sum()), count=count),
        "abs_mean": Mean(total=float(size.sum()), count=count),
        "weight": Mean(total=float(weights.sum()), count=count),
        "abs_p50": Quantile(values=sizes, q=0.5),
        "abs_p90": Quantile(values=sizes, q=0.9),
        "abs_p99": Quantile(values=sizes, q=0.99),
        "abs_p999": Quantile(values=sizes, q=0.999),
        "abs_max": Max(value=float(size.max()) if count else None),
        "abs_log10": LogHistogram.of(sizes),
        "ess": EffectiveSampleSize(
            sum_w=float(weights.sum()), sum_w2=float((weights**2).sum()), count=count
        ),
    }
