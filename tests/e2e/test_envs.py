"""Conversations of several turns: what was sampled is what is trained, with the routes that
produced it, whatever happens.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from r3.envs.calculator import evaluate
from tests.e2e import env_cases
from tests.runs import rows_of, run
from tests.world import run_world

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_world(
        env_cases.talks, 1, folder=str(tmp_path_factory.mktemp("envs")), timeout_s=300.0
    )
    result: dict[str, Any] = found
    return result


def agrees_with_transformers(conversation_setup: dict[str, Any]) -> None:
    assert conversation_setup["slots"] > 500
    # Float32 on both sides: a near tie of two experts flips once in ten thousand slots at most, a
    # shift flips most.
    assert conversation_setup["wrong"] <= conversation_setup["slots"] / 5000
    assert conversation_setup["worst"] <= 1e-4  # rounding of two float32 stacks leaves some 1e-6
    for rollout in conversation_setup["rollouts"]:
        assert rollout["rows"] == len(rollout["tokens"]) - 1
        assert rollout["observed_logprobs"] == 0.0


KINDS = (
    "plain",
    "chatty",
    "tool in workers",
    "stop strings",
    "cut turns",
    "little room",
    "few turns",
    "game",
)


@pytest.mark.parametrize("kind", [*KINDS, "calculator"])
def test_conversations_equal_transformers(talks: dict[str, Any], kind: str) -> None:
    agrees_with_transformers(talks[kind])
    assert len(talks[kind]["rollouts"]) == 16
    if "routing/overlap_differs" in talks[kind]["facts"]:
        assert talks[kind]["facts"]["routing/overlap_differs"] == 0.0


def test_rows_that_are_shifted_or_missing_in_a_later_turn_are_refused(
    talks: dict[str, Any],
) -> None:
    said = talks["guards"]
    assert said["right"] == "True True"
    assert (
        "again, and 16 of them name other experts" in said["shifted"]
        and "Rows are shifted" in said["shifted"]
    )
    assert "rows of routes, got shape" in said["too few"]


def test_conversations_have_the_turns_they_should(talks: dict[str, Any]) -> None:
    assert {r["turns"] for r in talks["plain"]["rollouts"]} == {1}
    assert talks["plain"]["facts"] == {}
    for kind in ("chatty", "tool in workers"):
        assert {r["turns"] for r in talks[kind]["rollouts"]} <= {1, 2, 3, 4}
        assert talks[kind]["facts"]["env/turns_mean"] > 1.5
    assert any(
        "<tool_response>and then" in r["after"][0] for r in talks["tool in workers"]["rollouts"]
    )
    few = [(r["turns"], r["finish_reason"]) for r in talks["few turns"]["rollouts"]]
    assert set(few) <= {(2, "turns"), (2, "length"), (1, "length")} and few.count((2, "turns")) > 8
    assert talks["game"]["facts"]["env/turns_mean"] > 2


def test_the_calculator_replies_to_the_sums_that_the_model_begins(talks: dict[str, Any]) -> None:
    replies = [
        (text, reply)
        for rollout in talks["calls"]["rollouts"]
        for text, reply in re.findall(
            r"(\d+[+-]\d+)=<\|im_end\|>\n<\|im_start\|>user\n<tool_response>(-?\d+)<",
            rollout["after"][0],
        )
    ]
    assert replies, "at temperature 1 some of 16 conversations write their steps"
    assert all(evaluate(text) == reply for text, reply in replies)


def test_a_turn_that_was_cut_or_stopped_is_closed_by_an_observed_token(
    talks: dict[str, Any],
) -> None:
    cut = [r for r in talks["cut turns"]["rollouts"] if r["turns"] > 1]
    assert cut
    for rollout in cut:
        for said in rollout["said"][:-1]:
            assert f"{said}<|im_end|>\n<|im_start|>user\nand then" in rollout["after"][
                0
            ] or said.endswith("<|im_end|>")
    stopped = [said for r in talks["stop strings"]["rollouts"] for said in r["said"]]
    assert any(said.endswith(("=", "+", "####")) for said in stopped)
    for said in stopped:
        text = said.removesuffix("<|im_end|>")
        assert not any(stop in text[:-4] for stop in ("=", "+", "####")), (
            "the stop string ends the turn"
        )


def test_conversations_never_outgrow_their_room(talks: dict[str, Any]) -> None:
    for rollout in talks["little room"]["rollouts"]:
        assert rollout["said"]
    assert "length" in {r["finish_reason"] for r in talks["little room"]["rollouts"]}


def test_rewards_of_turns_add_up_and_functions_score_the_others(
    talks: dict[str, Any],
) -> None:
    plain = talks["plain"]
    assert plain["rewards"] == [float(len(r["response"])) for r in plain["rollouts"]]
    for rollout, reward in zip(
        talks["few turns"]["rollouts"], talks["few turns"]["rewards"], strict=True
    ):
        assert reward == 0.25 * rollout["turns"]
    assert all(0 <= reward <= 1 for reward in talks["game"]["rewards"])


def sampled(conversation_setup: dict[str, Any]) -> dict[str, list[int]]:
    return {rollout["who"]: rollout["tokens"] for rollout in conversation_setup["rollouts"]}


def test_samples_do_not_depend_on_ranks_or_on_the_speed_of_tools(
    talks: dict[str, Any], tmp_path: Path
) -> None:
    left, right = run_world(env_cases.talks, 2, folder=str(tmp_path), timeout_s=400.0)
    for kind in (*KINDS, "calculator"):
        mine, theirs = sampled(left[kind]), sampled(right[kind])
        assert mine.keys().isdisjoint(theirs)
        assert mine | theirs == sampled(talks[kind]), kind


def test_an_engine_of_two_ranks_holds_the_same_kind_of_conversation(tmp_path: Path) -> None:
    first, second = run_world(
        env_cases.talks, 2, folder=str(tmp_path), engine_tp=2, timeout_s=400.0
    )
    for kind in KINDS:
        assert second[kind]["rollouts"] == []
        assert len(first[kind]["rollouts"]) == 16
        agrees_with_transformers(first[kind])


def test_a_crashing_a_hanging_and_a_slow_tool_lose_nothing_else(tmp_path: Path) -> None:
    (found,) = run_world(env_cases.trouble, 1, folder=str(tmp_path), limit_s=12.0)
    crash, hang, slow = found["crash"], found["hang"], found["slow"]
    calm = found["calm"]
    assert len(calm["tokens"]) == 64 and set(calm["rewards"].values()) == {1.0}

    dropped = found["drop"]
    assert calm["tokens"].keys() - dropped["tokens"].keys() == {crash, hang}
    assert all(dropped["tokens"][who] == calm["tokens"][who] for who in dropped["tokens"])
    assert set(dropped["rewards"].values()) == {1.0}
    facts = dropped["facts"]
    assert (facts["env/crashes"], facts["env/timeouts"], facts["env/retries"]) == (2, 2, 2)
    assert (facts["env/dropped"], facts["env/zeroed"], facts["env/errors"]) == (2, 0, 0)

    for name, failed in (("zero", {crash, hang}), ("kept", {crash})):
        run = found[name]
        assert len(run["tokens"]) == 64
        assert {who for who, reward in run["rewards"].items() if reward == 0.0} == failed
        assert {who for who, outcome in run["outcomes"].items() if outcome == "error"} == failed
        assert (run["facts"]["env/dropped"], run["facts"]["env/zeroed"]) == (0, len(failed))
        others = calm["tokens"].keys() - failed
        assert all(run["tokens"][who] == calm["tokens"][who] for who in others)
    # The slow tool waits until 30 conversations are over: an engine that waited for it would never
    # have come to that.
    assert found["zero"]["order"].index(slow) >= 30 and len(found["zero"]["order"]) == 62

    for opened, closed in (
        *(found[name]["ends"] for name in ("calm", "drop", "zero", "kept")),
        found["stop ends"],
    ):
        assert opened and opened == closed, "every environment is closed exactly once"
    assert len(calm["ends"][0]) == 64
    assert "env.on_error" in found["stop"] and "rollout word_problems_train.jsonl:" in found["stop"]


def test_dynamic_sampling_is_the_same_on_any_layout() -> None:
    (one,) = run_world(env_cases.refills, 1)
    left, right = run_world(env_cases.refills, 2)
    for step, made in one["run"].items():
        groups = {name.split(" ")[1] for name in made["sampled"]}
        assert len(groups) == 6 and len(made["sampled"]) == 12
        assert all(int(name.split(" ")[0].rpartition(":")[2]) % 3 == 0 for name in made["sampled"])
        assert 0.0 not in made["advantages"], "no group without signal is trained on"
        assert sorted(made["indices"]) == list(range(12))
        assert made["rollout/groups_trained"] == 6 < made["rollout/groups_sampled"]
        assert 1 < made["rollout/rounds"] <= 7
        both = [left["run"][step], right["run"][step]]
        assert both[0]["sampled"] | both[1]["sampled"] == made["sampled"]
        assert sorted(both[0]["indices"] + both[1]["indices"]) == list(range(12))
        assert both[0]["rollout/rounds"] == made["rollout/rounds"]
    assert one["resumed"]["3"] == one["run"]["3"], "a step needs nothing of the steps before it"
    assert one["capped"]["1"]["rollout/rounds"] == 2
    assert one["capped"]["1"]["rollout/groups_trained"] < 6
    assert 0.0 in one["off"]["1"]["advantages"] and "rollout/rounds" not in one["off"]["1"]
    assert "all solved or all out of reach" in one["nothing"]


def test_games_and_tools_train_end_to_end(tmp_path: Path) -> None:
    flags = ("--train.steps", "2", "--rollout.prompts_per_step", "4", "--eval.max_prompts", "8")
    flags += ("--checkpoint.export", "false", "--rollout.max_response_tokens", "160")
    run(
        tmp_path / "game",
        *flags,
        *("--env.name", "guess_number", "--env.max_turn_tokens", "12", "--env.workers", "1"),
        *("--algo.dynamic_sampling", "2"),
    )
    start, *rows = rows_of(tmp_path / "game")
    assert "eval/heldout/accuracy" in start
    for row in rows:
        assert row["env/turns_mean"] > 1.5 and row["env/errors"] == row["env/dropped"] == 0
        assert row["routing/coverage"] == 1.0, (
            "every observed and every sampled token but the last has its routes"
        )
        assert row["routing/overlap_differs"] == 0.0
        # Policy and engine agree on every sampled token of every turn; float32 on both sides.
        assert row["mismatch/abs_max"] <= 1e-4 and row["routing/agreement"] > 0.999
        assert row["rollout/groups_trained"] <= 4 <= row["rollout/groups_sampled"]
        assert row["reward/group_zero_std_frac"] < 1
