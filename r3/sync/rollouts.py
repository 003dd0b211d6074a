"""Send rollouts from the ranks that generated them to the ranks that train on them.

`r3.algo.packing` decides who trains on what; this module moves the bytes. Routes are most of them:
a rollout of T tokens sends (T-1) * L * K numbers of the smallest type to each rank that trains on
it, L being the MoE layers of that rank's pipeline stage. Ranks of one tensor- or context-parallel
group get the same rows, and each computes on its part.

Each layer's rows travel with a checksum over them and their tokens. It is compared with the packed
micro-batch, so rows of another sample, shifted rows and swapped layers are detected.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from r3.algo import packing
from r3.config import Config
from r3.metrics.reduce import Mean, Sum
from r3.models.shape import ModelShape
from r3.routing import ledger
from r3.runtime.mesh import Axis, Mesh
from r3.types import Batch, Key, MicroBatch, Rollout, Sample


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
        filters_truncated: truncated rollouts have no loss (`algo.overlong_filter`).
        policy_versions: policy versions whose rollouts may be trained on, ascending, the step's own
            version last. None = any.
        restricted: every rollout needs a sampling mask.
    """

    micro_batch_tokens: int
    num_updates: int = 1
    layers: Sequence[int] | None = None
    captured: bool = True
    on_missing: Literal["error", "live"] = "error"
    min_coverage: float = 0.0
    filters_truncated: bool = False
    policy_versions: Sequence[int] | None = None
    restricted: bool = False

    def trains(self, rollout: Rollout) -> bool:
        """Whether the sampled tokens of a rollout have loss."""
        return not (self.filters_truncated and rollout.is_truncated)

    @classmethod
    def of_step(cls, config: Config, layers: Sequence[int], policy_version: int) -> PackingSpec:
        """Return the spec of a training step whose newest rollouts are of `policy_version`."""
        oldest = max(0, policy_version - config.rollout.max_staleness)
        return cls(
            micro_batch_tokens=config.train.micro_batch_tokens,
            num_updates=config.train.updates_per_step,
            layers=layers,
            captured=config.captures,
            on_missing=config.replay.on_missing,
            min_coverage=config.replay.min_coverage,
            filters_truncated=config.algo.overlong_filter,
            policy_versions=range(oldest, policy_version + 1),
            restricted=config.rollout.restricts,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """What the plan needs to know of a rollout on another rank."""

    key: Key
    tokens: int
    loss_tokens: int


class Received(NamedTuple):
    """A sample from another rank, and one checksum per layer of its routes as they were sent."""

    sample: Sample
    checksums: tuple[int, ...]


def distribute(
    samples: Sequence[Sample], mesh: Mesh, shape: ModelShape, spec: PackingSpec
) -> tuple[list[Batch], dict[str, Any]]:
    """Send the step's rollouts to the ranks that train on them and pack them. All ranks must call.

    Every rank makes the same plan from the lengths of all rollouts; then rollouts travel once.

    Args:
        samples: those that this rank generated.
        mesh: the layout of the ranks.
        shape: the model.
        spec: how to pack, and which rollouts may be trained on.

    Returns:
        This rank's share of every update, with global denominators and without advantages, and
        partials of metrics.

    Raises:
        RouteError: on every rank, if a route is missing that may not be, is of another policy
            version, or was damaged on the way.
    """
    moe_layers = shape.moe_layers if spec.captured else ()
    rows = ledger.admit(
        [sample.rollout for sample in samples],
        mesh.world,
        moe_layers=moe_layers,
        num_experts=shape.num_experts,
        policy_versions=spec.policy_versions,
        on_missing=spec.on_missing,
        min_coverage=spec.min_coverage,
    )
    samples = [_with_smallest_routes(sample, shape.num_experts) for sample in samples]
    lengths = gather_lengths(samples, mesh.world, spec)
    multiple, of_sequence = mesh.length_multiples
    plan = packing.plan_updates(
        [-(-length.tokens // of_sequence) * of_sequence for length in lengths],
        [length.key[0] for length in lengths],
        num_updates=spec.num_updates,
        num_ranks=mesh.dp.size,
        micro_batch_tokens=spec.micro_batch_tokens,
        multiple=multiple,
    )
    wanted = moe_layers if spec.layers is None or not moe_layers else spec.layers
    places = [moe_layers.index(layer) for layer in wanted]
    by_key = _send_by_plan(samples, lengths, plan, mesh, places)
    received = {i: by_key[length.key] for i, length in enumerate(lengths) if length.key in by_key}
    batches = [
        _batch(update, lengths, received, mesh, shape, spec, num_layers=len(places))
        for update in plan
    ]
    packed = (micro_batch for batch in batches for micro_batch in batch)
    faults = filter(None, (find_damage(micro_batch, received) for micro_batch in packed))
    ledger.raise_together(next(faults, ""), mesh.world)

    efficiency = packing.packing_efficiency(plan, [length.tokens for length in lengths])
    own = sum(each.rollout.num_response_tokens for each in samples if spec.trains(each.rollout))
    metrics = rows | {
        # All ranks have the same efficiency: its mean over ranks is that number.
        "perf/packing_efficiency": Mean(total=efficiency, count=1.0),
        "rollout/trained_tokens": Sum(value=float(own)),
    }
    if moe_layers:
        num_bytes = sum(each.sample.rollout.routed_experts.nbytes for each in received.values())
        metrics["routing/bytes"] = Sum(value=float(num_bytes))
    return batches, metrics


def _batch(
    update: packing.UpdatePlan,
    lengths: Sequence[Length],
    received: Mapping[int, Received],
    mesh: Mesh,
    shape: ModelShape,
    spec: PackingSpec,
    *,
    num_layers: int,
) -> Batch:
    """This rank's share of an update, with global denominators."""
    members = [lengths[index] for index in update.rollout_ids]
    return packing.as_batch(
        (
            pack_for(
                mesh,
                shape,
                {index: received[index].sample.rollout for index in indices},
                num_layers=num_layers,
                spec=spec,
            )
            for indices in update.micro_batches[mesh.dp.rank]
        ),
        # At least 1: an update whose rollouts were all filtered has no loss, no gradient.
        num_loss_tokens=max(1, sum(length.loss_tokens for length in members)),
        num_sequences=max(1, sum(length.loss_tokens > 0 for length in members)),
    )


def gather_lengths(samples: Sequence[Sample], world: Axis, spec: PackingSpec) -> list[Length]:
    """Return the lengths of all rollouts of the step, by key. All ranks must call."""
    own = [
        Length(
            key=sample.rollout.key,
            tokens=len(sample.rollout.tokens_T),
            loss_tokens=sample.rollout.num_response_tokens if spec.trains(sample.rollout) else 0,
        )
        for sample in samples
    ]
    lengths = [length for part in world.all_gather_object(own) for length in part]
    lengths.sort(key=lambda length: length.key)
    for one, other in pairwise(lengths):
        assert one.key != other.key, f"two rollouts have the key {one.key}"
    return lengths


def _send_by_plan(
    samples: Sequence[Sample],
    lengths: Sequence[Length],
    plan: Sequence[packing.UpdatePlan],
    mesh: Mesh,
    places: Sequence[int],
) -> dict[Key, Received]:
    """Send each rollout to the ranks of the data-parallel rank that the plan names."""
    everybody = mesh.world.all_gather_object((mesh.dp.rank, places))
    destinations: dict[Key, list[int]] = {}
    for update in plan:
        for data_rank, micro_batches in enumerate(update.micro_batches):
            ranks = [rank for rank, (of, _) in enumerate(everybody) if of == data_rank]
            for indices in micro_batches:
                destinations |= {lengths[index].key: ranks for index in indices}
    return send_samples(
        samples, destinations, mesh.world, layers_of=[layers for _, layers in everybody]
    )


def send_samples(
    samples: Sequence[Sample],
    destinations: Mapping[Key, Sequence[int]],
    world: Axis,
    layers_of: Sequence[Sequence[int]] | None = None,
) -> dict[Key, Received]:
    """Send each sample to the world ranks in `destinations[key]`. All ranks must call.

    Bit-exact: tokens, masks, log-probabilities and routes travel as bytes.

    Args:
        samples: those of this rank.
        destinations: key of every sample of the step -> world ranks that receive it.
        world: all ranks.
        layers_of: for each rank the places in the routes' layer axis that it receives; None = all.

    Returns:
        The samples that this rank received.
    """
    outgoing: list[list[Received]] = [[] for _ in range(world.size)]
    for sample in samples:
        rollout = sample.rollout
        sums = checksums(rollout.tokens_T, rollout.routed_experts)
        for rank in destinations[rollout.key]:
            sent = Received(sample, sums)
            outgoing[rank].append(_of_layers(sent, layers_of[rank]) if layers_of else sent)
    messages = world.all_to_all_bytes([pickle.dumps(part) if part else b"" for part in outgoing])
    received = {each.sample.rollout.key: each for message in messages for each in decode(message)}
    expected = {key for key, ranks in destinations.items() if world.rank in ranks}
    assert received.keys() == expected, (
        f"rank {world.rank}: rollouts {sorted(expected ^ received.keys())[:8]} "
        "were lost between ranks or sent to the wrong rank"
    )
    return received


def decode(message: bytes) -> list[Received]:
    """What a rank sent to this one."""
    return list(pickle.loads(message)) if message else []


def _of_layers(sent: Received, layers: Sequence[int]) -> Received:
    """The sample with the routes of some layers only, by their places in the layer axis."""
    rollout = sent.sample.rollout
    # Without any layer the routes look as they do for a dense model.
    routes = (
        rollout.routed_experts[:, list(layers)]
        if layers
        else np.zeros_like(rollout.routed_experts, shape=(len(rollout.routed_experts), 0, 0))
    )
    rollout = replace(rollout, routed_experts=np.ascontiguousarray(routes))
    sums = tuple(sent.checksums[layer] for layer in layers)
    return Received(replace(sent.sample, rollout=rollout), sums)


def checksums(tokens_T: np.ndarray, routes: np.ndarray) -> tuple[int, ...]:
    """CRC-32 of the tokens and the rows [T-1, K] of each layer of the routes [T-1, L, K]."""
    tokens = zlib.crc32(tokens_T.astype(np.int64).tobytes())
    return tuple(
        zlib.crc32(np.ascontiguousarray(routes[:, layer]).tobytes(), tokens)
        for layer in range(routes.shape[1])
    )


def pack_for(
    mesh: Mesh,
    shape: ModelShape,
    rollouts: Mapping[int, Rollout],
    *,
    num_layers: int,
    spec: PackingSpec | None = None,
) -> MicroBatch:
    """Pack rollouts into one micro-batch that this layout can divide.

    Args:
        mesh: the layout of the ranks.
        shape: the model.
        rollouts: by their index in the step.
        num_layers: layers in their routes; 0 = no routes.
        spec: of the step; None: there is none.
    """
    multiple, of_sequence = mesh.length_multiples
    versions = spec.policy_versions if spec else None
    return packing.pack(
        [*rollouts.values()],
        [*rollouts],
        num_experts=shape.num_experts,
        num_layers=num_layers,
        topk=shape.topk if num_layers else 0,
        multiple=multiple,
        sequence_multiple=of_sequence,
        policy_version=versions[-1] if versions else None,
        trains=[spec is None or spec.trains(one) for one in rollouts.values()],
        restricted=spec is not None and spec.restricted,
    )


def find_damage(micro_batch: MicroBatch, received: Mapping[int, Received]) -> str:
    """Compare the packed tokens and routes with the checksums that were sent.

    Args:
        micro_batch: the packed micro-batch.
        received: the samples that this rank received, by their index in the step.

    Returns:
        A message about the first damaged sequence; empty if there is none.
    """
    tokens_N, routes_NLK = micro_batch.tokens_N.numpy(), micro_batch.routed_experts_NLK.numpy()
    for index, (start, end) in zip(
        micro_batch.rollout_ids, pairwise(micro_batch.cu_seqlens), strict=True
    ):
        if index < 0:
            continue
        sample, sent = received[index]
        end = start + int(micro_batch.real_N[start:end].sum())
        packed = checksums(tokens_N[start:end], routes_NLK[start : end - 1])
        if packed != sent:
            return (
                f"rollout {sample.rollout.name}: its packed tokens and routes "
                f"are not those that were sent (checksums by layer {packed}, sent "
                f"{sent}): rows of another rollout, shifted rows or rows of other layers"
            )
    return ""


def _with_smallest_routes(sample: Sample, num_experts: int) -> Sample:
    """The sample with routes of the smallest type. The engine's are; a dump's may not be."""
    routes, dtype = sample.rollout.routed_experts, packing.route_dtype(num_experts)
    if routes.dtype == dtype:
        return sample
    rollout = replace(sample.rollout, routed_experts=routes.astype(dtype))
    return replace(sample, rollout=rollout)
