"""Send rollouts from the ranks that generated them to the ranks that train on them.

`r3.algo.packing` decides who trains on what; this module moves the bytes. Routes are most of them:
a rollout of T tokens sends (T-1) * L * K numbers of the smallest type to each rank that trains on
it, L being the MoE layers of that rank's pipeline stage. Ranks of one tensor- or context-parallel
group get the same rows, and each computes on its part.

Each layer's rows travel with a checksum over them and their tokens. It is compared with the packed
micro-batch, so rows of another sample, shifted rows and swapped layers are detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from r3.algo import packing
from r3.config import Config
from r3.metrics.reduce import Mean, Sum
from r3.models.shape import ModelShape
from r3.rollout.codec import checksums, decode, encode
from r3.rollout.scored import Scored
from r3.routing import ledger
from r3.runtime.mesh import Axis, Mesh
from r3.types import Batch, MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingSpec:
    """How a step's rollouts become batches, and which of them may be trained on.

    Attributes:
        micro_batch_tokens: largest packed length of a micro-batch, padding included.
        num_updates: optimizer updates made from these rollouts.
        layers: global numbers of the MoE layers whose routers this rank has; only their routes are
            sent to it. None = all.
        captured: the rollouts of a MoE model have routes (replay.mode r3).
        on_missing, min_coverage: what happens when routes are missing, see `ledger.admit`.
        policy_versions: policy versions whose rollouts may be trained on, ascending, the step's own
            version last. None = any.
    """

    micro_batch_tokens: int
    num_updates: int = 1
    layers: Sequence[int] | None = None
    captured: bool = True
    on_missing: Literal["error", "live"] = "error"
    min_coverage: float = 0.0
    policy_versions: Sequence[int] | None = None

    @classmethod
    def of_step(cls, config: Config, layers: Sequence[int], policy_version: int) -> PackingSpec:
        """Return the spec of a training step whose newest rollouts are of `policy_version`."""
        oldest = max(0, policy_version - config.rollout.max_staleness)
        return cls(
            micro_batch_tokens=config.train.micro_batch_tokens,
            num_updates=config.train.updates_per_step,
            layers=layers,
            captured=config.replay.mode == "r3",
            on_missing=config.replay.on_missing,
            min_coverage=config.replay.min_coverage,
            policy_versions=range(oldest, policy_version + 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """What the plan needs to know of a rollout on another rank."""

    index: int
    group: int
    tokens: int
    loss_tokens: int


def distribute(
    scored: Sequence[Scored], mesh: Mesh, shape: ModelShape, spec: PackingSpec
) -> tuple[list[Batch], dict[str, Any]]:
    """Send the step's rollouts to the ranks that train on them and pack them. All ranks must call.

    Every rank makes the same plan from the lengths of all rollouts; then rollouts travel once.

    Args:
        scored: the rollouts that this rank generated.
        mesh: the layout of the ranks.
        shape: the model.
        spec: how to pack, and which rollouts may be trained on.

    Returns:
        This rank's share of every update, with global denominators, and partials of metrics.

    Raises:
        RouteError: on every rank, if a route is missing that may not be, is of another policy
            version, or was damaged on the way.
    """
    moe_layers = shape.moe_layers if spec.captured else ()
    rows = ledger.admit(
        [item.rollout for item in scored],
        mesh.world,
        moe_layers=moe_layers,
        num_experts=shape.num_experts,
        policy_versions=spec.policy_versions,
        on_missing=spec.on_missing,
        min_coverage=spec.min_coverage,
    )
    scored = [_with_smallest_routes(item, shape.num_experts) for item in scored]
    lengths = gather_lengths(scored, mesh.world)
    multiple, each = mesh.length_multiples
    plan = packing.plan_updates(
        [-(-length.tokens // each) * each for length in lengths],
        [length.group for length in lengths],
        num_updates=spec.num_updates,
        num_ranks=mesh.dp.size,
        micro_batch_tokens=spec.micro_batch_tokens,
        multiple=multiple,
    )
    wanted = moe_layers if spec.layers is None or not moe_layers else spec.layers
    places = [moe_layers.index(layer) for layer in wanted]
    received = _send_by_plan(scored, plan, mesh, places)
    version = spec.policy_versions[-1] if spec.policy_versions else None
    batches = [
        _batch(update, lengths, received, mesh, shape, num_layers=len(places), version=version)
        for update in plan
    ]
    packed = (micro_batch for batch in batches for micro_batch in batch.micro_batches)
    faults = filter(None, (find_damage(micro_batch, received) for micro_batch in packed))
    ledger.raise_together(next(faults, ""), mesh.world)

    efficiency = packing.packing_efficiency(plan, [length.tokens for length in lengths])
    own = sum(item.rollout.num_response_tokens for item in scored if item.trains)
    metrics = rows | {
        # All ranks have the same efficiency: its mean over ranks is that number.
        "perf/packing_efficiency": Mean(total=efficiency, count=1.0),
        "rollout/trained_tokens": Sum(value=float(own)),
    }
    if moe_layers:
        num_bytes = sum(item.rollout.routed_experts.nbytes for item in received.values())
        metrics["routing/bytes"] = Sum(value=float(num_bytes))
    return batches, metrics


def _batch(
    update: packing.UpdatePlan,
    lengths: Sequence[Length],
    received: Mapping[int, Scored],
    mesh: Mesh,
    shape: ModelShape,
    *,
    num_layers: int,
    version: int | None,
) -> Batch:
    """This rank's share of an update, with global denominators."""
    members = [lengths[index] for index in update.rollout_ids]
    return Batch(
        micro_batches=tuple(
            pack_for(
                mesh,
                shape,
                [received[index] for index in indices],
                num_layers=num_layers,
                policy_version=version,
            )
            for indices in update.micro_batches[mesh.dp.rank]
        ),
        # At least 1: an update whose rollouts were all filtered has no loss, no gradient.
        num_loss_tokens=max(1, sum(length.loss_tokens for length in members)),
        num_sequences=max(1, sum(length.loss_tokens > 0 for length in members)),
    )


def gather_lengths(scored: Sequence[Scored], world: Axis) -> list[Length]:
    """Return the lengths of all rollouts of the step, by index. All ranks must call."""
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
        f"rollouts {sorted({length.index for length in lengths})[:8]}... "
        f"are not numbered 0..{len(lengths) - 1} exactly once"
    )
    return lengths


def _send_by_plan(
    scored: Sequence[Scored], plan: Sequence[packing.UpdatePlan], mesh: Mesh, places: Sequence[int]
) -> dict[int, Scored]:
    """Send each rollout to the ranks of the data-parallel rank that the plan names."""
    everybody = mesh.world.all_gather_object((mesh.dp.rank, places))
    destinations: dict[int, list[int]] = {}
    for update in plan:
        for data_rank, micro_batches in enumerate(update.micro_batches):
            ranks = [rank for rank, (of, _) in enumerate(everybody) if of == data_rank]
            destinations |= {index: ranks for indices in micro_batches for index in indices}
    return send_rollouts(
        scored, destinations, mesh.world, layers_of=[layers for _, layers in everybody]
    )


def send_rollouts(
    scored: Sequence[Scored],
    destinations: Mapping[int, Sequence[int]],
    world: Axis,
    layers_of: Sequence[Sequence[int]] | None = None,
) -> dict[int, Scored]:
    """Send each rollout to the world ranks in `destinations[index]`. All ranks must call.

    Bit-exact: tokens, masks, log-probabilities and routes travel as bytes.

    Args:
        scored: the rollouts of this rank.
        destinations: index of every rollout of the step -> world ranks that receive it.
        world: all ranks.
        layers_of: for each rank the places in the routes' layer axis that it receives; None = all.

    Returns:
        The rollouts that this rank received, by index.
    """
    outgoing: list[list[Scored]] = [[] for _ in range(world.size)]
    for item in scored:
        for rank in destinations[item.index]:
            outgoing[rank].append(item)
    messages = world.all_to_all_bytes(
        [
            encode(items, layers_of[rank] if layers_of else None)
            for rank, items in enumerate(outgoing)
        ]
    )
    received = {item.index: item for message in messages for item in decode(message)}
    expected = {index for index, ranks in destinations.items() if world.rank in ranks}
    assert received.keys() == expected, (
        f"rank {world.rank}: rollouts {sorted(expected ^ received.keys())[:8]} "
        "were lost between ranks or sent to the wrong rank"
    )
    return received


def pack_for(
    mesh: Mesh,
    shape: ModelShape,
    scored: Sequence[Scored],
    *,
    num_layers: int,
    policy_version: int | None = None,
) -> MicroBatch:
    """Pack rollouts into one micro-batch that this layout can divide.

    Args:
        mesh: the layout of the ranks.
        shape: the model.
        scored: the rollouts.
        num_layers: layers in their routes; 0 = no routes.
        policy_version: see `packing.pack`.
    """
    multiple, each = mesh.length_multiples
    return packing.pack(
        [item.rollout for item in scored],
        [item.index for item in scored],
        [item.advantage for item in scored],
        num_experts=shape.num_experts,
        num_layers=num_layers,
        topk=shape.topk if num_layers else 0,
        multiple=multiple,
        sequence_multiple=each,
        policy_version=policy_version,
        trains=[item.trains for item in scored],
    )


def find_damage(micro_batch: MicroBatch, received: Mapping[int, Scored]) -> str:
    """Compare the packed tokens and routes with the checksums that were sent.

    Args:
        micro_batch: the packed micro-batch.
        received: the rollouts that this rank received, by index.

    Returns:
        A message about the first damaged sequence; empty if there is none.
    """
    tokens_N, routes_NLK = micro_batch.tokens_N.numpy(), micro_batch.routed_experts_NLK.numpy()
    for index, (start, end) in zip(
        micro_batch.rollout_ids, pairwise(micro_batch.cu_seqlens), strict=True
    ):
        if index < 0 or received[index].checksums is None:
            continue
        rollout = received[index].rollout
        end = start + int(micro_batch.real_N[start:end].sum())
        packed = checksums(tokens_N[start:end], routes_NLK[start : end - 1])
        if packed != received[index].checksums:
            return (
                f"rollout {rollout.name}: its packed tokens and routes "
                f"are not those that were sent (checksums by layer {packed}, sent "
                f"{received[index].checksums}): rows of another rollout, shifted rows or rows of "
                "other layers"
            )
    return ""


def _with_smallest_routes(item: Scored, num_experts: int) -> Scored:
    """The rollout with routes of the smallest type. The engine's are; a dump's may not be."""
    routes, dtype = item.rollout.routed_experts, packing.route_dtype(num_experts)
    if routes.dtype == dtype:
        return item
    return replace(item, rollout=replace(item.rollout, routed_experts=routes.astype(dtype)))
