"""Plan micro-batches: which rank trains on what (`plan_updates`), and the shift by one (`pack`).

The plan depends on lengths and groups alone, so every rank computes the same plan from the same
numbers, and `r3.sync.rollouts` sends the rollouts accordingly. `pack` runs afterwards, on the
rank that trains on them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from r3.algo.sampling_mask import EMPTY, check_mask
from r3.types import Batch, MicroBatch, Rollout

# Length of a micro-batch with nothing to train on: short, but not so short that kernels treat it as
# a special case.
FILLER_TOKENS = 4
# Expert id of a route that was not captured.
MISSING = -1
_FILLER_IDS = (-1, "")  # of rollout and prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """The rollouts of one optimizer step.

    Every rank has the same number of micro-batches, since with expert parallelism all ranks take
    part in every MoE layer. A rank with too little to do has empty ones, which `pack` fills.

    Attributes:
        micro_batches: `micro_batches[rank][i]` are the indices that `rank` packs together.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def rollout_ids(self) -> tuple[int, ...]:
        """Indices of all rollouts of the update, ascending."""
        return tuple(sorted(i for rank in self.micro_batches for ids in rank for i in ids))


def route_dtype(num_experts: int) -> np.dtype:
    """Return the smallest signed integer type for all expert ids and -1."""
    return np.dtype(np.int8 if num_experts <= 128 else np.int16)


# --- the plan -----------------------------------------------------------------------------------


def plan_updates(
    lengths_R: Sequence[int],
    groups_R: Sequence[int],
    *,
    num_updates: int,
    num_ranks: int,
    micro_batch_tokens: int,
    multiple: int = 1,
) -> tuple[UpdatePlan, ...]:
    """Assign the rollouts of a step to updates, ranks and micro-batches; each rollout appears once.

    Groups stay whole: in ascending order they form `num_updates` blocks whose sizes differ by at
    most one. Within an update, every rank gets the smallest number of micro-batches with which a
    balanced partition keeps each within `micro_batch_tokens` (after padding to `multiple`). The
    plan is a function of the arguments alone.

    Args:
        lengths_R: tokens of each rollout of the step, over all ranks.
        groups_R: group of each rollout.
        num_updates: optimizer steps made from these rollouts.
        num_ranks: data-parallel ranks.
        micro_batch_tokens: largest packed length of a micro-batch, padding included.
        multiple: micro-batches are padded to a multiple of this.

    Raises:
        ValueError: a rollout is longer than a micro-batch, or there are fewer groups than updates.
    """
    capacity = micro_batch_tokens // multiple * multiple
    for index, length in enumerate(lengths_R):
        if length > capacity:
            raise ValueError(
                f"rollout {index} has {length} tokens and fits into no micro-batch: "
                f"micro_batch_tokens = {micro_batch_tokens}, padded to a multiple of {multiple}. "
                "Set train.micro_batch_tokens higher"
            )
    groups = sorted(set(groups_R))
    if len(groups) < num_updates:
        raise ValueError(
            f"{len(groups)} groups cannot be split over {num_updates} updates: "
            "a group stays whole. Set train.updates_per_step lower"
        )

    update_of_group = {
        group: place * num_updates // len(groups) for place, group in enumerate(groups)
    }
    members: list[list[int]] = [[] for _ in range(num_updates)]
    for index, group in enumerate(groups_R):
        members[update_of_group[group]].append(index)
    return tuple(
        _plan_update(ids, lengths_R, num_ranks=num_ranks, capacity=capacity) for ids in members
    )


def _plan_update(
    ids: list[int], lengths_R: Sequence[int], *, num_ranks: int, capacity: int
) -> UpdatePlan:
    total = sum(lengths_R[i] for i in ids)
    per_rank = -(-total // (num_ranks * capacity))
    bins = _bins(ids, lengths_R, num_ranks * per_rank)
    while max(_tokens(members, lengths_R) for members in bins) > capacity:
        # Ends at the latest with one sequence per bin, and every sequence fits.
        per_rank += 1
        bins = _bins(ids, lengths_R, num_ranks * per_rank)

    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    # Largest bin first, to the rank with the fewest tokens that still has room. Micro-batches of a
    # rank then descend in size. The i-th ones of all ranks run together, since ranks take part in
    # each other's MoE layers, and are about equally large.
    for members in sorted(bins, key=lambda members: (-_tokens(members, lengths_R), members)):
        rank = min(
            (r for r in range(num_ranks) if len(ranks[r]) < per_rank), key=lambda r: (loads[r], r)
        )
        ranks[rank].append(members)
        loads[rank] += _tokens(members, lengths_R)
    return UpdatePlan(micro_batches=tuple(tuple(rank_bins) for rank_bins in ranks))


def _bins(ids: Sequence[int], lengths_R: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """LPT (Graham 1969): each sequence, longest first, goes into the bin with the fewest tokens.

    A bin has its sequences in the order of their indices, those of equal length after the first of
    them: attention on CPU takes neighbours of equal length together.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for i in sorted(ids, key=lambda i: (-lengths_R[i], i)):
        load, number = heap[0]
        bins[number].append(i)
        heapq.heapreplace(heap, (load + lengths_R[i], number))
    packed = []
    for members in bins:
        by_length: dict[int, list[int]] = {}
        for i in sorted(members):
            by_length.setdefault(lengths_R[i], []).append(i)
        packed.append(tuple(chain.from_iterable(by_length.values())))
    return packed


def _tokens(ids: Iterable[int], lengths_R: Sequence[int]) -> int:
    return sum(lengths_R[i] for i in ids)


def packing_efficiency(plans: Sequence[UpdatePlan], lengths_R: Sequence[int]) -> float:
    """Return real tokens / tokens if every micro-batch were as large as its update's largest.

    1 means that no rank waits for another one.
    """
    real = room = 0
    for update in plans:
        sizes = [_tokens(ids, lengths_R) for rank in update.micro_batches for ids in rank]
        real += sum(sizes)
        room += len(sizes) * max(sizes)
    return real / room


# --- the micro-batch ----------------------------------------------------------------------------


_Columns = dict[str, np.ndarray]
"""Field of `MicroBatch` -> values of the tokens of one sequence, shifted by one, on the host."""


def pack(
    rollouts: Sequence[Rollout],
    rollout_ids: Sequence[int],
    *,
    num_experts: int,
    num_layers: int,
    topk: int,
    multiple: int = 1,
    sequence_multiple: int = 1,
    policy_version: int | None = None,
    trains: Sequence[bool] | None = None,
    restricted: bool = False,
) -> MicroBatch:
    """Shift the rollouts by one, as drawn in `types.py`, and pack them end to end without gaps.

    Index t of a sequence has input x_t, everything about predicting x_{t+1}, and the experts that
    processed x_t. The last position predicts nothing (mask 0, target 0) and has no captured route:
    the engine never processed the last token. Its row stays -1, so the policy routes it live and
    counts it under its own cause. Sequence weights are at loss tokens only. Advantages are 0
    (see `with_advantages`).

    A filler sequence pads the micro-batch to a `multiple`. Its routes are legal (`filler_routes`),
    so that it is never counted as missing. Without rollouts: `filler_micro_batch`.

    Args:
        rollouts: the sequences; their routes are [T-1, num_layers, topk].
        rollout_ids: the index of each in the step's list.
        num_experts: experts per layer, to check and to fill routes.
        num_layers: MoE layers in the routes, of a pipeline stage or of the model; 0 if there are
            none (dense model, or not captured), with routes [T-1, 0, 0].
        topk: experts per token.
        multiple: the packed length is a multiple of this; itself a multiple of `sequence_multiple`.
        sequence_multiple: every sequence is padded to a multiple of this with filler tokens
            (context parallelism divides each one into equal chunks).
        policy_version: version being trained; rollouts that an older version started are marked in
            `current_N`. None marks nothing.
        trains: whether each rollout has loss; None: all have.
        restricted: every rollout needs a sampling mask.

    Raises:
        ValueError: a rollout is inconsistent: its masks, log-probabilities or routes.
    """
    sizes = {"num_experts": num_experts, "num_layers": num_layers, "topk": topk}
    if not rollouts:
        return filler_micro_batch(**sizes, multiple=multiple)
    sequences: list[_Columns] = []
    for rollout, index, has_loss in zip(
        rollouts, rollout_ids, trains or [True] * len(rollouts), strict=True
    ):
        _check(rollout, index, **sizes, restricted=restricted)
        sequence = _shift(rollout, num_experts, policy_version, trains=has_loss)
        # Attention is causal: its own tokens never see the filler.
        padding = -len(rollout.tokens_T) % sequence_multiple
        sequences.append(_joined([sequence, _filler(padding, **sizes)]))
    ids = [(index, rollout.prompt_id) for index, rollout in zip(rollout_ids, rollouts, strict=True)]
    if padding := -sum(len(sequence["tokens_N"]) for sequence in sequences) % multiple:
        sequences.append(_filler(padding, **sizes))
        ids.append(_FILLER_IDS)
    return _micro_batch(sequences, ids)


def with_advantages(batch: Batch, advantages_R: torch.Tensor) -> Batch:
    """Return a batch with the advantages of its rollouts at their loss tokens.

    Args:
        advantages_R: those of all rollouts of the step, by `MicroBatch.rollout_ids`.
    """
    # Place -1 is that of filler.
    values_R = torch.cat([advantages_R.float(), torch.zeros(1)])
    changed = []
    for one in batch:
        lengths = torch.tensor(one.cu_seqlens).diff()
        values = values_R[torch.tensor(one.rollout_ids)]
        advantages_N = torch.repeat_interleave(values, lengths) * one.loss_mask_N
        changed.append(replace(one, advantages_N=advantages_N))
    return tuple(changed)


def as_batch(
    micro_batches: Iterable[MicroBatch], *, num_loss_tokens: int, num_sequences: int
) -> Batch:
    """Give the micro-batches of an update its denominators, which count over all ranks."""
    return tuple(
        replace(each, num_loss_tokens=num_loss_tokens, num_sequences=num_sequences)
        for each in micro_batches
    )


def filler_micro_batch(
    *, num_experts: int, num_layers: int, topk: int, multiple: int = 1
) -> MicroBatch:
    """Return a short sequence without loss, for a rank that has nothing to train on."""
    tokens = -(-FILLER_TOKENS // multiple) * multiple
    filler = _filler(tokens, num_experts=num_experts, num_layers=num_layers, topk=topk)
    return _micro_batch([filler], [_FILLER_IDS])


def filler_routes(num_tokens: int, num_layers: int, topk: int, num_experts: int) -> np.ndarray:
    """Return routes of filler tokens, [N, L, K]: expert (row * K + k) mod E.

    They are distinct within a row, since dispatchers fail on an expert chosen twice, and spread
    evenly over the experts. A dense model has none: [N, 0, 0].

    Raises:
        ValueError: `topk` or `num_experts` is out of range.
    """
    if num_layers == 0:
        return np.zeros((num_tokens, 0, 0), route_dtype(num_experts))
    if not 1 <= topk <= num_experts <= np.iinfo(np.int16).max:
        raise ValueError(
            f"need 1 <= topk <= num_experts <= 32767, got topk {topk} and {num_experts} experts"
        )
    experts_NK = np.arange(num_tokens * topk).reshape(num_tokens, 1, topk) % num_experts
    return np.repeat(experts_NK.astype(route_dtype(num_experts)), num_layers, axis=1)


def count_loss_tokens(micro_batches: Iterable[MicroBatch]) -> int:
    """Count loss tokens; summed over data-parallel ranks they make `num_loss_tokens`."""
    return sum(int(micro_batch.loss_mask_N.sum(dtype=torch.int64)) for micro_batch in micro_batches)


def _check(
    rollout: Rollout,
    rollout_id: int,
    *,
    num_experts: int,
    num_layers: int,
    topk: int,
    restricted: bool,
) -> None:
    """Raise ValueError if a rollout is inconsistent."""
    name = f"rollout {rollout_id} ({rollout.name})"
    if not np.isin(rollout.loss_mask_T, (0, 1)).all():
        values = np.unique(rollout.loss_mask_T)[:8].tolist()
        raise ValueError(f"{name}: the loss mask must be 0 or 1, has {values}")
    if rollout.loss_mask_T[0]:
        raise ValueError(f"{name}: its first token is marked as sampled, but nothing precedes it")
    if not np.isfinite(rollout.logprobs_T).all():
        where = np.flatnonzero(~np.isfinite(rollout.logprobs_T)).tolist()
        raise ValueError(f"{name}: log-probabilities are not finite at tokens {where[:8]}")
    check_mask(rollout, name, required=restricted)
    _check_routes(
        rollout.routed_experts, name, num_experts=num_experts, num_layers=num_layers, topk=topk
    )


def _shift(
    rollout: Rollout,
    num_experts: int,
    policy_version: int | None,
    *,
    trains: bool,
) -> _Columns:
    tokens = len(rollout.tokens_T)
    shape_TLK = (tokens, *rollout.routed_experts.shape[1:])
    routes_TLK = np.full(shape_TLK, MISSING, route_dtype(num_experts))
    routes_TLK[:-1] = rollout.routed_experts
    sampled_T = _next(rollout.loss_mask_T, np.float32)
    loss_mask_T = sampled_T if trains else np.zeros_like(sampled_T)
    mask = rollout.sampling_mask
    is_current = policy_version is None or rollout.policy_version >= policy_version
    return {
        "tokens_N": rollout.tokens_T.astype(np.int64),
        "targets_N": _next(rollout.tokens_T, np.int64),
        "loss_mask_N": loss_mask_T,
        "sampled_N": sampled_T > 0,
        "rollout_logprobs_N": _next(rollout.logprobs_T, np.float32),
        "advantages_N": np.zeros(tokens, np.float32),
        "sequence_weights_N": loss_mask_T / np.float32(max(1, rollout.num_response_tokens)),
        "routed_experts_NLK": routes_TLK,
        "real_N": np.ones(tokens, np.bool_),
        "current_N": np.full(tokens, is_current),
        "kept_counts_N": _next(mask.counts_T if mask else np.zeros(tokens), np.int32),
        "kept_ids": mask.token_ids if mask else EMPTY,
    }


def _next(values_T: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Shift by one: at t the value of t + 1, 0 at the last position. Done nowhere else."""
    shifted_T = np.zeros(len(values_T), dtype)
    shifted_T[:-1] = values_T[1:]
    return shifted_T


def _check_routes(
    routes: np.ndarray, name: str, *, num_experts: int, num_layers: int, topk: int
) -> None:
    """Check that every token has distinct legal experts in all its layers, or -1 in all of them."""
    expected = (num_layers, topk) if num_layers else (0, 0)
    if routes.ndim != 3 or routes.shape[1:] != expected:
        raise ValueError(
            f"{name}: its routes have shape {routes.shape}, expected [T-1, L, K] with "
            f"[L, K] = {expected}"
        )
    if not routes.size:
        return

    missing = routes == MISSING
    partly = missing & ~missing.all(axis=(1, 2), keepdims=True)
    ordered = np.sort(routes, -1)
    faults = {
        f"an expert outside 0 .. {num_experts - 1}": (routes < MISSING) | (routes >= num_experts),
        "-1 in some of the token's layers and slots, not in all": partly,
        "an expert chosen twice": (ordered[:, :, 1:] == ordered[:, :, :-1])
        & (ordered[:, :, 1:] != MISSING),
    }
    for fault, bad in faults.items():
        if bad.any():
            token, layer, _ = (int(i) for i in np.argwhere(bad)[0])
            row = routes[token, layer].tolist()
            raise ValueError(
                f"{name}: {fault}, at token {token} in MoE layer number {layer}: {row}"
            )


def _filler(num_tokens: int, *, num_experts: int, num_layers: int, topk: int) -> _Columns:
    nothing_N = np.zeros(num_tokens, np.float32)
    return {
        "tokens_N": np.zeros(num_tokens, np.int64),
        "targets_N": np.zeros(num_tokens, np.int64),
        "loss_mask_N": nothing_N,
        "sampled_N": np.zeros(num_tokens, np.bool_),
        "rollout_logprobs_N": nothing_N,
        "advantages_N": nothing_N,
        "sequence_weights_N": nothing_N,
        "routed_experts_NLK": filler_routes(num_tokens, num_layers, topk, num_experts),
        "real_N": np.zeros(num_tokens, np.bool_),
        "current_N": np.ones(num_tokens, np.bool_),
        "kept_counts_N": np.zeros(num_tokens, np.int32),
        "kept_ids": EMPTY,
    }


def _joined(sequences: Sequence[_Columns]) -> _Columns:
    return {name: np.concatenate([each[name] for each in sequences]) for name in sequences[0]}


def _micro_batch(sequences: Sequence[_Columns], ids: Sequence[tuple[int, str]]) -> MicroBatch:
    """Concatenate sequences with their ids of rollout and prompt."""
    columns = {name: torch.from_numpy(values) for name, values in _joined(sequences).items()}
    lengths = [len(sequence["tokens_N"]) for sequence in sequences]
    rollout_ids, prompt_ids = zip(*ids, strict=True)
    return MicroBatch(
        **columns,
        positions_N=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        cu_seqlens=(0, *np.cumsum(lengths).tolist()),
        rollout_ids=rollout_ids,
        prompt_ids=prompt_ids,
    )
