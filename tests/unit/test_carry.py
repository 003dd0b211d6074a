"""What a step leaves to the next: who takes it, how old it may grow, how a checkpoint holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from r3.algo.packing import pack
from r3.data.prompts import Dataset, prompts_from, prompts_of_step
from r3.models.shape import ModelShape
from r3.rollout import partial as carry
from r3.rollout.codec import decode, encode
from r3.rollout.collect import CollectedRollouts
from r3.rollout.conversation import Held
from r3.rollout.partial import Carry, deal, from_checkpoint, to_files, within_age
from r3.routing.ledger import admit
from r3.run.dumps import read_rollouts, write_rollouts
from r3.run.folder import RunDir
from r3.runtime.mesh import Axis
from r3.types import Prompt, Rollout, RouteError
from tests.tiny import random_rollouts, tiny_config

pytestmark = pytest.mark.unit

SHAPE = ModelShape.read(tiny_config().model.path)
ALONE = Axis(name="world", group=None, rank=0, size=1)


def prompt(name: str) -> Prompt:
    return Prompt(
        id=name, messages=({"role": "user", "content": "?"},), tokens_T=(3, 4, 5), answer="1"
    )


PROMPTS = [prompt(f"random:{i}") for i in range(4)]


def rollout_of(
    group: int, sample_index: int, policy_version: int, *later: tuple[int, int]
) -> Rollout:
    (made,) = random_rollouts(SHAPE, (12,), group_size=1, seed=10 * group + sample_index)
    return replace(
        made,
        prompt_id=f"random:{group}",
        group=group,
        sample_index=sample_index,
        policy_version=policy_version,
        segments=((0, policy_version), *later),
    )


def held(group: int, sample_index: int, policy_version: int = 3, *later: tuple[int, int]) -> Held:
    return Held(
        prompt=PROMPTS[group],
        rollout=rollout_of(group, sample_index, policy_version, *later),
        born=(policy_version + 1, group),
        turns=2,
        asked=3,
        longest=60,
        last_turn=6,
        midway=True,
        heard=(7, 8),
        rewards=(0.1, 0.2),
        environment=b"\x80state",
    )


def left() -> Carry:
    """Groups 1 and 3 wait, the first with one conversation over."""
    return Carry(
        held=(held(1, 0, 2, (8, 3)), held(3, 0), held(3, 1)),
        done=CollectedRollouts(
            rollouts=[rollout_of(1, 1, 2)], rewards=[0.1], parts={(1, 1): {"gsm8k": 0.1}}
        ),
        taken=17,
    )


def same(one: Carry, other: Carry) -> bool:
    """Bit for bit: what `encode` and JSON make of both."""
    return to_files(one, 0, is_leader=True) == to_files(other, 0, is_leader=True)


def test_new_prompts_go_to_the_engines_with_the_fewest_groups() -> None:
    assert deal([0, 0, 0], 6) == [0, 1, 2, 0, 1, 2], "as without anything carried over"
    assert deal([3, 0, 1], 5) == [1, 1, 2, 1, 2]
    assert deal([2, 2], 0) == []


def test_a_conversation_goes_on_only_while_its_oldest_token_is_young_enough() -> None:
    young, old = held(0, 0, 3), held(1, 0, 2, (8, 3))
    # The next step samples with version 4.
    assert within_age([young, old], step=4, max_staleness=2) == (young, old)
    assert within_age([young, old], step=4, max_staleness=1) == (young,)
    assert within_age([young, old], step=4, max_staleness=0) == ()


def test_groups_get_new_numbers_and_lose_nothing_else() -> None:
    found = left().renumbered({1: 0, 3: 1})
    assert left().groups == [1, 3] and found.groups == [0, 1]
    assert [each.rollout.group for each in found.held] == [0, 1, 1]
    assert [rollout.group for rollout in found.done.rollouts] == [0]
    assert found.done.parts == {(0, 1): {"gsm8k": 0.1}}
    assert [each.born for each in found.held] == [(3, 1), (4, 3), (4, 3)], (
        "random streams keep their names"
    )
    assert same(found.renumbered({0: 1, 1: 3}), left())


def test_a_checkpoint_holds_everything_and_another_number_of_engines_shares_it(
    tmp_path: Path,
) -> None:
    for name, content in to_files(left(), 0, is_leader=True).items():
        (tmp_path / name).write_bytes(content)
    again = from_checkpoint(tmp_path, PROMPTS, engine=0, engines=1, is_leader=True)
    assert same(again, left())
    assert again.held[0].prompt == PROMPTS[1] and again.held[0].environment == b"\x80state"
    assert (again.held[0].heard, again.held[0].rewards, again.held[0].midway) == (
        (7, 8),
        (0.1, 0.2),
        True,
    )
    assert again.held[0].rollout.segments == ((0, 2), (8, 3)) and again.taken == 17
    first, second = (
        from_checkpoint(tmp_path, PROMPTS, engine=i, engines=2, is_leader=True) for i in range(2)
    )
    assert (first.groups, second.groups, first.taken, second.taken) == ([1], [3], 17, 17)
    assert len(first.done.rollouts) == 1 and not second.done.rollouts
    silent = from_checkpoint(tmp_path, PROMPTS, engine=0, engines=1, is_leader=False)
    assert silent == Carry(taken=17), (
        "a rank that only lends its device counts prompts, and holds nothing"
    )
    assert to_files(left(), 0, is_leader=False) == {} == to_files(Carry(), 0, is_leader=True)
    assert (
        from_checkpoint(tmp_path / "none", PROMPTS, engine=0, engines=1, is_leader=True) == Carry()
    )
    assert carry.Carry().groups == []


def test_prompts_are_taken_from_any_place_of_the_same_order() -> None:
    for weights, sizes in (((), ()), ((3.0, 1.0), (1, 3))):
        data = Dataset(prompts=tuple(PROMPTS), sizes=sizes, weights=weights)
        steps = [
            p.id for step in range(5) for p in prompts_of_step(data, seed=1, step=step, count=3)
        ]
        pieces = [
            p.id
            for start, end in ((0, 2), (2, 9), (9, 15))
            for p in prompts_from(data, seed=1, start=start, count=end - start)
        ]
        assert pieces == steps


def test_segments_count_what_is_stale_and_travel(tmp_path: Path) -> None:
    grown = rollout_of(0, 0, 2, (8, 3))  # 12 tokens, the first 4 of them the prompt
    assert grown.policy_versions == (2, 3)
    assert [grown.num_stale_tokens(policy_version) for policy_version in (2, 3, 4)] == [0, 4, 8]
    plain = replace(grown, segments=())
    assert plain.policy_versions == (2,) and [plain.num_stale_tokens(v) for v in (2, 3)] == [0, 8]
    (item,) = decode(encode([carry.Scored(index=0, rollout=grown, advantage=0.0)]))
    assert item.rollout.segments == grown.segments
    path = write_rollouts(RunDir(tmp_path), 1, [item])
    assert read_rollouts(path)[0][0].segments == grown.segments


def test_the_ledger_admits_a_range_of_versions_and_nothing_older() -> None:
    def pass_to(policy_versions: range) -> None:
        admit(
            [rollout_of(0, 0, 2, (8, 3))],
            ALONE,
            moe_layers=SHAPE.moe_layers,
            num_experts=SHAPE.num_experts,
            policy_versions=policy_versions,
            on_missing="error",
            min_coverage=1.0,
        )

    pass_to(range(2, 4))
    with pytest.raises(RouteError, match="of policy version 2, this step trains on range"):
        pass_to(range(3, 4))
    with pytest.raises(
        RouteError, match="of policy version 3"
    ):  # its later part is of weights to come
        pass_to(range(3))


def test_sequences_that_older_versions_began_are_marked_in_the_micro_batch() -> None:
    rollouts = [rollout_of(0, 0, 2, (8, 3)), rollout_of(1, 0, 3)]
    sizes = {
        "num_experts": SHAPE.num_experts,
        "num_layers": len(SHAPE.moe_layers),
        "topk": SHAPE.topk,
    }
    marked = pack(rollouts, [0, 1], [1.0, 1.0], multiple=32, policy_version=3, **sizes)
    assert marked.current_N.tolist() == [False] * 12 + [True] * 20
    assert pack(rollouts, [0, 1], [1.0, 1.0], **sizes).current_N.all()
    assert np.array_equal(marked.loss_mask_N[:11], rollouts[0].loss_mask_T[1:]), (
        "they are trained on all the same"
    )
