"""Rewards on their way to the ranks that train: shaping, advantages of the step, filtering."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from r3.algo.loss import Bounds, LossInputs, Sequences, aggregate, pg
from r3.algo.packing import pack, with_advantages
from r3.config import Config
from r3.models.shape import ModelShape
from r3.rollout.codec import decode, encode
from r3.rollout.collected_rollouts import CollectedRollouts
from r3.rollout.scored import (
    DroppedError,
    Rewards,
    gather_rewards,
    require_groups,
    rescored,
    score_all,
)
from r3.rollout.step import RolloutSource
from r3.runtime.mesh import Axis
from r3.sync.rollouts import gather_lengths
from r3.types import Rollout
from tests.tiny import random_rollouts, tiny_config

pytestmark = pytest.mark.unit

ALONE = Axis(name="world", group=None, rank=0, size=1)
CONFIG = tiny_config(rollout={"group_size": 2, "max_response_tokens": 20})
SHAPE = ModelShape.read(CONFIG.model.path)


def collected(
    lengths: tuple[int, ...] = (9, 30, 24, 12), rewards: tuple[float, ...] = (1.0, 0.0, 1.0, 0.0)
) -> CollectedRollouts:
    """Two groups of two; a third of each sequence is its prompt: responses of 6, 20, 16 and 8
    tokens.
    """
    return CollectedRollouts(rollouts=random_rollouts(SHAPE, lengths), rewards=list(rewards))


class Two(Axis):
    """Both ranks of a world of two in one process: what the other rank would send is given."""

    def all_gather_object(self, item: Any) -> list[Any]:
        other = [
            ((name[0] + 2, *name[1:]), own, reward - 1, *rest) for name, own, reward, *rest in item
        ]
        return [other, item]


def test_rewards_of_all_ranks_come_in_the_order_of_the_step() -> None:
    both = gather_rewards(collected(), Two(name="world", group=None, rank=0, size=2), CONFIG)
    assert both.rewards_R.tolist() == [1, 0, 1, 0, 0, -1, 0, -1]
    assert both.groups_R.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    whitened = replace(CONFIG, algo=replace(CONFIG.algo, advantage="reinforce_pp"))
    advantages = [item.advantage for item in score_all(collected(), both, whitened)]
    # Over all eight: mean 0, unbiased variance 4 / 7. This rank's four alone would have mean 1/2.
    assert advantages == pytest.approx([(7 / 4) ** 0.5, 0.0, (7 / 4) ** 0.5, 0.0], rel=1e-5)


def test_a_conversation_left_out_leaves_no_gap_in_the_numbers() -> None:
    whole = collected(rewards=(1.0, 0.0, 0.0, 1.0))
    rest = CollectedRollouts(
        rollouts=[whole.rollouts[i] for i in (0, 2, 3)], rewards=[1.0, 0.0, 1.0]
    )
    rewards = gather_rewards(rest, ALONE, CONFIG)
    assert rewards.names_R == ((0, 0, 0), (1, 0, 0), (1, 1, 0))
    scored = score_all(rest, rewards, CONFIG)
    assert [(item.index, item.rollout.group, item.rollout.sample_index) for item in scored] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 1, 1),
    ]
    assert scored[0].advantage == 0.0  # alone in its group it teaches nothing
    assert scored[1].advantage == -scored[2].advantage < 0
    assert rewards.groups_with_signal == [1]


def test_overlong_penalty_changes_the_advantage_only() -> None:
    algo = replace(CONFIG.algo, advantage="dr_grpo", overlong_buffer=8, overlong_penalty=0.5)
    config = replace(CONFIG, algo=algo)
    rewards = gather_rewards(collected(), ALONE, config)
    # 20 tokens: the whole penalty. 16 of 20 with a buffer of 8: half of it.
    assert rewards.rewards_R.tolist() == [1.0, -0.5, 0.75, 0.0]
    scored = score_all(collected(), rewards, config)
    assert [item.advantage for item in scored] == [0.75, -0.75, 0.375, -0.375]
    assert [item.reward for item in scored] == [1.0, 0.0, 1.0, 0.0]


def test_overlong_penalty_counts_observations_as_the_limit_does() -> None:
    config = replace(CONFIG, algo=replace(CONFIG.algo, overlong_buffer=8))
    sampled = collected()
    mask_T = sampled.rollouts[2].loss_mask_T.copy()
    mask_T[10:20] = (
        0  # 6 of its 16 tokens after the prompt are sampled, the others are observations
    )
    sampled.rollouts[2] = replace(sampled.rollouts[2], loss_mask_T=mask_T)
    assert (
        sampled.rollouts[2].num_response_tokens == 6
        and sampled.rollouts[2].num_tokens_after_prompt == 16
    )
    assert gather_rewards(sampled, ALONE, config).rewards_R.tolist() == [1.0, -1.0, 0.5, 0.0]
    nothing = replace(sampled.rollouts[2], loss_mask_T=np.zeros_like(mask_T))
    assert nothing.num_tokens_after_prompt == 0


def test_filtered_responses_count_for_the_baseline_only() -> None:
    config = replace(CONFIG, algo=replace(CONFIG.algo, advantage="dr_grpo", overlong_filter=True))
    some = collected()
    some.rollouts[1] = replace(some.rollouts[1], finish_reason="length")
    scored = score_all(some, gather_rewards(some, ALONE, config), config)
    assert [item.trains for item in scored] == [True, False, True, True]
    assert scored[0].advantage == 0.5  # against the mean with the truncated one
    assert [item.trains for item in decode(encode(scored))] == [True, False, True, True]
    off = score_all(some, gather_rewards(some, ALONE, CONFIG), CONFIG)
    assert all(item.trains for item in off)
    # Neither in the sum of the loss nor in its denominator.
    assert [each.loss_tokens for each in gather_lengths(scored, ALONE)] == [6, 0, 16, 8]
    assert [each.loss_tokens for each in gather_lengths(off, ALONE)] == [6, 20, 16, 8]


def test_a_prompt_twice_in_a_step_is_two_groups() -> None:
    """At the border of two epochs; one group of four would have another mean."""
    twice = collected(rewards=(1.0, 0.0, 1.0, 1.0))
    twice.rollouts[:] = [replace(each, prompt_id="rows:1") for each in twice.rollouts]
    config = replace(CONFIG, algo=replace(CONFIG.algo, advantage="dr_grpo"))
    scored = score_all(twice, gather_rewards(twice, ALONE, config), config)
    assert [item.advantage for item in scored] == [0.5, -0.5, 0.0, 0.0]


def test_advantages_can_be_replaced_in_a_packed_micro_batch() -> None:
    rollouts: list[Rollout] = random_rollouts(SHAPE, (9, 6))
    sizes = {
        "num_experts": SHAPE.num_experts,
        "num_layers": len(SHAPE.moe_layers),
        "topk": SHAPE.topk,
    }
    before = pack(rollouts, [3, 1], [0.5, -0.5], multiple=8, **sizes)
    assert before.rollout_ids == (3, 1, -1)
    after = with_advantages(before, [9.0, -2.0, 9.0, 0.25])
    again = pack(rollouts, [3, 1], [0.25, -2.0], multiple=8, **sizes)
    assert torch.equal(after.advantages_N, again.advantages_N)
    assert after.advantages_N.dtype == before.advantages_N.dtype
    assert torch.equal(after.loss_mask_N, before.loss_mask_N)


def figures(rewards: Rewards) -> dict[str, float]:
    return {key: type(part).reduce([part]) for key, part in rewards.metrics.items()}


def test_rewards_are_reported_as_given_and_as_trained_on() -> None:
    algo = replace(CONFIG.algo, overlong_buffer=8, overlong_penalty=0.5)
    given = {"reward/mean": 0.5, "reward/std": 0.5, "reward/group_zero_std_frac": 0.0}
    penalised = gather_rewards(collected(), ALONE, replace(CONFIG, algo=algo))
    # 1, -0.5, 0.75 and 0: the mean is 1.25 / 4.
    assert figures(penalised) == given | {"reward/shaped_mean": 0.3125}
    alone = gather_rewards(collected(), ALONE, CONFIG)
    assert figures(alone) == given | {"reward/shaped_mean": 0.5}, "equal without a penalty"


def test_rewards_that_differ_by_rounding_have_no_signal() -> None:
    # The sum of weights 0.7, 0.2 and 0.1 in two orders.
    some = collected(rewards=(0.7 + 0.2 + 0.1, 0.7 + (0.2 + 0.1), 0.3, 0.3 + 1e-6))
    assert some.rewards[0] != some.rewards[1]
    rewards = gather_rewards(some, ALONE, CONFIG)
    assert rewards.groups_with_signal == [1]
    assert figures(rewards)["reward/group_zero_std_frac"] == 0.5
    advantages = [item.advantage for item in score_all(some, rewards, CONFIG)]
    assert advantages[:2] == [0.0, 0.0] and advantages[2] < 0 < advantages[3]


def source(config: Config = CONFIG) -> RolloutSource:
    """A source of rollouts that is asked for its warnings alone: without an engine."""
    parts: Any = SimpleNamespace(
        is_leader=True,
        world=ALONE,
        engine_dp=ALONE,
        conversation_setup=None,
        scorer=None,
        shape=SHAPE,
    )
    return RolloutSource(parts, parts, config, parts)


def test_a_step_without_signal_is_said_at_first_and_every_tenth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_run = source()
    flat, mixed = (
        gather_rewards(collected(rewards=each), ALONE, CONFIG)
        for each in ((1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 0.0, 1.0))
    )
    said = {}
    # Steps 3 and 4 have no signal, nor have steps 6 to 26.
    for step in range(1, 27):
        of_run._warn_without_signal(step, mixed if step in (1, 2, 5) else flat)
        if text := capsys.readouterr().err:
            said[step] = text
    first = "step 3: all 2 groups have equal rewards: rewards taught nothing. The questions are all"
    assert list(said) == [3, 15, 25] and said[3].startswith(first)
    assert "equal rewards, as in the 9 steps before: rewards taught" in said[15]
    assert "equal rewards, as in the 19 steps before: rewards taught" in said[25]
    whitened = source(replace(CONFIG, algo=replace(CONFIG.algo, advantage="reinforce_pp")))
    whitened._warn_without_signal(1, flat)
    assert not capsys.readouterr().err, "its advantages compare groups"
    taught = source(replace(CONFIG, algo=replace(CONFIG.algo, teacher=("folder",))))
    taught._warn_without_signal(1, flat)
    assert not capsys.readouterr().err, "a teacher teaches all groups"


def test_routers_that_send_all_tokens_the_same_way_are_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    working = collected((40, 41), (1.0, 0.0))
    collapsed = collected((40, 41), (1.0, 0.0))
    for rollout in collapsed.rollouts:
        rollout.routed_experts[:] = np.arange(SHAPE.topk)
    of_run, layers, experts = source(), SHAPE.moe_layers, list(range(SHAPE.topk))
    counted = {}
    for step, made in enumerate((working, collapsed, collapsed), 1):
        (part,) = of_run._routes(step, made).values()
        counted[step] = type(part).reduce([part]), capsys.readouterr().err
    assert counted[1] == (0.0, "") and counted[3] == (len(layers), ""), "and goes on"
    assert counted[2][0] == len(layers)
    assert counted[2][1].startswith(
        f"step 2: layer {layers[0]} sent all tokens of all rollouts to experts {experts}, and so "
        f"did {len(layers) - 1} more. The router collapsed, or the capture of the layer does not "
        f"work: if routing/agreement_layer/{layers[0]} is near 1, the policy's own router agrees"
    )


def dapo(metric: Literal["correct", "reward"], **algo: Any) -> Config:
    given = {"dynamic_sampling": 2, "dynamic_sampling_metric": metric, **algo}
    return replace(CONFIG, algo=replace(CONFIG.algo, **given))


@pytest.mark.parametrize(("metric", "chosen"), [("correct", [1]), ("reward", [0, 1])])
def test_right_responses_decide_which_groups_are_sampled_again(
    metric: Literal["correct", "reward"], chosen: list[int]
) -> None:
    # All wrong, of different length, so that the penalty differs; then one right of two.
    wrong = collected(lengths=(9, 30, 24, 12), rewards=(0.0, 0.0, 1.0, 0.0))
    rewards = gather_rewards(wrong, ALONE, dapo(metric, overlong_buffer=8))
    assert rewards.groups_with_signal == chosen
    flat = 1 - len(chosen) / 2
    assert figures(rewards)["reward/group_zero_std_frac"] == flat, "one rule for both"
    # A format reward beside gsm8k, the first function, which decides.
    parts = {
        (0, 0): {"gsm8k": 0.0, "form": 1.0},
        (0, 1): {"gsm8k": 0.0, "form": 0.0},
        (1, 0): {"gsm8k": 1.0, "form": 1.0},
        (1, 1): {"gsm8k": 0.0, "form": 0.0},
    }
    formed = replace(collected(rewards=(0.1, 0.0, 1.1, 0.0)), parts=parts)
    assert gather_rewards(formed, ALONE, dapo(metric)).groups_with_signal == chosen
    named = dapo(metric)
    named = replace(named, reward=replace(named.reward, correct="form"))
    assert gather_rewards(formed, ALONE, named).groups_with_signal == [0, 1]


def test_groups_without_loss_are_not_counted_as_signal() -> None:
    some = collected()
    some.rollouts[:2] = [replace(each, finish_reason="length") for each in some.rollouts[:2]]
    assert gather_rewards(some, ALONE, dapo("correct")).groups_with_signal == [0, 1]
    filtered = gather_rewards(some, ALONE, dapo("correct", overlong_filter=True))
    assert filtered.groups_with_signal == [1] == filtered.groups_with_loss


def test_a_teacher_has_something_to_teach_in_groups_out_of_reach() -> None:
    rewards = gather_rewards(collected(rewards=(0.0, 0.0, 1.0, 0.0)), ALONE, dapo("correct"))
    assert rewards.groups_with_signal == [1] and rewards.groups_with_loss == [0, 1]


def test_advantages_wait_for_the_kl_of_the_rewards() -> None:
    """An advantage with a state of its own is called once per step, with KL or without."""
    algo = replace(CONFIG.algo, kl_coef=0.1, kl_in="reward", advantage="/no/such/file.py:f")
    config = replace(CONFIG, algo=algo)
    rewards = gather_rewards(collected(), ALONE, config)
    scored = score_all(collected(), rewards, config)
    assert [item.advantage for item in scored] == [0.0] * 4, "the function is not even loaded"
    after = rescored(scored, torch.tensor([0.9, -0.1, 1.0, 0.0]), torch.tensor([0.5, -0.5, 0, 0]))
    assert [item.reward for item in after] == [1.0, 0.0, 1.0, 0.0]
    assert [item.shaped_reward for item in after] == pytest.approx([0.9, -0.1, 1.0, 0.0])
    assert [item.advantage for item in after] == [0.5, -0.5, 0.0, 0.0]
    assert [item.shaped_reward for item in decode(encode(after))] == [
        item.shaped_reward for item in after
    ]


@pytest.mark.parametrize("rewards", [(), (1.0, 0.0)])
def test_a_step_of_dropped_rollouts_ends_with_the_reason(rewards: tuple[float, ...]) -> None:
    collected = CollectedRollouts(
        rollouts=random_rollouts(SHAPE, (9, 30)[: len(rewards)]), rewards=list(rewards)
    )
    gathered = gather_rewards(collected, ALONE, CONFIG)
    why = "prompt 3, sample 1: the environment failed (KeyError: 'city')"
    with pytest.raises(DroppedError) as error:
        require_groups(gathered, step=4, sampled=8, needed=2, failure=why)
    assert f"step 4: {len(rewards) // 2} of 8 groups are left" in str(error.value)
    assert str(error.value).endswith(f"The first failure:\n  {why}")
    require_groups(gathered, step=4, sampled=8, needed=len(rewards) // 2, failure="")


# --- episodes of several sequences --------------------------------------------------------------


def episodes(*, own: bool) -> CollectedRollouts:
    """One group of three episodes: two sequences, one and one, of 6, 20, 16 and 8 tokens."""
    names = ((0, 0), (0, 1), (1, 0), (2, 0))
    rollouts = [
        replace(rollout, group=0, sample_index=sample, sequence=sequence, own_reward=own)
        for rollout, (sample, sequence) in zip(random_rollouts(SHAPE, LENGTHS), names, strict=True)
    ]
    return CollectedRollouts(rollouts=rollouts, rewards=[3.0, 5.0 if own else 3.0, 0.0, 0.0])


LENGTHS = (9, 30, 24, 12)


def test_an_episode_counts_once_and_all_its_sequences_get_its_advantage() -> None:
    config = replace(CONFIG, algo=replace(CONFIG.algo, advantage="dr_grpo"))
    some = episodes(own=False)
    rewards = gather_rewards(some, ALONE, config)
    assert rewards.units_R.tolist() == [0, 0, 1, 2]
    # The mean is over three episodes, 3 / 3 = 1, not over four sequences.
    advantages = [item.advantage for item in score_all(some, rewards, config)]
    assert advantages == [2.0, 2.0, -1.0, -1.0]
    assert figures(rewards)["reward/shaped_mean"] == figures(rewards)["reward/mean"] == 1.0


def test_sequences_with_rewards_of_their_own_count_each() -> None:
    config = replace(CONFIG, algo=replace(CONFIG.algo, advantage="dr_grpo"))
    some = episodes(own=True)
    rewards = gather_rewards(some, ALONE, config)
    assert rewards.units_R.tolist() == [0, 1, 2, 3]
    # The mean is over four sequences, 8 / 4 = 2.
    assert [item.advantage for item in score_all(some, rewards, config)] == [1.0, 3.0, -2.0, -2.0]


@pytest.mark.parametrize("by_call", [True, False])
def test_an_unfinished_episode_counts_as_the_others_do(by_call: bool) -> None:
    """Sequences of an episode without a reward of its workflow, beside episodes with one."""
    algo = replace(CONFIG.algo, advantage="dr_grpo", baseline="step")
    config = replace(CONFIG, algo=algo)
    some = episodes(own=by_call)
    unfinished = [replace(each, own_reward=None) for each in some.rollouts[:2]]
    some = CollectedRollouts(
        rollouts=[*unfinished, *some.rollouts[2:]], rewards=[-1.0, -1.0, 3.0, 1.0]
    )
    rewards = gather_rewards(some, ALONE, config)
    advantages = [item.advantage for item in score_all(some, rewards, config)]
    if by_call:
        # First sequences: the mean of -1, 3 and 1. The second sequence is alone.
        assert rewards.units_R.tolist() == [0, 1, 2, 3]
        assert advantages == [-2.0, 0.0, 2.0, 0.0]
    else:
        assert rewards.units_R.tolist() == [0, 0, 1, 2]
        assert advantages == [-2.0, -2.0, 2.0, 0.0]
    again = [item.rollout.own_reward for item in decode(encode(score_all(some, rewards, config)))]
    assert again == [None, None, by_call, by_call]


def steps(advantage: str = "dr_grpo", *, own: bool = True) -> tuple[Rewards, list[float]]:
    """One group of three episodes of two, two and one sequences, with the baseline of a step."""
    algo = replace(CONFIG.algo, advantage=advantage, baseline="step")
    config = replace(CONFIG, algo=algo)
    names = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    rollouts = [
        replace(rollout, group=0, sample_index=sample, sequence=sequence, own_reward=own)
        for rollout, (sample, sequence) in zip(
            random_rollouts(SHAPE, (9, 12, 9, 12, 9)), names, strict=True
        )
    ]
    given = [6.0, 1.0, 2.0, 5.0, 1.0] if own else [6.0, 6.0, 2.0, 2.0, 1.0]
    some = CollectedRollouts(rollouts=rollouts, rewards=given)
    rewards = gather_rewards(some, ALONE, config)
    return rewards, [item.advantage for item in score_all(some, rewards, config)]


def test_a_step_is_compared_with_the_same_step_of_other_episodes() -> None:
    rewards, advantages = steps()
    assert rewards.baselines_R.tolist() == [0, 1, 0, 1, 0]
    # First sequences: mean of 6, 2 and 1 is 3. Second ones: mean of 1 and 5 is 3.
    assert advantages == [3.0, -2.0, -1.0, 2.0, -2.0]
    # Others of the step: (2 + 1) / 2, 5, (6 + 1) / 2, 1 and (6 + 2) / 2.
    assert steps("rloo")[1] == [4.5, -4.0, -1.5, 4.0, -3.0]
    # Unbiased variances: (9 + 1 + 4) / 2 = 7 and (4 + 4) / 1 = 8. In float32, with 1e-6 added to
    # the deviation: 1e-6 relative; a wrong one differs in the first digit.
    expected = [3 / 7**0.5, -2 / 8**0.5, -1 / 7**0.5, 2 / 8**0.5, -2 / 7**0.5]
    assert steps("grpo")[1] == pytest.approx(expected, rel=2e-6)


def test_episodes_with_one_reward_have_one_baseline() -> None:
    rewards, advantages = steps(own=False)
    assert rewards.baselines_R.tolist() == [0] * 5
    assert advantages == [3.0, 3.0, -1.0, -1.0, -2.0]  # the mean of 6, 2 and 1


def test_a_group_whose_steps_are_equal_has_no_signal() -> None:
    rewards, _ = steps()
    equal = replace(rewards, rewards_R=torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]))
    assert equal.groups_with_signal == [] and rewards.groups_with_signal == [0]
    same = torch.zeros_like(equal.groups_R)
    assert replace(equal, baselines_R=same).groups_with_signal == [0]


def test_an_episode_has_the_penalty_of_its_longest_sequence() -> None:
    algo = replace(CONFIG.algo, overlong_buffer=8, overlong_penalty=0.5)
    rewards = gather_rewards(episodes(own=False), ALONE, replace(CONFIG, algo=algo))
    # Sequences of 6 and 20 tokens: the whole penalty for both. 16 of 20: half of it.
    assert rewards.rewards_R.tolist() == [2.5, 2.5, -0.25, 0.0]


def test_signal_is_a_difference_between_episodes() -> None:
    some = episodes(own=False)
    alone = CollectedRollouts(rollouts=some.rollouts[:2], rewards=[3.0, 3.0])
    assert gather_rewards(alone, ALONE, CONFIG).groups_with_signal == []
    assert gather_rewards(some, ALONE, CONFIG).groups_with_signal == [0]


@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [
        # Log-probabilities of -1 make the loss of a token its advantage. 6 + 20 + 16 + 8 tokens.
        ("token", False, (2 * 6 + 2 * 20 - 16 - 8) / 50),
        ("token", True, (1 * 6 + 3 * 20 - 2 * 16 - 2 * 8) / 50),
        # Each of the four sequences weighs alike, so the first episode weighs double.
        ("sequence", False, (2 + 2 - 1 - 1) / 4),
        ("sequence", True, (1 + 3 - 2 - 2) / 4),
        ("constant", False, (2 * 6 + 2 * 20 - 16 - 8) / (4 * 20)),
    ],
)
def test_the_loss_of_episodes_is_the_one_worked_out_by_hand(
    kind: Literal["token", "sequence", "constant"], own: bool, expected: float
) -> None:
    config = replace(CONFIG, algo=replace(CONFIG.algo, advantage="dr_grpo"))
    some = episodes(own=own)
    scored = score_all(some, gather_rewards(some, ALONE, config), config)
    micro_batch = pack(
        [item.rollout for item in scored],
        [item.index for item in scored],
        [item.advantage for item in scored],
        num_experts=SHAPE.num_experts,
        num_layers=len(SHAPE.moe_layers),
        topk=SHAPE.topk,
    )
    logprobs_N = torch.full((micro_batch.num_tokens,), -1.0)
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        old_logprobs_N=logprobs_N,
        rollout_logprobs_N=logprobs_N,
        advantages_N=micro_batch.advantages_N,
        loss_mask_N=micro_batch.loss_mask_N,
        sequences=Sequences(micro_batch.cu_seqlens),
    )
    loss_N, _ = pg(inputs, Bounds(0.2, 0.2))
    loss = aggregate(
        loss_N,
        micro_batch.loss_mask_N,
        micro_batch.sequence_weights_N,
        kind=kind,
        num_loss_tokens=50,
        num_sequences=4,
        max_response_tokens=20,
    )
    # Sums of at most 75 float32 terms of about 1: rounding leaves 1e-6, a wrong weight 0.02.
    assert float(loss) == pytest.approx(expected, abs=1e-5)


def test_sequences_survive_the_way_to_other_ranks() -> None:
    some = episodes(own=True)
    again = decode(encode(score_all(some, gather_rewards(some, ALONE, CONFIG), CONFIG)))
    assert [(each.rollout.sequence, each.rollout.own_reward) for each in again] == [
        (each.sequence, True) for each in some.rollouts
    ]
    assert [each.rollout.name.count("/") for each in again] == [
        1 + bool(each.sequence) for each in some.rollouts
    ]
