"""Conversations of several turns: the sampled tokens and their routes are what is trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e import refill_cases, talk_cases
from tests.talkers import require_agreement
from tests.tiny import base_model
from tests.world import run_world

pytestmark = pytest.mark.e2e


def talked(folder: Path, ranks: int, **options: Any) -> list[SimpleNamespace]:
    base_model(folder / "base")
    return run_world(talk_cases.talks, ranks, folder=str(folder), timeout_s=400.0, **options)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return talked(tmp_path_factory.mktemp("envs"), 1)[0]


@pytest.mark.parametrize("kind", talk_cases.KINDS)
def test_conversations_equal_transformers(talks: SimpleNamespace, kind: str) -> None:
    talk = talks.kinds[kind]
    require_agreement(talk.agreement)
    for rollout in talk.rollouts:
        assert rollout.rows == len(rollout.tokens) - 1
        assert rollout.observed_logprobs == 0.0
    assert len(talk.rollouts) == 16
    assert talk.metrics.get("routing/overlap_differs", 0.0) == 0.0


def test_conversations_have_the_turns_they_should(talks: SimpleNamespace) -> None:
    assert {len(r.turns) for r in talks.kinds["plain"].rollouts} == {1}
    assert talks.kinds["plain"].metrics == {
        "engine/preemptions": 0.0,
        "rollout/sampled_tokens": sum(r.num_sampled for r in talks.kinds["plain"].rollouts),
    }
    for kind in ("chatty", "tool in workers"):
        assert {len(r.turns) for r in talks.kinds[kind].rollouts} <= {1, 2, 3, 4}
        assert talks.kinds[kind].metrics["env/turns_mean"] > 1.5
    assert any("<tool_response>and then" in r.text for r in talks.kinds["tool in workers"].rollouts)
    few = [(len(r.turns), r.finish_reason) for r in talks.kinds["few turns"].rollouts]
    assert set(few) <= {(2, "turns"), (2, "length"), (1, "length")} and few.count((2, "turns")) > 8
    assert talks.kinds["game"].metrics["env/turns_mean"] > 2


def test_a_turn_that_was_cut_or_stopped_is_closed_by_an_observed_token(
    talks: SimpleNamespace,
) -> None:
    cut = [r for r in talks.kinds["cut turns"].rollouts if len(r.turns) > 1]
    assert cut
    for rollout in cut:
        for said in rollout.turns[:-1]:
            closed = f"{said}<|im_end|>\n<|im_start|>user\nand then"
            assert closed in rollout.text or said.endswith("<|im_end|>")
    stopped = [said for r in talks.kinds["stop strings"].rollouts for said in r.turns]
    assert any(said.endswith(("=", "+", "####")) for said in stopped)
    for said in stopped:
        text = said.removesuffix("<|im_end|>")
        assert not any(stop in text[:-4] for stop in ("=", "+", "####")), (
            "the stop string ends the turn"
        )


def test_a_base_model_ends_its_turns_as_its_template_does(talks: SimpleNamespace) -> None:
    """Its tokenizer and both settings files name `<|endoftext|>`, which it never samples."""
    for kind in ("plain", "chatty"):
        ended = [r for r in talks.kinds[kind].rollouts if r.finish_reason != "length"]
        assert ended
        assert all(r.turns[-1].endswith("<|im_end|>") for r in ended)
        assert not any("<|im_end|>" in r.response for r in ended)


def test_a_stop_string_may_be_a_special_token(talks: SimpleNamespace) -> None:
    assert talks.stopped == [["<|im_end|>", "stop"]] * 4


def test_conversations_never_outgrow_their_room(talks: SimpleNamespace) -> None:
    for rollout in talks.kinds["little room"].rollouts:
        assert rollout.turns
    assert "length" in {r.finish_reason for r in talks.kinds["little room"].rollouts}


def test_rewards_of_turns_add_up_and_functions_score_the_others(talks: SimpleNamespace) -> None:
    plain = talks.kinds["plain"]
    assert plain.rewards == [float(len(r.response)) for r in plain.rollouts]
    for rollout, reward in zip(
        talks.kinds["few turns"].rollouts, talks.kinds["few turns"].rewards, strict=True
    ):
        assert reward == 0.25 * len(rollout.turns)
    assert all(0 <= reward <= 1 for reward in talks.kinds["game"].rewards)


def sampled(talk: SimpleNamespace) -> dict[str, list[int]]:
    return {rollout.name: rollout.tokens for rollout in talk.rollouts}


def test_samples_do_not_depend_on_ranks_or_on_the_speed_of_tools(
    talks: SimpleNamespace, tmp_path: Path
) -> None:
    """Of the first two prompts, beside one conversation and beside fifteen."""
    kinds = ("chatty", "tool in workers", "stop strings", "cut turns", "game", "calculator")
    left, right = talked(tmp_path, 2, kinds=kinds, prompts=2, is_compared=False)
    for kind in kinds:
        mine, theirs = sampled(left.kinds[kind]), sampled(right.kinds[kind])
        assert len(mine) == len(theirs) == 2 and mine.keys().isdisjoint(theirs)
        assert (mine | theirs).items() <= sampled(talks.kinds[kind]).items(), kind


def test_dynamic_sampling_is_the_same_on_any_layout() -> None:
    (one,) = run_world(refill_cases.refills, 1)
    left, right = run_world(refill_cases.refills, 2)
    for step, made in one.run.items():
        groups = {name.split(" ")[1] for name in made.sampled}
        assert len(groups) == 6 and len(made.sampled) == 12
        assert all(int(name.split(" ")[0].rpartition(":")[2]) % 3 == 0 for name in made.sampled)
        assert 0.0 not in made.advantages, "no group without signal is trained on"
        assert sorted(made.indices) == list(range(12))
        assert made.groups_trained == 6 and made.groups_sampled and made.groups_sampled > 6
        assert made.rounds and 1 < made.rounds <= 13
        first, second = left.run[step], right.run[step]
        assert first.sampled | second.sampled == made.sampled
        assert sorted(first.indices + second.indices) == list(range(12))
        assert first.rounds == made.rounds
    assert one.resumed["3"] == one.run["3"], "the place in the data is part of the checkpoint"
    assert len(one.drawn) == 2 * sum(made.groups_sampled or 0 for made in one.run.values())
    assert len(one.drawn) == 2 * len(set(one.drawn)), "no prompt is drawn twice in an epoch"
    capped, off = one.capped["1"], one.off["1"]
    assert capped.rounds == 2 and capped.groups_trained is not None and capped.groups_trained < 6
    assert 0.0 in off.advantages and off.rounds is None
    assert "all solved or all out of reach" in one.nothing
