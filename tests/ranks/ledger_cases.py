"""The route ledger over real ranks: what is sent, what routers use, and the errors of faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3.algo.packing import with_advantages
from r3.routing import LedgerError, Replay, reconcile
from r3.runtime.device import Device
from r3.sync import PackingSpec, Received, distribute
from r3.sync import rollouts as exchange
from r3.types import Rollout, RouteError
from tests.errors import message_of
from tests.policies import LENGTHS, Parts, build, samples_of
from tests.tiny import random_rollouts, tiny_config
from tests.wrong_routes import patched, rows_lost, samples_swapped, with_routes

VERSION = 7


def account(device: Device, *, model: str, parallel: dict[str, int]) -> SimpleNamespace:
    """Make steps in this layout, without and with each fault.

    Returns:
        The ledger of steps on one rank.
        sound, gaps: routing/* of a step without missing rows, and of one with.
        messages: by fault.
        older: index of the one rollout of the version before.
        marked: rollouts of this rank that a step which allows that version marks as older.
        layers: MoE layers of this rank's routers.
        data_rank: rank on the data-parallel axis.
        packed_layers: layers in the routes of its micro-batches.
        itemsize: bytes per expert id.
    """
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
        mine = samples_of(mesh, step)
        asked: dict[str, Any] = {
            "num_updates": 2,
            "micro_batch_tokens": 96,
            "policy_versions": (VERSION,),
            "layers": policy.replay.layers,
        }
        batches, metrics = distribute(mine, mesh, policy.shape, PackingSpec(**(asked | arguments)))
        advantages_R = torch.tensor([1.0 - index % 3 for index in range(len(step))])
        return [with_advantages(batch, advantages_R) for batch in batches], metrics

    def step_row(step: Sequence[Rollout], **arguments: Any) -> dict[str, float]:
        batches, metrics = dealt(step, **arguments)
        reported, parts = [metrics, *map(policy.forward_backward, batches)], Parts()
        for each in chain.from_iterable(mesh.world.all_gather_object(reported)):
            parts.report(each)
        return {name: value for name, value in parts.row().items() if name.startswith("routing/")}

    def complaint(action: Callable[[], object]) -> str:
        return message_of(action, RouteError, LedgerError)

    batches, _ = dealt(rollouts)
    micro_batches = [*chain.from_iterable(batches)]
    sound, gaps = step_row(rollouts), step_row(partial, on_missing="live", min_coverage=0.5)
    reconcile(sound)
    reconcile(gaps)
    stale = [*rollouts[:-1], replace(rollouts[-1], policy_version=VERSION - 1)]
    allowed, _ = dealt(stale, policy_versions=(VERSION - 1, VERSION))
    messages = {
        "missing": complaint(lambda: dealt(partial)),
        "coverage": complaint(lambda: dealt(partial, on_missing="live", min_coverage=0.99)),
        "other version": complaint(lambda: dealt(stale)),
        "beyond the experts": complaint(lambda: dealt([*rollouts[:-1], _beyond(rollouts[-1])])),
    }
    for name, change in {
        "swapped": samples_swapped,
        "shifted": _shifted,
        "layers": _layers,
    }.items():
        with patched(exchange, "decode", lambda decode, change=change: lambda m: change(decode(m))):
            messages[name] = complaint(lambda: dealt(rollouts))
    with patched(Replay, "load", rows_lost):
        messages["lost"] = complaint(lambda: reconcile(step_row(rollouts)))
    return SimpleNamespace(
        sound=sound,
        gaps=gaps,
        messages=messages,
        older=sorted(each.key for each in rollouts).index(rollouts[-1].key),
        marked=[
            index
            for micro_batch in chain.from_iterable(allowed)
            for index, (start, end) in zip(
                micro_batch.rollout_ids, pairwise(micro_batch.cu_seqlens), strict=True
            )
            if index >= 0 and not (micro_batch.current_N * micro_batch.real_N)[start:end].any()
        ],
        layers=list(policy.replay.layers),
        data_rank=mesh.dp.rank,
        packed_layers=sorted({m.routed_experts_NLK.shape[1] for m in micro_batches}),
        itemsize={m.routed_experts_NLK.element_size() for m in micro_batches}.pop(),
        packed_tokens=sum(micro_batch.num_tokens for micro_batch in micro_batches),
    )


def _without(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    routes = rollout.routed_experts.copy()
    routes[list(rows)] = -1
    return replace(rollout, routed_experts=routes)


def _beyond(rollout: Rollout) -> Rollout:
    """An id that would become a legal one in int8: 256 + 3."""
    routes = rollout.routed_experts.copy()
    routes[0, 0, 0] = 259
    return replace(rollout, routed_experts=routes)


def _shifted(items: list[Received]) -> list[Received]:
    return [
        with_routes(item, np.roll(item.sample.rollout.routed_experts, 1, axis=0)) for item in items
    ]


def _layers(items: list[Received]) -> list[Received]:
    return [with_routes(item, item.sample.rollout.routed_experts[:, ::-1]) for item in items]
