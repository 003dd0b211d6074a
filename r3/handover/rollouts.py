"""Rollouts from the ranks that generated them to the ranks that train on them. Moves bytes; the plan is made in `packing`.

Routes are most of the bytes: a rollout of T tokens sends (T-1) * L * K of the smallest type to each rank that trains on it,
L being the MoE layers of that rank's pipeline stage. Ranks of one tensor- or context-parallel group get the same rows and
compute on their part. Each layer's rows travel with a checksum over them and the tokens they are of, which is checked in the
packed micro-batch: rows of another sample, shifted rows and swapped layers do not get past it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from r3.algo import packing
from r3.metrics.reduce import Mean, Sum
from r3.models.shape import ModelShape
from r3.rollout.codec import checksums, decode, encode
from r3.rollout.scored import Scored
from r3.routing import ledger
from r3.runtime.mesh import Axis, Mesh
from r3.types import Batch, MicroBatch, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """What the plan must know of a rollout that another rank holds."""

    index: int
    group: int
    tokens: int
    loss_tokens: int


def gather_lengths(scored: Sequence[Scored], world: Axis) -> list[Length]:
    """Lengths of all rollouts of the step, by index, the same on every rank. All ranks must call."""
    own = [
        Length(
            index=item.index,
            group=item.rollout.group,
            tokens=len(item.rollout.tokens_T),
            loss_tokens=item.rollout.num_response_tokens if item.trains else 0,
        )
        for item in scored
    ]
    lengths = sorted(
        (length for part in world.all_gather_object(own) for length in part),
        key=lambda length: length.index,
    )
    assert [length.index for length in lengths] == list(range(len(lengths))), (
        f"rollouts {sorted({length.index for length in lengths})[:8]}... are not numbered 0..{len(lengths) - 1} exactly once"
    )
    return lengths


def exchange(
    scored: Sequence[Scored],
    destinations: Mapping[int, Sequence[int]],
    world: Axis,
    layers_of: Sequence[Sequence[int]] | None = None,
) -> dict[int, Scored]:
    """Send each rollout to the world ranks in `destinations[index]`; returns what this rank trains on, by index.

    `layers_of[rank]` are the places in the routes' layer axis that the rank gets; None = all. Bit-exact: tokens, masks,
    log-probabilities and routes travel as the bytes they are. All ranks must call.
    """
    outgoing: list[list[Scored]] = [[] for _ in range(world.size)]
    for item in scored:
        for rank in destinations[item.index]:
            outgoing[rank].append(item)
    arrived = world.all_to_all_bytes(
        [
            encode(items, layers_of[rank] if layers_of else None)
            for rank, items in enumerate(outgoing)
        ]
    )
    received = {item.index: item for message in arrived for item in decode(message)}
    expected = {index for index, ranks in destinations.items() if world.rank in ranks}
    assert received.keys() == expected, (
        f"rank {world.rank}: rollouts {sorted(expected ^ received.keys())[:8]} went astray between ranks"
    )
    return received


def distribute(
    scored: Sequence[Scored],
    mesh: Mesh,
    shape: ModelShape,
    *,
    num_updates: int,
    micro_batch_tokens: int,
    captured: bool = True,
    on_missing: Literal["error", "live"] = "error",
    min_coverage: float = 0.0,
    policy_versions: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[list[Batch], dict[str, Any]]:
    """This rank's share of every update of the step, packed, and metric partials. All ranks must call.

    Every rank makes the same plan from everybody's lengths; then rollouts travel once. Denominators are global.

    Args:
        captured: whether the engine captures routes at all (it does in replay mode r3).
        on_missing, min_coverage: what missing routes do, see `ledger.admit`.
        versions: versions of the policy whose rollouts may be trained on in this step, the step's own last; None = any (a dump
            scored again).
        layers: global numbers of the MoE layers whose routers this rank holds; only their routes come. None = all.

    Raises:
        RouteError: on every rank: a route is missing that may not, is of another version, or was damaged on the way.
    """
    shape_layers = shape.moe_layers if captured else ()
    ledger.admit(
        [item.rollout for item in scored],
        mesh.world,
        moe_layers=shape_layers,
        num_experts=shape.num_experts,
        policy_versions=policy_versions,
        on_missing=on_missing,
        min_coverage=min_coverage,
    )
    scored = [_smallest(item, shape.num_experts) for item in scored]
    places = [
        shape_layers.index(layer)
        for layer in (shape_layers if layers is None else layers)
        if captured
    ]
    lengths = gather_lengths(scored, mesh.world)
    whole, each = length_multiples(mesh)
    plan = packing.plan(
        [-(-length.tokens // each) * each for length in lengths],
        [length.group for length in lengths],
        num_updates=num_updates,
        num_ranks=mesh.dp.size,
        micro_batch_tokens=micro_batch_tokens,
        multiple=whole,
    )
    data_rank_of, layers_of = zip(
        *mesh.world.all_gather_object((mesh.dp.rank, places)), strict=True
    )
    destinations: dict[int, list[int]] = {}
    for update in plan:
        for data_rank, micro_batches in enumerate(update.micro_batches):
            ranks = [rank for rank, of in enumerate(data_rank_of) if of == data_rank]
            destinations |= {index: ranks for micro_batch in micro_batches for index in micro_batch}
    mine = exchange(scored, destinations, mesh.world, layers_of)

    batches = []
    for update in plan:
        members = [
            lengths[i] for rank in update.micro_batches for micro_batch in rank for i in micro_batch
        ]
        micro_batches_of_rank = tuple(
            pack_for(
                mesh,
                shape,
                [mine[i] for i in micro_batch],
                num_layers=len(places),
                policy_version=policy_versions[-1] if policy_versions else None,
            )
            for micro_batch in update.micro_batches[mesh.dp.rank]
        )
        batches.append(
            Batch(
                micro_batches=micro_batches_of_rank,
                # At least 1: an update whose answers were all filtered has no loss, and no gradient.
                num_loss_tokens=max(1, sum(length.loss_tokens for length in members)),
                num_sequences=max(1, sum(length.loss_tokens > 0 for length in members)),
            )
        )
    packed = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
    ledger.agree(
        next(filter(None, (damage(micro_batch, mine) for micro_batch in packed)), ""), mesh.world
    )
    efficiency = packing.packing_efficiency(plan, [length.tokens for length in lengths])
    metrics: dict[str, Any] = {
        "perf/packing_efficiency": Mean(total=efficiency, count=1.0)  # the same on all ranks
    }
    if captured:
        metrics |= ledger.captured_rows([item.rollout for item in scored])
        arrived = sum(item.rollout.routed_experts.nbytes for item in mine.values())
        metrics["routing/bytes"] = Sum(value=float(arrived))
    return batches, metrics


def length_multiples(mesh: Mesh) -> tuple[int, int]:
    """(of a micro-batch, of each sequence in it): what context and sequence parallelism cut into equal parts."""
    each = 2 * mesh.cp.size if mesh.cp.size > 1 else 1
    return each * mesh.tp.size, each


def pack_for(
    mesh: Mesh,
    shape: ModelShape,
    scored: Sequence[Scored],
    *,
    num_layers: int,
    policy_version: int | None = None,
) -> MicroBatch:
    """Pack whole rollouts, whose routes have `num_layers` layers, into one micro-batch that this layout can cut."""
    whole, each = length_multiples(mesh)
    return packing.pack(
        [item.rollout if item.trains else _without_loss(item.rollout) for item in scored],
        [item.index for item in scored],
        [item.advantage for item in scored],
        num_experts=shape.num_experts,
        num_layers=num_layers,
        topk=shape.topk if num_layers else 0,
        multiple=whole,
        sequence_multiple=each,
        policy_version=policy_version,
    )


def _without_loss(rollout: Rollout) -> Rollout:
    return replace(rollout, loss_mask_T=np.zeros_like(rollout.loss_mask_T))


def damage(micro_batch: MicroBatch, mine: Mapping[int, Scored]) -> str:
    """What is said of the first packed sequence whose tokens and routes are not those that were sent; empty when all are.

    `mine` are the rollouts that came to this rank, by index.
    """
    tokens_N, routes_NLK = micro_batch.tokens_N.numpy(), micro_batch.routed_experts_NLK.numpy()
    for index, (start, end) in zip(
        micro_batch.rollout_ids, pairwise(micro_batch.cu_seqlens), strict=True
    ):
        if index < 0 or mine[index].checksums is None:
            continue
        rollout = mine[index].rollout
        end = start + int(micro_batch.real_N[start:end].sum())
        found = checksums(tokens_N[start:end], routes_NLK[start : end - 1])
        if found != mine[index].checksums:
            return (
                f"rollout {rollout.prompt_id}/{rollout.sample_index}: its packed tokens and routes are not those that were sent "
                f"(checksums by layer {found}, sent {mine[index].checksums}): rows of another rollout, shifted, or of "
                "other layers"
            )
    return ""


def _smallest(item: Scored, num_experts: int) -> Scored:
    """The rollout with its routes, known to be legal, in the smallest type: the engine's are, a dump's may not be."""
    routes, dtype = item.rollout.routed_experts, packing.route_dtype(num_experts)
    if routes.dtype == dtype:
        return item
    return replace(item, rollout=replace(item.rollout, routed_experts=routes.astype(dtype)))
