"""The loss and the advantage of a run: built-in functions, or functions of users' files.

    --algo.loss my.py:f --algo.args tau=0.5

calls `f(inputs, bounds, tau=0.5)` where a built-in loss would be called.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from r3 import extras
from r3.algo.advantage import ADVANTAGES
from r3.algo.loss import LOSSES, Bounds, Loss
from r3.config import AlgoConfig
from r3.errors import Explained
from r3.user_code.loading import cached

Advantage = Callable[[Tensor, Tensor], Tensor]


class AlgorithmError(Explained):
    """A user's loss or advantage raised an error or returned a wrong result."""


@cached
def loss_of(algo: AlgoConfig) -> Loss:
    """Return the policy loss that `algo.loss` names; load the user's file.

    A user's loss raises `AlgorithmError` if it fails or its result has another form than agreed.

    Raises:
        ConfigError: the function cannot be loaded, or not be called with inputs, bounds and
            `algo.args`.
    """
    return LOSSES.get(algo.loss) or extras.own_function(algo, "loss")


@cached
def advantage_of(algo: AlgoConfig) -> Advantage:
    """Return the advantage that `algo.advantage` names; load the user's file.

    A user's advantage raises `AlgorithmError` if it fails or its result is not one finite number
    per rollout.

    Raises:
        ConfigError: the function cannot be loaded, or not be called with rewards_R, groups_R and
            `algo.args`.
    """
    return ADVANTAGES.get(algo.advantage) or extras.own_function(algo, "advantage")


def bounds_of(algo: AlgoConfig) -> Bounds:
    """Return the bounds that a loss gets."""
    return Bounds(algo.clip_low, algo.clip_high, algo.clip_dual, algo.minirl_cap)
