"""The drawing in `types.py` checked literally, and what a plan must hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from r3.algo.packing import (
    UpdatePlan,
    count_loss_tokens,
    filler_micro_batch,
    filler_routes,
    pack,
    packing_efficiency,
    plan_updates,
    with_advantages,
)
from r3.tools import part_of
from r3.types import MicroBatch, Rollout
from tests.tiny import MOE
from tests.tiny import coded_rollout as rollout

DENSE: dict[str, int] = {"num_experts": 0, "num_layers": 0, "topk": 0}
# Of an update for one rank with one group.
ONE: dict[str, int] = {"num_updates": 1, "num_ranks": 1}


# 256 rollouts in groups of 8.
GROUPS = [index // 8 for index in range(256)]


def log_normal_lengths(seed: int) -> list[int]:
    """Ragged like rollouts: median 665, a tail cut at 4,096."""
    lengths = np.random.default_rng(seed).lognormal(6.5, 0.8, len(GROUPS))
    return [int(length) for length in np.clip(lengths, 16, 4096)]


def scored(packed: MicroBatch, advantages: Mapping[int, float]) -> MicroBatch:
    """The micro-batch with these advantages, by rollout id."""
    advantages_R = torch.zeros(max(advantages) + 1, dtype=torch.float64)
    for index, advantage in advantages.items():
        advantages_R[index] = advantage
    (changed,) = with_advantages((packed,), advantages_R)
    assert torch.equal(changed.loss_mask_N, packed.loss_mask_N)
    return changed


# --- pack -------------------------------------------------------------------------------------


def test_alignment_is_the_one_drawn_in_types() -> None:
    """x0 x1 are the prompt, x2 x3 x4 were sampled with p2 p3 p4, e0 .. e3 processed x0 .. x3."""
    sample = rollout([10, 11, 12, 13, 14], 3)
    packed = scored(pack([sample], [6], **MOE), {6: 1.5})

    assert packed.tokens_N.tolist() == [10, 11, 12, 13, 14]
    assert packed.targets_N.tolist() == [11, 12, 13, 14, 0]
    assert packed.positions_N.tolist() == [0, 1, 2, 3, 4]
    assert packed.loss_mask_N.tolist() == [0, 1, 1, 1, 0]
    expected_N = torch.tensor([0.0, -0.2, -0.3, -0.4, 0.0])  # p_t stands at t - 1
    # Both round to float32
    torch.testing.assert_close(packed.rollout_logprobs_N, expected_N, rtol=1e-7, atol=0.0)
    assert packed.advantages_N.tolist() == [0, 1.5, 1.5, 1.5, 0]
    third = np.float32(1) / np.float32(3)
    assert packed.sequence_weights_N.tolist() == [0, third, third, third, 0]
    assert packed.routed_experts_NLK[:4].tolist() == sample.routed_experts.tolist()
    assert (packed.routed_experts_NLK[4] == -1).all()
    assert packed.cu_seqlens == (0, 5)
    assert packed.rollout_ids == (6,)

    for name in ("tokens_N", "targets_N", "positions_N"):
        assert getattr(packed, name).dtype == torch.int64
    assert packed.routed_experts_NLK.dtype == torch.int8  # the smallest that holds 8 experts and -1
    for name in ("loss_mask_N", "rollout_logprobs_N", "advantages_N", "sequence_weights_N"):
        assert getattr(packed, name).dtype == torch.float32


def test_sequences_stand_end_to_end_and_a_filler_pads() -> None:
    rollouts = [rollout([1, 2, 3, 4], 2, seed=1), rollout([5, 6, 7], 1, seed=2)]
    assert pack(rollouts[:1], [0], **MOE, multiple=4).rollout_ids == (0,), "a multiple already"
    packed = scored(pack(rollouts, [9, 3], **MOE, multiple=4), {9: 1.0, 3: -2.0})
    assert packed.cu_seqlens == (0, 4, 7, 8)
    assert packed.rollout_ids == (9, 3, -1)
    assert packed.tokens_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert packed.targets_N.tolist() == [2, 3, 4, 0, 6, 7, 0, 0]
    assert packed.positions_N.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert packed.loss_mask_N.tolist() == [0, 1, 1, 0, 0, 1, 0, 0]
    assert packed.advantages_N.tolist() == [0, 1, 1, 0, 0, -2, 0, 0]
    assert packed.sequence_weights_N.tolist() == [0, 0.5, 0.5, 0, 0, 1, 0, 0]
    missing_N = (packed.routed_experts_NLK == -1).all(dim=2).all(dim=1)
    assert missing_N.tolist() == [False, False, False, True, False, False, True, False]
    # Captured: processed by the engine. The filler's routes are legal, but they were not captured.
    assert packed.captured_N.tolist() == [True, True, True, False, True, True, False, False]
    assert count_loss_tokens([packed, packed]) == 6


@pytest.mark.parametrize("seed", range(3))
def test_pack_equals_a_loop_over_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rollouts = []
    for number, length in enumerate(rng.integers(2, 30, 6)):
        tokens = rng.integers(0, 100, length).tolist()
        rollouts.append(rollout(tokens, int(rng.integers(1, length)), seed=number))
    advantages = rng.normal(size=6).tolist()
    packed = scored(pack(rollouts, range(6), **MOE, multiple=16), dict(enumerate(advantages)))
    n = 0
    for sample, advantage in zip(rollouts, advantages, strict=True):
        length = len(sample.tokens_T)
        for t in range(length):
            assert packed.tokens_N[n] == sample.tokens_T[t]
            assert packed.positions_N[n] == t
            if t + 1 < length:
                sampled = sample.loss_mask_T[t + 1]
                assert packed.targets_N[n] == sample.tokens_T[t + 1]
                assert packed.loss_mask_N[n] == sampled
                assert packed.rollout_logprobs_N[n] == sample.logprobs_T[t + 1]
                assert packed.advantages_N[n] == np.float32(advantage) * sampled
                assert packed.routed_experts_NLK[n].tolist() == sample.routed_experts[t].tolist()
            n += 1
    assert packed.num_tokens == -(-n // 16) * 16
    # Each sequence weighs 1
    assert float(packed.sequence_weights_N.sum()) == pytest.approx(6, rel=1e-6)


def test_masks_of_several_turns_and_routes_keep_their_holes() -> None:
    """A tool's reply between two sampled parts: no loss on it, and the mask moves with its
    tokens. Missing rows of routes stay missing.
    """
    sample = rollout([1, 2, 3, 4, 5, 6], 5)
    routes, mask_T = sample.routed_experts.copy(), np.array([0, 1, 0, 0, 1, 1], np.float32)
    routes[1] = -1
    packed = pack([replace(sample, loss_mask_T=mask_T, routed_experts=routes)], [0], **MOE)
    assert packed.loss_mask_N.tolist() == [1, 0, 0, 1, 1, 0]
    assert packed.captured_N.tolist() == [True, False, True, True, True, False]


def test_dense_models_have_no_routes() -> None:
    with pytest.raises(ValueError, match=r"expected .* \(0, 0\)"):
        pack([rollout([1, 2, 3], 1)], [0], **DENSE)
    packed = pack([rollout([1, 2, 3], 1, dense=True)], [0], **DENSE, multiple=8)
    assert packed.routed_experts_NLK.shape == (8, 0, 0)
    assert filler_micro_batch(**DENSE).routed_experts_NLK.shape == (4, 0, 0)


def test_pack_does_not_alias_or_change_the_rollout() -> None:
    sample = rollout([1, 2, 3, 4], 2)
    arrays = (sample.tokens_T, sample.loss_mask_T, sample.routed_experts)
    before = [array.copy() for array in arrays]
    packed = pack([sample], [0], **MOE)
    for tensor in (packed.tokens_N, packed.loss_mask_N, packed.routed_experts_NLK):
        tensor.fill_(7)
    assert all((array == old).all() for array, old in zip(arrays, before, strict=True))


@pytest.mark.parametrize(("multiple", "tokens"), [(1, 4), (4, 4), (3, 6), (16, 16)])
def test_filler_micro_batch(multiple: int, tokens: int) -> None:
    for filler in (
        filler_micro_batch(**MOE, multiple=multiple),
        pack([], [], **MOE, multiple=multiple),
    ):
        assert filler.num_tokens == tokens and filler.rollout_ids == (-1,)
        assert (filler.routed_experts_NLK >= 0).all() and count_loss_tokens([filler]) == 0
        for name in ("captured_N", "loss_mask_N", "advantages_N"):
            assert not getattr(filler, name).any(), name


def test_filler_routes_are_distinct_and_spread() -> None:
    assert filler_routes(3, 1, 2, 5)[:, 0].tolist() == [[0, 1], [2, 3], [4, 0]]
    routes = filler_routes(64, 3, 8, 128)
    assert routes.shape == (64, 3, 8)
    assert routes.dtype == np.int8
    assert filler_routes(64, 3, 8, 129).dtype == np.int16
    assert all(len(set(row)) == 8 for row in routes.reshape(-1, 8).tolist())
    assert (np.bincount(routes.ravel(), minlength=128) == 64 * 3 * 8 // 128).all()
    with pytest.raises(ValueError, match="topk 3 and 2 experts"):
        filler_routes(4, 1, 3, 2)


def with_values(**fields: list[float]) -> Rollout:
    arrays = {name: np.array(values, np.float32) for name, values in fields.items()}
    return replace(rollout([1, 2, 3], 1), **arrays)


def with_route(token: int, layer: int, experts: list[int]) -> Rollout:
    sample = rollout([1, 2, 3, 4, 5], 2)
    routes = sample.routed_experts.copy()
    routes[token, layer] = experts
    return replace(sample, routed_experts=routes)


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        (with_route(2, 1, [3, 8]), r"outside 0 \.\. 7, at token 2 in MoE layer number 1: \[3, 8\]"),
        (with_route(1, 0, [-2, 3]), r"outside 0 \.\. 7, at token 1 .* number 0: \[-2, 3\]"),
        (with_route(3, 1, [-1, 3]), r"-1 in some .* at token 3 in MoE layer number 1: \[-1, 3\]"),
        (with_route(0, 1, [-1, -1]), r"-1 in some .* at token 0 .* number 1: \[-1, -1\]"),
        (with_route(2, 0, [5, 5]), r"chosen twice, at token 2 in MoE layer number 0: \[5, 5\]"),
        (rollout([1, 2, 3], 1, dense=True), r"shape \(2, 0, 0\), expected .* \(2, 2\)"),
        (rollout([1, 2, 3], 3), "first token is marked as sampled"),
        (with_values(loss_mask_T=[0, 0.5, 1]), r"0 or 1, has \[0\.0, 0\.5, 1\.0\]"),
        (with_values(logprobs_T=[0, 0, np.nan]), r"not finite at tokens \[2\]"),
    ],
)
def test_pack_refuses(sample: Rollout, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"rollout 4 \(prompt0/0\): .*{fault}"):
        pack([sample], [4], **MOE)


# --- plan -------------------------------------------------------------------------------------


def sizes(update: UpdatePlan, lengths: Sequence[int]) -> np.ndarray:
    """Tokens of each micro-batch, [ranks, M]."""
    return np.array(
        [[sum(lengths[i] for i in ids) for ids in rank] for rank in update.micro_batches]
    )


@pytest.mark.parametrize(
    ("lengths", "ranks", "limit", "multiple", "expected", "efficiency"),
    [
        # Longest first into the lightest bin: 5 and 4, then 4 + 3, 5 + 2, and 1 joins the first of
        # the equal two.
        ([1, 2, 3, 4, 5], 2, 8, 1, (((0, 1, 4),), ((2, 3),)), 15 / 16),
        # Four bins: the rank with the 10 gets the 1, so that both have the same total.
        ([10, 9, 2, 1], 2, 10, 1, (((0,), (3,)), ((1,), (2,))), 22 / 40),
        # A rank with nothing to do gets an empty micro-batch.
        ([10, 20], 4, 64, 1, (((1,),), ((0,),), ((),), ((),)), 30 / 80),
        # A sequence may be as long as a micro-batch.
        ([64, 64, 64], 1, 64, 64, (((0,), (1,), (2,)),), 1.0),
        # Sequences of equal length are neighbours.
        ([7, 5, 9, 5, 7, 3, 5], 1, 41, 1, (((0, 4, 1, 3, 6, 2, 5),),), 1.0),
    ],
)
def test_plan_by_hand(
    lengths: list[int], ranks: int, limit: int, multiple: int, expected: Any, efficiency: float
) -> None:
    options = ONE | {"num_ranks": ranks, "micro_batch_tokens": limit, "multiple": multiple}
    (update,) = plan_updates(lengths, [0] * len(lengths), **options)
    assert update == UpdatePlan(micro_batches=expected)
    assert update.rollout_ids == tuple(range(len(lengths)))
    assert packing_efficiency([update], lengths) == efficiency


@pytest.mark.parametrize("num_updates", [1, 2, 5])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize(("micro_batch_tokens", "multiple"), [(4096, 1), (4100, 64), (16384, 8)])
def test_every_rollout_once_groups_whole_within_the_limit(
    num_updates: int, num_ranks: int, micro_batch_tokens: int, multiple: int
) -> None:
    lengths = log_normal_lengths(0)
    options = dict(micro_batch_tokens=micro_batch_tokens, num_updates=num_updates)
    updates = plan_updates(lengths, GROUPS, **options, num_ranks=num_ranks, multiple=multiple)
    assert len(updates) == num_updates
    assert sorted(i for update in updates for i in update.rollout_ids) == list(range(256))
    groups_of = [sorted({GROUPS[i] for i in update.rollout_ids}) for update in updates]
    # whole, in order, contiguous
    assert [group for block in groups_of for group in block] == list(range(32))
    assert max(map(len, groups_of)) - min(map(len, groups_of)) <= 1
    for update in updates:
        assert len(update.micro_batches) == num_ranks
        assert len({len(rank) for rank in update.micro_batches}) == 1
        assert (-(-sizes(update, lengths) // multiple) * multiple <= micro_batch_tokens).all()
        for rank in update.micro_batches:
            for ids in rank:
                of_length = {lengths[i]: [j for j in ids if lengths[j] == lengths[i]] for i in ids}
                # by index, and equal lengths together
                together = sorted(map(sorted, of_length.values()))
                assert list(ids) == [i for members in together for i in members]
        # the large ones of all ranks run together
        assert (np.diff(sizes(update, lengths), axis=1) <= 0).all()


def test_groups_need_not_be_contiguous_or_start_at_zero() -> None:
    updates = plan_updates(
        [5] * 8, [9, 2, 9, 2, 30, 4, 30, 4], num_updates=2, num_ranks=1, micro_batch_tokens=20
    )
    assert [update.rollout_ids for update in updates] == [(1, 3, 5, 7), (0, 2, 4, 6)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch_tokens", [8192, 16384, 32768])
@pytest.mark.parametrize("seed", range(5))
def test_efficiency_and_balance(num_ranks: int, micro_batch_tokens: int, seed: int) -> None:
    """256 log-normal lengths up to 4,096, in micro-batches of at least twice that: the figures we
    promise.
    """
    lengths = log_normal_lengths(seed)
    options = ONE | {"num_ranks": num_ranks, "micro_batch_tokens": micro_batch_tokens}
    updates = plan_updates(lengths, GROUPS, **options)
    assert packing_efficiency(updates, lengths) >= 0.97
    totals = sizes(updates[0], lengths).sum(axis=1)
    assert totals.max() / totals.mean() <= 1.05
    least = -(-sum(lengths) // (num_ranks * micro_batch_tokens))
    assert len(updates[0].micro_batches[0]) <= least + 1


def test_in_the_order_of_arrival_it_would_have_been_worse() -> None:
    """Negative control: the same sequences dealt round-robin miss the promised figure."""
    lengths = log_normal_lengths(0)
    ranks = [[tuple(range(8 * i + rank, 256, 32)) for i in range(4)] for rank in range(8)]
    dealt = UpdatePlan(micro_batches=tuple(map(tuple, ranks)))
    assert dealt.rollout_ids == tuple(range(256))
    assert packing_efficiency([dealt], lengths) < 0.8


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"micro_batch_tokens": 19}, "rollout 1 has 20 tokens .* micro_batch_tokens = 19"),
        ({"micro_batch_tokens": 23, "multiple": 8}, "= 23, padded to a multiple of 8"),
        ({"num_updates": 3}, "2 groups cannot be split over 3 updates"),
    ],
)
def test_plan_refuses(change: dict[str, Any], fault: str) -> None:
    good = ONE | {"num_ranks": 2, "micro_batch_tokens": 40}
    plan_updates([10, 20, 30, 5], [0, 0, 1, 1], **good)
    with pytest.raises(ValueError, match=fault):
        plan_updates([10, 20, 30, 5], [0, 0, 1, 1], **good | change)


def of_lengths(*lengths: int) -> MicroBatch:
    """Sequences of these lengths, every token another."""
    tokens = iter(range(3, 1000))
    rollouts = [rollout([next(tokens) for _ in range(length)], 2) for length in lengths]
    return pack(rollouts, range(len(lengths)), **MOE)


@pytest.mark.parametrize(("tokens", "multiple", "turn"), [(1, 1, 0), (9, 4, 1), (12, 2, 5)])
def test_a_part_of_a_micro_batch_starts_at_a_sequence(
    tokens: int, multiple: int, turn: int
) -> None:
    whole = of_lengths(8, 4, 12, 8)
    part, rows = part_of(whole, tokens, multiple=multiple, turn=turn)
    assert tokens <= part.num_tokens < tokens + multiple
    start = whole.cu_seqlens[whole.rollout_ids.index(part.rollout_ids[0])]
    assert rows == slice(start, start + part.num_tokens)
    end = start + part.num_tokens
    for name in ("tokens_N", "targets_N", "positions_N", "routed_experts_NLK", "loss_mask_N"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[start:end]), name
    assert part.cu_seqlens[0] == 0 and part.cu_seqlens[-1] == part.num_tokens
    assert len(part.rollout_ids) == len(part.cu_seqlens) - 1
    inner = [start + border for border in part.cu_seqlens[:-1]]
    assert inner == [border for border in whole.cu_seqlens if start <= border < end]


def test_a_part_larger_than_its_micro_batch_is_the_whole() -> None:
    whole = of_lengths(8, 4)
    part, _ = part_of(whole, 100, multiple=4, turn=3)
    assert part.cu_seqlens == whole.cu_seqlens and part.rollout_ids == whole.rollout_ids
