"""Faults in the real path of routes: what a test puts in place of a function of r3."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from r3.routing import Replay
from r3.sync import Received


@contextmanager
def patched(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, `owner.name` is `wrap(owner.name)`."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def with_routes(item: Received, routes: np.ndarray) -> Received:
    """A rollout with other routes."""
    rollout = replace(item.sample.rollout, routed_experts=np.ascontiguousarray(routes))
    return item._replace(sample=replace(item.sample, rollout=rollout))


def samples_swapped(items: Sequence[Received]) -> list[Received]:
    """Exchange the routes of the first two rollouts, as far as their lengths allow."""
    if len(items) < 2:
        return list(items)
    one, two = (item.sample.rollout.routed_experts for item in items[:2])
    rows = min(len(one), len(two))
    return [
        with_routes(items[0], np.concatenate([two[:rows], one[rows:]])),
        with_routes(items[1], np.concatenate([one[:rows], two[rows:]])),
        *items[2:],
    ]


def rows_lost(load: Any) -> Any:
    """`Replay.load` that loses every tenth row: such rows would route live without an error."""

    def faulty(self: Replay, routes_NLK: Any, *rest: Any, **facts: Any) -> None:
        routes_NLK = routes_NLK.clone()
        routes_NLK[::10] = -1
        load(self, routes_NLK, *rest, **facts)

    return faulty
