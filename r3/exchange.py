"""Rollouts from the ranks that generated them to the ranks that train on them. Moves bytes; the plan is made in `packing`.

Routes are most of the bytes: a rollout of T tokens sends (T-1) * L * K of the smallest type to each rank that trains on it,
L being the MoE layers of that rank's pipeline stage. Ranks of one tensor- or context-parallel group get the same rows and
compute on their part. Each layer's rows travel with a checksum over them and the tokens they are of, which is checked in the
packed micro-batch: rows of another sample, shifted rows and swapped layers do not get past it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import load, save

from r3 import ledger, packing
from r3.advantage import ADVANTAGES, overlong_penalty
from r3.config import Config
from r3.diagnostics import Mean, Sum
from r3.mesh import Axis, Mesh
from r3.rollout import Answers
from r3.rundir import RunDir
from r3.shape import ModelShape
from r3.types import Batch, MicroBatch, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A rollout with what was made of it.

    `index` is its place among all rollouts of the step, `parts` what each component of the reward gave. One that does not
    `train` counted for its group's baseline, and gets no loss (algo.overlong_filter). `checksums` came with it when it was
    sent here: one for each layer of its routes, over tokens and rows.
    """

    index: int
    rollout: Rollout
    advantage: float
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    trains: bool = True
    checksums: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """What all rollouts of the step earned, of every rank and by index, the overlong penalty taken off; float64.

    `names_R` are (group, member) of each: the index counts on where a conversation was left out.
    """

    rewards_R: torch.Tensor
    groups_R: torch.Tensor
    names_R: tuple[tuple[int, int], ...]

    @property
    def groups_with_signal(self) -> list[int]:
        """Groups whose rewards are not all equal, ascending: those that teach something."""
        by_group: dict[int, set[float]] = {}
        for group, reward in zip(self.groups_R.tolist(), self.rewards_R.tolist(), strict=True):
            by_group.setdefault(group, set()).add(reward)
        return sorted(group for group, found in by_group.items() if len(found) > 1)

    @property
    def metrics(self) -> dict[str, Any]:
        """The partial of reward/shaped_mean, the same on all ranks."""
        return {"reward/shaped_mean": Mean(float(self.rewards_R.sum()), float(len(self.rewards_R)))}


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """What the plan must know of a rollout that another rank holds."""

    index: int
    group: int
    tokens: int
    loss_tokens: int


def gather_rewards(answers: Answers, world: Axis, config: Config) -> Rewards:
    """Everybody's rewards: advantages may need statistics of the whole step, in an order no layout changes.

    All ranks must call.
    """
    length, algo = config.rollout.max_response_tokens, config.algo
    own = [
        (
            (rollout.group, rollout.member),
            reward
            + algo.overlong_penalty
            * overlong_penalty(
                rollout.num_tokens_after_prompt, max_response_tokens=length, buffer=algo.overlong_buffer
            ),
        )
        for rollout, reward in zip(answers.rollouts, answers.rewards, strict=True)
    ]
    everybody = sorted(item for part in world.all_gather_object(own) for item in part)
    return Rewards(
        rewards_R=torch.tensor([reward for _, reward in everybody], dtype=torch.float64),
        groups_R=torch.tensor([group for (group, _), _ in everybody], dtype=torch.int64),
        names_R=tuple(name for name, _ in everybody),
    )


def score_all(answers: Answers, rewards: Rewards, config: Config) -> list[Scored]:
    """This rank's answers with their advantages and their numbers in the step. `rewards` are everybody's."""
    advantages_R = ADVANTAGES[config.algo.advantage](rewards.rewards_R, rewards.groups_R).tolist()
    index_of = {name: index for index, name in enumerate(rewards.names_R)}
    scored = []
    for rollout, reward in zip(answers.rollouts, answers.rewards, strict=True):
        index = index_of[rollout.group, rollout.member]
        trains = not (config.algo.overlong_filter and rollout.finish_reason == "length")
        scored.append(
            Scored(
                index=index,
                rollout=rollout,
                advantage=advantages_R[index],
                reward=reward,
                parts=answers.parts.get((rollout.group, rollout.member), {}),
                trains=trains,
            )
        )
    return scored


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
        (length for part in world.all_gather_object(own) for length in part), key=lambda length: length.index
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
        [encode(items, layers_of[rank] if layers_of else None) for rank, items in enumerate(outgoing)]
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
    versions: Sequence[int] | None = None,
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
        versions=versions,
        on_missing=on_missing,
        min_coverage=min_coverage,
    )
    scored = [_smallest(item, shape.num_experts) for item in scored]
    places = [shape_layers.index(layer) for layer in (shape_layers if layers is None else layers) if captured]
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
    data_rank_of, layers_of = zip(*mesh.world.all_gather_object((mesh.dp.rank, places)), strict=True)
    destinations: dict[int, list[int]] = {}
    for update in plan:
        for data_rank, micro_batches in enumerate(update.micro_batches):
            ranks = [rank for rank, of in enumerate(data_rank_of) if of == data_rank]
            destinations |= {index: ranks for micro_batch in micro_batches for index in micro_batch}
    mine = exchange(scored, destinations, mesh.world, layers_of)

    batches = []
    for update in plan:
        members = [lengths[i] for rank in update.micro_batches for micro_batch in rank for i in micro_batch]
        micro_batches_of_rank = tuple(
            pack_for(
                mesh,
                shape,
                [mine[i] for i in micro_batch],
                num_layers=len(places),
                version=versions[-1] if versions else None,
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
    ledger.agree(next(filter(None, (damage(micro_batch, mine) for micro_batch in packed)), ""), mesh.world)
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
    mesh: Mesh, shape: ModelShape, scored: Sequence[Scored], *, num_layers: int, version: int | None = None
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
        version=version,
    )


def _without_loss(rollout: Rollout) -> Rollout:
    return replace(rollout, loss_mask_T=np.zeros_like(rollout.loss_mask_T))


def damage(micro_batch: MicroBatch, mine: Mapping[int, Scored]) -> str:
    """What is said of the first packed sequence whose tokens and routes are not those that were sent; empty when all are.

    `mine` are the rollouts that came to this rank, by index.
    """
    tokens_N, routes_NLK = micro_batch.tokens_N.numpy(), micro_batch.routed_experts_NLK.numpy()
    for index, (start, end) in zip(micro_batch.rollout_ids, pairwise(micro_batch.cu_seqlens), strict=True):
        if index < 0 or mine[index].checksums is None:
            continue
        rollout = mine[index].rollout
        end = start + int(micro_batch.real_N[start:end].sum())
        found = checksums(tokens_N[start:end], routes_NLK[start : end - 1])
        if found != mine[index].checksums:
            return (
                f"rollout {rollout.prompt_id}/{rollout.member}: its packed tokens and routes are not those that were sent "
                f"(checksums by layer {found}, sent {mine[index].checksums}): rows of another rollout, shifted, or of "
                "other layers"
            )
    return ""


def checksums(tokens_T: np.ndarray, routes: np.ndarray) -> tuple[int, ...]:
    """CRC-32 of the tokens and the rows `[T-1, K]` of each layer of the routes `[T-1, L, K]`."""
    tokens = zlib.crc32(tokens_T.astype(np.int64).tobytes())
    return tuple(
        zlib.crc32(np.ascontiguousarray(routes[:, layer]).tobytes(), tokens)
        for layer in range(routes.shape[1])
    )


def _smallest(item: Scored, num_experts: int) -> Scored:
    """The rollout with its routes, known to be legal, in the smallest type: the engine's are, a dump's may not be."""
    routes, dtype = item.rollout.routed_experts, packing.route_dtype(num_experts)
    if routes.dtype == dtype:
        return item
    return replace(item, rollout=replace(item.rollout, routed_experts=routes.astype(dtype)))


def dump_rollouts(run_dir: RunDir, step: int, scored: Sequence[Scored], world: Axis) -> None:
    """Write all rollouts of the step, of every rank, to the run's folder. All ranks must call."""
    counts = world.all_gather_object([item.index for item in scored])
    everything = exchange(scored, {index: [0] for part in counts for index in part}, world)
    if world.rank == 0:
        items = [everything[index] for index in sorted(everything)]
        run_dir.write_rollouts(
            step,
            [item.rollout for item in items],
            [item.reward for item in items],
            [item.advantage for item in items],
            [item.parts for item in items],
        )


def encode(items: Sequence[Scored], layers: Sequence[int] | None = None) -> bytes:
    """Rollouts as one safetensors blob: arrays laid end to end, the rest as JSON.

    `layers` are places in the routes' layer axis, of those that travel; None = all.
    """
    if not items:
        return b""
    rollouts = [item.rollout for item in items]
    routes = [rollout.routed_experts for rollout in rollouts]
    if layers is not None:
        # No layer at all looks as it does for a dense model.
        routes = [rows[:, list(layers)] if layers else rows[:, :0, :0] for rows in routes]
    header = [
        {
            "index": item.index,
            "advantage": float(item.advantage).hex(),
            "reward": float(item.reward).hex(),
            "parts": {name: float(part).hex() for name, part in item.parts.items()},
            "trains": item.trains,
            "prompt_id": rollout.prompt_id,
            "group": rollout.group,
            "member": rollout.member,
            "finish_reason": rollout.finish_reason,
            "version": rollout.version,
            "segments": rollout.segments,
            "response": rollout.response,
            "checksums": checksums(rollout.tokens_T, rows),
        }
        for item, rollout, rows in zip(items, rollouts, routes, strict=True)
    ]
    arrays = {
        "lengths": np.array([len(rollout.tokens_T) for rollout in rollouts], dtype=np.int64),
        "tokens": np.concatenate([rollout.tokens_T for rollout in rollouts]),
        "loss_mask": np.concatenate([rollout.loss_mask_T for rollout in rollouts]),
        "logprobs": np.concatenate([rollout.logprobs_T for rollout in rollouts]),
        "routed_experts": np.ascontiguousarray(np.concatenate(routes)),
    }
    return save(arrays, metadata={"rollouts": json.dumps(header)})


def decode(message: bytes) -> list[Scored]:
    """Undo `encode`."""
    if not message:
        return []
    size = int.from_bytes(message[:8], "little")
    header = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["rollouts"])
    arrays = load(message)
    borders = np.cumsum(arrays["lengths"])[:-1]
    row_borders = np.cumsum(arrays["lengths"] - 1)[:-1]
    columns = (
        np.split(arrays["tokens"], borders),
        np.split(arrays["loss_mask"], borders),
        np.split(arrays["logprobs"], borders),
        np.split(arrays["routed_experts"], row_borders),
    )
    return [
        Scored(
            index=facts["index"],
            advantage=float.fromhex(facts["advantage"]),
            reward=float.fromhex(facts["reward"]),
            parts={name: float.fromhex(part) for name, part in facts["parts"].items()},
            trains=facts["trains"],
            checksums=tuple(facts["checksums"]),
            rollout=Rollout(
                prompt_id=facts["prompt_id"],
                group=facts["group"],
                member=facts["member"],
                tokens_T=tokens_T,
                loss_mask_T=loss_mask_T,
                logprobs_T=logprobs_T,
                routed_experts=routes,
                finish_reason=facts["finish_reason"],
                version=facts["version"],
                segments=tuple((token, version) for token, version in facts["segments"]),
                response=facts["response"],
            ),
        )
        for facts, tokens_T, loss_mask_T, logprobs_T, routes in zip(header, *columns, strict=True)
    ]
