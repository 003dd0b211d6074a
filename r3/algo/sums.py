"""Compare rewards up to the rounding of float sums.

0.7 + 0.2 + 0.1 is 0.9999999999999999. Whatever compares a reward with a bound or with other rewards
(accuracy, signal, baselines, filters) uses these functions, so that all of them agree.
"""

from __future__ import annotations

import math
from collections.abc import Collection

# Differences up to this, relative to the larger of 1 and the rewards, are rounding. A sum of some
# float64 terms is off by 1e-15 of the largest one; no reward function means a difference of 1e-9.
TOLERANCE = 1e-9


def are_equal(rewards: Collection[float]) -> bool:
    """Whether rewards differ by rounding alone; true for none or one."""
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return math.isclose(low, high, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def reaches(reward: float) -> bool:
    """Whether a reward is at least 1, or below it by rounding alone."""
    return reward >= 1 or are_equal((reward, 1.0))
