"""Which experts every token went to, read back at the routers, and what replay refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3.layers import local_tokens, router_rows
from r3.runtime.device import Device
from r3.types import Rollout
from tests.errors import message_of
from tests.policies import (
    LENGTHS,
    batches_of,
    build,
    build_with_batch,
    one_update,
    padded_backward,
    padded_rows,
    read_back,
    routing_map,
)
from tests.tiny import random_rollouts, tiny_config


def digest(rows: Iterable[tuple[int, int, int, list[int]]]) -> int:
    """Digest of a set of (rollout, position, layer, sorted experts).

    The order does not matter, and digests of disjoint sets add up modulo 2^64.
    """
    total = 0
    for row in rows:
        total += int.from_bytes(
            hashlib.blake2b(repr(row).encode(), digest_size=8).digest(), "little"
        )
    return total % 2**64


def digest_of_rollouts(rollouts: Sequence[Rollout], layers: Sequence[int]) -> int:
    """Digest of what the routers of any layout must do with these rollouts."""
    return digest(
        (index, position, layer, sorted(experts))
        for index, rollout in enumerate(rollouts)
        for position, row in enumerate(rollout.routed_experts.tolist())
        for layer, experts in zip(layers, row, strict=True)
    )


def routes_used(
    device: Device,
    *,
    model: str,
    parallel: dict[str, Any],
    micro_batch_tokens: int = 96,
    padded: bool = False,
) -> SimpleNamespace:
    """Compare the experts that each token went to, read back at every router, with its routes.

    Then record routes in one pass and replay them in the next.

    Returns:
        What one rank's routers did.
        slots: captured (token, layer) slots that were read back.
        wrong: slots whose token went to other experts than its routes say.
        differing: log-probabilities that differ, bit for bit, between recording and replaying.
        digest: of all slots read back; the ranks' digests add up.
        expected: digest of all rollouts.
        shifted: the same with one rollout's routes late by a token.
    """
    mesh, policy = build(device, tiny_config(model, parallel=parallel))
    layers = policy.replay.layers
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=micro_batch_tokens, layers=layers)
    with read_back(policy) as used:
        if padded:
            padded_backward(policy, batch)
        else:
            policy.score(batch, mode="replay")
    slots = wrong = 0
    seen: list[tuple[int, int, int, list[int]]] = []
    for i, micro_batch in enumerate(batch):
        # The token of each of a router's rows: sliced or padded like the routes.
        lengths = torch.tensor([end - start for start, end in pairwise(micro_batch.cu_seqlens)])
        rollout_N = torch.tensor(micro_batch.rollout_ids).repeat_interleave(lengths)
        names_N = torch.where(
            micro_batch.captured_N, rollout_N * 1000 + micro_batch.positions_N, -1
        )
        if padded:
            names = padded_rows(names_N, micro_batch.cu_seqlens)
            routes_NLK = padded_rows(micro_batch.routed_experts_NLK, micro_batch.cu_seqlens)
        else:
            named = replace(micro_batch, routed_experts_NLK=names_N[:, None, None])
            parts = [local_tokens(one, mesh.cp, device.torch) for one in (named, micro_batch)]
            own = router_rows(parts[0], mesh.tp)
            names_NLK, routes_NLK = (part.routed_experts_NLK[own] for part in parts)
            names = names_NLK[:, 0, 0]
        captured = names >= 0
        for position, number in enumerate(layers):
            given = routing_map(routes_NLK[captured, position], policy.shape.num_experts)
            found = used[number][i][captured]
            slots += len(found)
            wrong += int((found != given).any(-1).sum())
            for name, row in zip(names[captured].tolist(), found, strict=True):
                seen.append((*divmod(name, 1000), number, row.nonzero().flatten().tolist()))
    recorded = policy.score(batch, mode="record")
    # As with replay.mode r2, whose micro-batches have no routes of their own.
    bare = [replace(one, routed_experts_NLK=one.routed_experts_NLK[:, :0, :0]) for one in batch]
    replayed = policy.score(
        bare, mode="replay", recorded_routes=recorded.ledger.recorded[: len(bare)]
    )
    differing = sum(
        int((one != other).sum())
        for one, other in zip(recorded.logprobs, replayed.logprobs, strict=True)
    )
    rollouts = random_rollouts(policy.shape, LENGTHS)
    late = replace(rollouts[3], routed_experts=np.roll(rollouts[3].routed_experts, 1, axis=0))
    moe_layers = policy.shape.moe_layers
    return SimpleNamespace(
        slots=slots,
        wrong=wrong,
        differing=differing,
        micro_batches=len(batch),
        digest=digest(seen),
        expected=digest_of_rollouts(rollouts, moe_layers),
        shifted=digest_of_rollouts([*rollouts[:3], late, *rollouts[4:]], moe_layers),
    )


def replay_guards(device: Device, *, model: str) -> SimpleNamespace:
    """Make each mistake that replay must refuse; then use it as usual.

    Returns:
        Instances in Megatron's class-level list, and the messages of what replay refuses.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay

    _, policy, batch = build_with_batch(device, tiny_config(model))
    micro_batch = batch[0]
    listed = len(RouterReplay.global_router_replay_instances)

    def load() -> None:
        captured = micro_batch.captured_N
        policy.replay.load(micro_batch.routed_experts_NLK, captured, rows=int(captured.sum()))

    def never_used() -> None:
        with policy.replay.schedule("replay", training=False):
            load()

    def loaded_twice() -> None:
        with policy.replay.schedule("replay", training=False):
            load()
            load()

    def not_loaded() -> None:
        with policy.replay.schedule("replay", training=False), torch.no_grad():
            policy.chunks[0](micro_batch.tokens_N[None], micro_batch.positions_N[None], None)

    def too_few_rows() -> None:
        with policy.replay.schedule("replay", training=False), torch.no_grad():
            policy.replay.load(
                micro_batch.routed_experts_NLK[:-3], micro_batch.captured_N[:-3], rows=1
            )
            policy.chunks[0](micro_batch.tokens_N[None], micro_batch.positions_N[None], None)

    actions = (never_used, loaded_twice, not_loaded, too_few_rows)
    messages = {action.__name__: message_of(action, AssertionError) for action in actions}
    # State was cleared each time: an ordinary pass still works.
    policy.score(batch, mode="replay")
    broken = replace(micro_batch, advantages_N=micro_batch.advantages_N * float("nan"))
    bad = (broken, *batch[1:])
    messages["nan"] = message_of(
        lambda: one_update(policy, bad, total_updates=10), FloatingPointError
    )
    return SimpleNamespace(listed=listed, messages=messages)
