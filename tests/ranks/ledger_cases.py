"""The account of routes over real ranks: what travels, what routers use, and what is said when
something is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from r3.handover import rollouts as exchange
from r3.handover.rollouts import PackingSpec, distribute
from r3.rollout.scored import Scored
from r3.routing.ledger import LedgerError, reconcile
from r3.routing.replay import Replay
from r3.runtime.device import Device
from r3.types import Rollout, RouteError
from tests.ranks.cases import LENGTHS, build
from tests.tiny import random_rollouts, tiny_config

VERSION = 7


def account(device: Device, *, model: str, parallel: dict[str, int]) -> dict[str, Any]:
    """One step's route account in this layout, sound and with every fault."""
    config = tiny_config(model, parallel=parallel)
    mesh, policy = build(device, config)
    rollouts = [
        replace(rollout, policy_version=VERSION)
        for rollout in random_rollouts(policy.shape, LENGTHS)
    ]
    partial = list(rollouts)
    partial[1] = _without(rollouts[1], [3, 4])
    partial[4] = _without(rollouts[4], range(len(rollouts[4].routed_experts)))

    def dealt(step: Sequence[Rollout], **arguments: Any) -> Any:
        mine = [
            Scored(index=index, rollout=rollout, advantage=1.0 - index % 3)
            for index, rollout in enumerate(step)
            if rollout.group % mesh.world.size == mesh.world.rank
        ]
        asked: dict[str, Any] = {
            "num_updates": 2,
            "micro_batch_tokens": 96,
            "policy_versions": (VERSION,),
            "layers": policy.replay.layers,
        }
        return distribute(mine, mesh, policy.shape, PackingSpec(**(asked | arguments)))

    def step_row(step: Sequence[Rollout], **arguments: Any) -> dict[str, float]:
        batches, metrics = dealt(step, **arguments)
        parts: dict[str, list[Any]] = {name: [part] for name, part in metrics.items()}
        for batch in batches:
            for name, part in policy.forward_backward(batch).items():
                parts.setdefault(name, []).append(part)
        everybody = mesh.world.all_gather_object(parts)
        row = {}
        for name in {name for parts in everybody for name in parts if name.startswith("routing/")}:
            together = [part for parts in everybody for part in parts.get(name, [])]
            row[name] = type(together[0]).reduce(together)
        return row

    def complaint(action: Callable[[], Any]) -> str:
        try:
            action()
        except (RouteError, LedgerError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    batches, _ = dealt(rollouts)
    micro_batches = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
    sound, gaps = step_row(rollouts), step_row(partial, on_missing="live", min_coverage=0.5)
    reconcile(sound)
    reconcile(gaps)
    said = {
        "missing": complaint(lambda: dealt(partial)),
        "coverage": complaint(lambda: dealt(partial, on_missing="live", min_coverage=0.99)),
        "other version": complaint(
            lambda: dealt([*rollouts[:-1], replace(rollouts[-1], policy_version=VERSION - 1)])
        ),
        "allowed version": complaint(
            lambda: dealt(
                [*rollouts[:-1], replace(rollouts[-1], policy_version=VERSION - 1)],
                policy_versions=range(6, 8),
            )
        ),
        "beyond the experts": complaint(lambda: dealt([*rollouts[:-1], _beyond(rollouts[-1])])),
    }
    for name, change in {"swapped": _swapped, "shifted": _shifted, "layers": _layers}.items():
        with _patched(
            exchange, "decode", lambda decode, change=change: lambda m: change(decode(m))
        ):
            said[name] = complaint(lambda: dealt(rollouts))
    with _patched(Replay, "load", _losing):
        said["lost"] = complaint(lambda: reconcile(step_row(rollouts)))
    return {
        "sound": sound,
        "gaps": gaps,
        "said": said,
        "layers": list(policy.replay.layers),
        "data_rank": mesh.dp.rank,
        "packed_layers": sorted({m.routed_experts_NLK.shape[1] for m in micro_batches}),
        "itemsize": {m.routed_experts_NLK.element_size() for m in micro_batches}.pop(),
        "packed_tokens": sum(micro_batch.num_tokens for micro_batch in micro_batches),
    }


def _without(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    routes = rollout.routed_experts.copy()
    routes[list(rows)] = -1
    return replace(rollout, routed_experts=routes)


def _beyond(rollout: Rollout) -> Rollout:
    """An id that an int8 would make a legal one of: 256 + 3."""
    routes = rollout.routed_experts.copy()
    routes[0, 0, 0] = 259
    return replace(rollout, routed_experts=routes)


def _with_routes(item: Scored, routes: np.ndarray) -> Scored:
    return replace(item, rollout=replace(item.rollout, routed_experts=np.ascontiguousarray(routes)))


def _swapped(items: list[Scored]) -> list[Scored]:
    """The routes of two rollouts of a message change places, as far as lengths allow."""
    if len(items) < 2:
        return items
    one, two = (item.rollout.routed_experts for item in items[:2])
    rows = min(len(one), len(two))
    return [
        _with_routes(items[0], np.concatenate([two[:rows], one[rows:]])),
        _with_routes(items[1], np.concatenate([one[:rows], two[rows:]])),
        *items[2:],
    ]


def _shifted(items: list[Scored]) -> list[Scored]:
    return [_with_routes(item, np.roll(item.rollout.routed_experts, 1, axis=0)) for item in items]


def _layers(items: list[Scored]) -> list[Scored]:
    return [_with_routes(item, item.rollout.routed_experts[:, ::-1]) for item in items]


def _losing(load: Any) -> Any:
    """Every tenth row is lost between micro-batch and router: it would route live, and nobody would
    know.
    """

    def faulty(self: Replay, routes_NLK: Any, *args: Any, **kwargs: Any) -> None:
        routes_NLK = routes_NLK.clone()
        routes_NLK[::10] = -1
        load(self, routes_NLK, *args, **kwargs)

    return faulty


@contextmanager
def _patched(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, wrap(kept))
    try:
        yield
    finally:
        setattr(owner, name, kept)
