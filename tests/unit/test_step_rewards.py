"""Rewards of a step: shaping, units, baselines, signal, and advantages of all ranks together."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from r3.algo.advantage import Reward, advantages_of, less_kl
from r3.algo.loss import Bounds, aggregate, pg
from r3.algo.packing import pack, with_advantages
from r3.config import Config
from r3.models.shape import ModelShape
from r3.rollout import (
    DroppedError,
    RoundResult,
    gather_rewards,
    groups_with_loss,
    groups_with_signal,
    require_groups,
    reward_metrics,
)
from r3.runtime.mesh import Axis
from r3.sync import PackingSpec, gather_lengths
from r3.tools import StepNotes, trained_samples
from r3.types import Rollout, Sample
from r3.user_code import advantage_of
from tests.errors import Capsys
from tests.tiny import ALONE, loss_inputs, random_rollouts, tiny_config

CONFIG = tiny_config(rollout={"group_size": 2, "max_response_tokens": 20})
SHAPE = ModelShape.read(CONFIG.model.path)


def samples_of(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[Sample]:
    return [Sample(rollout=a, reward=b) for a, b in zip(rollouts, rewards, strict=True)]


def collected(
    lengths: tuple[int, ...] = (9, 30, 24, 12), rewards: tuple[float, ...] = (1.0, 0.0, 1.0, 0.0)
) -> list[Sample]:
    """Two groups of two; a third of each sequence is its prompt: responses of 6, 20, 16 and 8
    tokens.
    """
    return samples_of(random_rollouts(SHAPE, lengths), rewards)


def changed(sample: Sample, **fields: Any) -> Sample:
    return replace(sample, rollout=replace(sample.rollout, **fields))


def gathered(samples: Sequence[Sample], config: Config = CONFIG) -> list[Reward]:
    return gather_rewards(samples, ALONE, config)


def shaped(rewards: Sequence[Reward]) -> list[float]:
    return [each.shaped for each in rewards]


def units(rewards: Sequence[Reward]) -> list[int]:
    names = list(dict.fromkeys(each.unit for each in rewards))
    return [names.index(each.unit) for each in rewards]


def advantages(rewards: Sequence[Reward], config: Config) -> list[float]:
    return advantages_of(rewards, advantage_of(config.algo)).tolist()


def with_algo(**algo: Any) -> Config:
    return replace(CONFIG, algo=replace(CONFIG.algo, **algo))


class Two(Axis):
    """Both ranks of a world of two in one process: what the other rank would send is given."""

    def all_gather_object(self, item: Any) -> list[Any]:
        def sent(each: Any) -> Any:
            return replace(each, key=(each.key[0] + 2, *each.key[1:]), reward=each.reward - 1)

        return [[sent(each) for each in item], item]


def test_rewards_of_all_ranks_come_in_the_order_of_the_step() -> None:
    both = gather_rewards(collected(), Two(name="world", group=None, rank=0, size=2), CONFIG)
    assert shaped(both) == [1, 0, 1, 0, 0, -1, 0, -1]
    assert [each.key[0] for each in both] == [0, 0, 1, 1, 2, 2, 3, 3]
    own = advantages(both, with_algo(advantage="reinforce_pp"))[:4]
    # Over all eight: mean 0, unbiased variance 4 / 7. This rank's four alone would have mean 1/2.
    assert own == pytest.approx([(7 / 4) ** 0.5, 0.0, (7 / 4) ** 0.5, 0.0], rel=1e-5)


def test_a_conversation_left_out_leaves_no_gap_in_the_numbers() -> None:
    whole = collected(rewards=(1.0, 0.0, 0.0, 1.0))
    rest = [whole[i] for i in (0, 2, 3)]
    rewards = gathered(rest)
    lengths = gather_lengths(rest, ALONE, PackingSpec(micro_batch_tokens=64))
    names = [(0, 0, 0), (1, 0, 0), (1, 1, 0)]
    assert [each.key for each in rewards] == [each.key for each in lengths] == names
    alone, one, other = advantages(rewards, CONFIG)
    assert alone == 0.0  # alone in its group it teaches nothing
    assert one == -other < 0
    assert groups_with_signal(rewards) == [1]


def test_overlong_penalty_changes_the_advantage_only() -> None:
    config = with_algo(advantage="dr_grpo", overlong_buffer=8, overlong_penalty=0.5)
    rewards = gathered(collected(), config)
    # 20 tokens: the whole penalty. 16 of 20 with a buffer of 8: half of it.
    assert shaped(rewards) == [1.0, -0.5, 0.75, 0.0]
    assert advantages(rewards, config) == [0.75, -0.75, 0.375, -0.375]
    assert [each.raw for each in rewards] == [1.0, 0.0, 1.0, 0.0]


def test_overlong_penalty_counts_observations_as_the_limit_does() -> None:
    samples = collected()
    mask_T = samples[2].rollout.loss_mask_T.copy()
    # 6 of its 16 tokens after the prompt are sampled, the others are observations.
    mask_T[10:20] = 0
    samples[2] = changed(samples[2], loss_mask_T=mask_T)
    rollout = samples[2].rollout
    assert rollout.num_response_tokens == 6 and rollout.num_tokens_after_prompt == 16
    assert shaped(gathered(samples, with_algo(overlong_buffer=8))) == [1.0, -1.0, 0.5, 0.0]
    assert replace(rollout, loss_mask_T=np.zeros_like(mask_T)).num_tokens_after_prompt == 0


@pytest.mark.parametrize("filters", [True, False])
def test_filtered_responses_count_for_the_baseline_only(filters: bool) -> None:
    config = with_algo(advantage="dr_grpo", overlong_filter=filters)
    some = collected()
    some[1] = changed(some[1], finish_reason="length")
    rewards = gathered(some, config)
    assert [each.has_loss for each in rewards] == [True, not filters, True, True]
    assert advantages(rewards, config)[0] == 0.5  # against the mean with the truncated one
    # Neither in the sum of the loss nor in its denominator.
    spec = PackingSpec.of_step(config, (), 0)
    lengths = [each.loss_tokens for each in gather_lengths(some, ALONE, spec)]
    assert lengths == [6, 0 if filters else 20, 16, 8]
    dumped = trained_samples(some, rewards, torch.zeros(4), filters=filters)
    assert [each.trains for each in dumped] == [True, not filters, True, True]


def test_a_prompt_twice_in_a_step_is_two_groups() -> None:
    """At the border of two epochs; one group of four would have another mean."""
    twice = [changed(each, prompt_id="rows:1") for each in collected(rewards=(1.0, 0.0, 1.0, 1.0))]
    config = with_algo(advantage="dr_grpo")
    assert advantages(gathered(twice, config), config) == [0.5, -0.5, 0.0, 0.0]


def figures(rewards: Sequence[Reward], config: Config = CONFIG) -> dict[str, float]:
    return {key: type(part).reduce([part]) for key, part in reward_metrics(rewards, config).items()}


def test_rewards_are_reported_as_given_and_as_trained_on() -> None:
    given = {"reward/mean": 0.5, "reward/std": 0.5, "reward/group_zero_std_frac": 0.0}
    penalised = gathered(collected(), with_algo(overlong_buffer=8, overlong_penalty=0.5))
    # 1, -0.5, 0.75 and 0: the mean is 1.25 / 4.
    assert figures(penalised) == given | {"reward/shaped_mean": 0.3125}
    assert figures(gathered(collected())) == given | {"reward/shaped_mean": 0.5}, "no penalty"
    alone = replace(CONFIG, rollout=replace(CONFIG.rollout, group_size=1))
    for no_groups in (alone, with_algo(advantage="reinforce_pp")):
        assert "reward/group_zero_std_frac" not in figures(gathered(collected()), no_groups)


def test_rewards_that_differ_by_rounding_have_no_signal() -> None:
    # The sum of weights 0.7, 0.2 and 0.1 in two orders.
    some = collected(rewards=(0.7 + 0.2 + 0.1, 0.7 + (0.2 + 0.1), 0.3, 0.3 + 1e-6))
    assert some[0].reward != some[1].reward
    rewards = gathered(some)
    assert groups_with_signal(rewards) == [1]
    assert figures(rewards)["reward/group_zero_std_frac"] == 0.5
    made = advantages(rewards, CONFIG)
    assert made[:2] == [0.0, 0.0] and made[2] < 0 < made[3]


def notes(config: Config = CONFIG) -> StepNotes:
    """What says the warnings of a run of one rank."""
    parts: Any = SimpleNamespace(world=ALONE, shape=SHAPE)
    return StepNotes(parts, config, parts)


def test_a_step_without_signal_is_said_at_first_and_every_tenth(capsys: Capsys) -> None:
    of_run, said = notes(), {}
    flat, mixed = (gathered(collected(rewards=(1.0, 1.0, 0.0, last))) for last in (0.0, 1.0))
    # Steps 3 and 4 have no signal, nor have steps 6 to 26.
    for step in range(1, 27):
        of_run.signal(step, mixed if step in (1, 2, 5) else flat)
        if text := capsys.readouterr().err:
            said[step] = text
    first = "step 3: all 2 groups have equal rewards: rewards taught nothing. The questions are all"
    assert list(said) == [3, 15, 25] and said[3].startswith(first)
    assert "equal rewards, as in the 9 steps before: rewards taught" in said[15]
    assert "equal rewards, as in the 19 steps before: rewards taught" in said[25]
    notes().signal(1, mixed[1:3])
    lone = "step 1: all 2 groups have a single sample: rewards taught nothing. The others were "
    assert capsys.readouterr().err.startswith(f"{lone}dropped")
    config = with_algo(overlong_filter=True)
    cut = [changed(each, finish_reason="length") for each in collected()]
    notes(config).signal(1, gathered(cut, config))
    lossless = "step 1: all 2 groups have no token with loss: rewards taught nothing. All were"
    assert capsys.readouterr().err.startswith(lossless)
    # Advantages that compare groups, and a teacher, which teaches all groups.
    for algo in ({"advantage": "reinforce_pp"}, {"teacher": ("folder",)}):
        notes(with_algo(**algo)).signal(1, flat)
    assert not capsys.readouterr().err


def test_dropped_samples_are_counted_over_the_rounds_of_a_step(capsys: Capsys) -> None:
    config = with_algo(dynamic_sampling=1)
    of_run = notes(replace(config, env=replace(config.env, on_error="drop")))
    for step, dropped in ((1, "ab"), (1, "c"), (1, "def"), (2, "ghi"), (2, "")):
        first = of_run.dropped(step, RoundResult(dropped=tuple(dropped)))
        assert first == {1: "a", 2: "g"}[step]
    # Said when there are more than twice as many as were said before.
    said = [f"step 1: {count} samples were dropped so far. The first: a" for count in (2, 6)]
    assert capsys.readouterr().err.splitlines() == said


def test_routers_that_send_all_tokens_the_same_way_are_said_once(capsys: Capsys) -> None:
    working, collapsed = random_rollouts(SHAPE, (40, 41)), random_rollouts(SHAPE, (40, 41))
    for rollout in collapsed:
        rollout.routed_experts[:] = np.arange(SHAPE.topk)
    of_run, layers, experts = notes(), SHAPE.moe_layers, list(range(SHAPE.topk))
    counted = {}
    for step, made in enumerate((working, collapsed, collapsed), 1):
        (part,) = of_run.routes(step, made).values()
        counted[step] = type(part).reduce([part]), capsys.readouterr().err
    assert counted[1] == (0.0, "") and counted[3] == (len(layers), ""), "and goes on"
    assert counted[2][0] == len(layers)
    said = f"layer {layers[0]} sent all tokens of all rollouts to experts {experts}, and so did "
    assert counted[2][1].startswith(f"step 2: {said}{len(layers) - 1} more. The router collapsed")


def dapo(metric: Literal["correct", "reward"], **algo: Any) -> Config:
    return with_algo(dynamic_sampling=2, dynamic_sampling_metric=metric, **algo)


@pytest.mark.parametrize(("metric", "chosen"), [("correct", [1]), ("reward", [0, 1])])
def test_right_responses_decide_which_groups_are_sampled_again(
    metric: Literal["correct", "reward"], chosen: list[int]
) -> None:
    # All wrong, of different length, so that the penalty differs; then one right of two.
    wrong = collected(lengths=(9, 30, 24, 12), rewards=(0.0, 0.0, 1.0, 0.0))
    rewards = gathered(wrong, dapo(metric, overlong_buffer=8))
    assert groups_with_signal(rewards) == chosen
    flat = 1 - len(chosen) / 2
    assert figures(rewards)["reward/group_zero_std_frac"] == flat, "one rule for both"
    # A format reward beside gsm8k, the first function, which decides.
    parts = [{"gsm8k": a, "form": b} for a, b in ((0.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0))]
    some = collected(rewards=(0.1, 0.0, 1.1, 0.0))
    formed = [replace(each, parts=part) for each, part in zip(some, parts, strict=True)]
    assert groups_with_signal(gathered(formed, dapo(metric))) == chosen
    named = dapo(metric)
    named = replace(named, reward=replace(named.reward, correct="form"))
    assert groups_with_signal(gathered(formed, named)) == [0, 1]


def test_groups_without_loss_are_not_counted_as_signal() -> None:
    some = collected()
    some[:2] = [changed(each, finish_reason="length") for each in some[:2]]
    assert groups_with_signal(gathered(some, dapo("correct"))) == [0, 1]
    filtered = gathered(some, dapo("correct", overlong_filter=True))
    assert groups_with_signal(filtered) == [1] == groups_with_loss(filtered)


def test_a_teacher_has_something_to_teach_in_groups_out_of_reach() -> None:
    rewards = gathered(collected(rewards=(0.0, 0.0, 1.0, 0.0)), dapo("correct"))
    assert groups_with_signal(rewards) == [1] and groups_with_loss(rewards) == [0, 1]


def test_kl_is_taken_from_the_rewards_that_advantages_are_made_of() -> None:
    """An episode has the KL of all its sequences, and no KL changes nothing."""
    some = gathered(collected())
    less = less_kl(some, {0: 1.0, 1: 2.0, 3: -1.0}, 0.1)
    assert [each.raw for each in less] == [1.0, 0.0, 1.0, 0.0]
    assert shaped(less) == pytest.approx([0.9, -0.2, 1.0, 0.1], abs=1e-12)  # float64
    assert less_kl(some, {}, 0.1) == some
    parts = less_kl(gathered(episodes(own=False)), {0: 1.0, 1: 2.0, 2: 5.0}, 0.1)
    assert shaped(parts) == pytest.approx([2.7, 2.7, -0.5, 0.0], abs=1e-12)
    dumped = trained_samples(collected(), less, torch.tensor([0.5, -0.5, 0, 0]), filters=False)
    assert [each.reward for each in dumped] == [1.0, 0.0, 1.0, 0.0]
    assert [each.shaped_reward for each in dumped] == shaped(less)
    assert [each.advantage for each in dumped] == [0.5, -0.5, 0.0, 0.0]


def of_updates(count: int) -> Config:
    return replace(CONFIG, train=replace(CONFIG.train, updates_per_step=count))


@pytest.mark.parametrize("rewards", [(), (1.0, 0.0)])
def test_a_step_of_dropped_rollouts_ends_with_the_reason(rewards: tuple[float, ...]) -> None:
    left = gathered(collected((9, 30)[: len(rewards)], rewards))
    why = "prompt 3, sample 1: the environment failed (KeyError: 'city')"
    with pytest.raises(DroppedError) as error:
        require_groups(left, of_updates(2), step=4, sampled=8, failure=why)
    assert f"step 4: {len(rewards) // 2} of 8 groups are left" in str(error.value)
    assert str(error.value).endswith(f"The first failure:\n  {why}")
    require_groups(left, of_updates(len(rewards) // 2), step=4, sampled=8, failure="")


# --- episodes of several sequences --------------------------------------------------------------


def of_episodes(
    names: Sequence[tuple[int, int]], lengths: tuple[int, ...], rewards: list[float], *, own: bool
) -> list[Sample]:
    """One group of sequences, named by episode and number in it."""
    rollouts = [
        replace(rollout, group=0, sample_index=sample, sequence=sequence, own_reward=own)
        for rollout, (sample, sequence) in zip(random_rollouts(SHAPE, lengths), names, strict=True)
    ]
    return samples_of(rollouts, rewards)


def episodes(*, own: bool) -> list[Sample]:
    """One group of three episodes: two sequences, one and one, of 6, 20, 16 and 8 tokens."""
    names, rewards = ((0, 0), (0, 1), (1, 0), (2, 0)), [3.0, 5.0 if own else 3.0, 0.0, 0.0]
    return of_episodes(names, (9, 30, 24, 12), rewards, own=own)


@pytest.mark.parametrize(
    ("own", "numbers", "made"),
    [
        # The mean is over three episodes, 3 / 3 = 1, not over four sequences.
        (False, [0, 0, 1, 2], [2.0, 2.0, -1.0, -1.0]),
        # With rewards of their own: over four sequences, 8 / 4 = 2.
        (True, [0, 1, 2, 3], [1.0, 3.0, -2.0, -2.0]),
    ],
)
def test_an_episode_counts_once_and_all_its_sequences_get_its_advantage(
    own: bool, numbers: list[int], made: list[float]
) -> None:
    config = with_algo(advantage="dr_grpo")
    rewards = gathered(episodes(own=own), config)
    assert units(rewards) == numbers and advantages(rewards, config) == made
    mean = 2.0 if own else 1.0
    assert figures(rewards)["reward/shaped_mean"] == figures(rewards)["reward/mean"] == mean
    # A part is of the whole episode; compared are the rewards of what counts alone.
    some = [replace(each, parts={"gsm8k": 0.0}) for each in episodes(own=own)]
    assert groups_with_signal(gathered(some, dapo("correct"))) == [0] * own


@pytest.mark.parametrize("by_call", [True, False])
def test_an_unfinished_episode_counts_as_the_others_do(by_call: bool) -> None:
    """Sequences of an episode without a reward of its workflow, beside episodes with one."""
    config = with_algo(advantage="dr_grpo", baseline="step")
    one, two, *rest = episodes(own=by_call)
    some = [*(changed(each, own_reward=None) for each in (one, two)), *rest]
    assert by_call or groups_with_signal(gathered(episodes(own=False)[:2])) == [], "one episode"
    given = (-1.0, -1.0, 3.0, 1.0)
    rewards = gathered(samples_of([each.rollout for each in some], given), config)
    assert units(rewards) == ([0, 1, 2, 3] if by_call else [0, 0, 1, 2])
    # First sequences: the mean of -1, 3 and 1. The second sequence is alone if calls count.
    assert advantages(rewards, config) == [-2.0, 0.0 if by_call else -2.0, 2.0, 0.0]


def test_another_source_that_rewards_calls_changes_no_episode() -> None:
    """With data.env, sources have workflows of their own."""
    one, two, *rest = episodes(own=False)
    unfinished = [*(changed(each, own_reward=None) for each in (one, two)), *rest]
    some = [
        *(changed(each, group=1, prompt_id="b.jsonl:1") for each in unfinished),
        *(changed(each, prompt_id="a.jsonl:1") for each in episodes(own=True)),
    ]
    data = replace(CONFIG.data, path=("a.jsonl", "b.jsonl"), env=("a.py:A", "b.py:B"))
    assert units(gathered(some, replace(CONFIG, data=data))) == [0, 1, 2, 3, 4, 4, 5, 6]


def steps(advantage: str = "dr_grpo", *, own: bool = True) -> tuple[list[Reward], list[float]]:
    """One group of three episodes of two, two and one sequences, with the baseline of a step."""
    config = with_algo(advantage=advantage, baseline="step")
    names = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    given = [6.0, 1.0, 2.0, 5.0, 1.0] if own else [6.0, 6.0, 2.0, 2.0, 1.0]
    rewards = gathered(of_episodes(names, (9, 12, 9, 12, 9), given, own=own), config)
    return rewards, advantages(rewards, config)


def test_a_step_is_compared_with_the_same_step_of_other_episodes() -> None:
    rewards, made = steps()
    assert [each.baseline[1] for each in rewards] == [0, 1, 0, 1, 0]
    # First sequences: mean of 6, 2 and 1 is 3. Second ones: mean of 1 and 5 is 3.
    assert made == [3.0, -2.0, -1.0, 2.0, -2.0]
    # Others of the step: (2 + 1) / 2, 5, (6 + 1) / 2, 1 and (6 + 2) / 2.
    assert steps("rloo")[1] == [4.5, -4.0, -1.5, 4.0, -3.0]
    # Unbiased variances: (9 + 1 + 4) / 2 = 7 and (4 + 4) / 1 = 8. In float32, with 1e-6 added to
    # the deviation: 1e-6 relative; a wrong one differs in the first digit.
    expected = [3 / 7**0.5, -2 / 8**0.5, -1 / 7**0.5, 2 / 8**0.5, -2 / 7**0.5]
    assert steps("grpo")[1] == pytest.approx(expected, rel=2e-6)


def test_episodes_with_one_reward_have_one_baseline() -> None:
    rewards, made = steps(own=False)
    assert [each.baseline[1] for each in rewards] == [0] * 5
    assert made == [3.0, 3.0, -1.0, -1.0, -2.0]  # the mean of 6, 2 and 1


def test_a_group_whose_steps_are_equal_has_no_signal() -> None:
    rewards, _ = steps()
    values = (1.0, 2.0, 1.0, 2.0, 1.0)
    pairs = zip(rewards, values, strict=True)
    equal = [replace(each, shaped=value, deciding=value) for each, value in pairs]
    assert groups_with_signal(equal) == [] and groups_with_signal(rewards) == [0]
    assert groups_with_signal([replace(each, baseline=(0, 0)) for each in equal]) == [0]


def test_an_episode_has_the_penalty_of_its_longest_sequence() -> None:
    rewards = gathered(episodes(own=False), with_algo(overlong_buffer=8, overlong_penalty=0.5))
    # Sequences of 6 and 20 tokens: the whole penalty for both. 16 of 20: half of it.
    assert shaped(rewards) == [2.5, 2.5, -0.25, 0.0]


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
    config = with_algo(advantage="dr_grpo")
    some = episodes(own=own)
    sizes = {"num_layers": len(SHAPE.moe_layers), "topk": SHAPE.topk}
    rollouts = [each.rollout for each in some]
    micro_batch = pack(rollouts, range(4), num_experts=SHAPE.num_experts, **sizes)
    advantages_R = torch.tensor(advantages(gathered(some, config), config))
    (micro_batch,) = with_advantages((micro_batch,), advantages_R)
    logprobs_N = torch.full((micro_batch.num_tokens,), -1.0)
    mask_N, weights_N = micro_batch.loss_mask_N, micro_batch.sequence_weights_N
    given = {"advantages_N": micro_batch.advantages_N, "loss_mask_N": mask_N}
    inputs = loss_inputs(logprobs_N, micro_batch.cu_seqlens, old_logprobs_N=logprobs_N, **given)
    loss_N, _ = pg(inputs, Bounds(0.2, 0.2))
    counts = {"num_loss_tokens": 50, "num_sequences": 4, "max_response_tokens": 20}
    loss = aggregate(loss_N, mask_N, weights_N, kind=kind, **counts)
    # Sums of at most 75 float32 terms of about 1: rounding leaves 1e-6, a wrong weight 0.02.
    assert float(loss) == pytest.approx(expected, abs=1e-5)
