"""Partial rollouts: an interrupted conversation goes on under newer weights, and every part of it
stays what it was.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from r3.run.dumps import read_rollouts
from tests.e2e import partial_cases
from tests.runs import rows_of, run, timeless
from tests.world import run_world

pytestmark = pytest.mark.e2e

KINDS = ("single", "chatty", "stops")


@pytest.fixture(scope="module")
def budgets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_world(
        partial_cases.budgets, 1, folder=str(tmp_path_factory.mktemp("budgets")), timeout_s=400.0
    )
    result: dict[str, Any] = found
    return result


def rollouts_of(found: dict[str, Any]) -> list[list[Any]]:
    """(prompt, group, member, reward, (tokens, mask, logprobs, routes, finish reason, segments,
    response)) of all steps.
    """
    return [each for step in found["all"] for each in step]


@pytest.mark.parametrize("kind", KINDS)
def test_each_segment_is_what_its_own_version_says(budgets: dict[str, Any], kind: str) -> None:
    found = budgets[kind]
    spans = [len(each[4][5]) for each in rollouts_of(found)]
    assert max(spans) >= 2, "some conversations take several steps"
    assert found["whole"], "rows = tokens - 1, none missing"
    # Float32 on both sides: rounding leaves some 1e-6, and a near tie of two experts flips once in
    # ten thousand slots at most.
    assert found["slots"] > 500 and found["wrong"] <= max(1, found["slots"] / 5000)
    assert found["worst"] <= 1e-4
    # The versions do differ: taken for the next one's, the same figures are far off.
    assert found["elsewhere"] > 1e-2 and found["wrong_elsewhere"] > 10


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_whole_and_as_many_are_in_flight_in_every_step(
    budgets: dict[str, Any], kind: str
) -> None:
    carried = 0
    for step, (rollouts, row) in enumerate(
        zip(budgets[kind]["all"], budgets[kind]["metrics"], strict=True), start=1
    ):
        members: dict[int, list[int]] = {}
        for _, group, sample_index, _, (_, _, _, _, _, segments, _) in rollouts:
            members.setdefault(group, []).append(sample_index)
            assert step - 1 >= segments[-1][1] >= segments[0][1] >= step - 1 - 2, (
                "max_staleness is 2"
            )
        assert all(0 <= group < 4 for group in members)
        assert row["rollout/dropped_by_budget"] or all(
            found == [0, 1] for found in members.values()
        )
        carried = max(carried, row["rollout/carried"])
    assert carried > 0
    assert any(row["rollout/stale_tokens_frac"] > 0 for row in budgets[kind]["metrics"])
    assert budgets[kind]["metrics"][0]["rollout/stale_tokens_frac"] == 0


def test_the_budget_never_cuts_a_stop_string(
    budgets: dict[str, Any],
) -> None:
    for each in rollouts_of(budgets["single"]):
        tokens, mask, *_, segments, _ = each[4]
        ends = [token for token, _ in segments[1:]]
        # 14 tokens of each step but the last, exactly
        begins = [mask.index(1.0), *ends]
        assert all((after - before) % 14 == 0 for before, after in zip(begins, ends, strict=False))
        assert len(tokens) - begins[-1] <= 60
    for each in rollouts_of(budgets["stops"]):
        mask, segments = each[4][1], each[4][5]
        for token, _ in segments[1:]:  # a new version begins with what the environment said
            assert mask[token - 1] == 1 and mask[token] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_checkpoint_holds_goes_on_bit_for_bit(budgets: dict[str, Any], kind: str) -> None:
    assert budgets[kind]["saved"]


def test_every_group_is_dealt_once_when_the_number_of_engines_changes(
    budgets: dict[str, Any],
) -> None:
    whole, left, right = budgets["groups"]
    assert whole and sorted(left + right) == whole


def test_interrupted_conversations_are_dropped_where_none_may_grow_old(
    budgets: dict[str, Any],
) -> None:
    rows = budgets["drop"]["metrics"]
    assert sum(row["rollout/dropped_by_budget"] for row in rows) > 0
    assert all(row["rollout/carried"] == row["rollout/stale_tokens_frac"] == 0 for row in rows)
    unbounded = {
        (step, tuple(each[:3])): each for step, all_ in enumerate(budgets["off"]) for each in all_
    }
    for step, rollouts in enumerate(budgets["drop"]["all"]):
        for each in rollouts:
            assert len(each[4][5]) == 1 and sum(each[4][1]) <= 24
            # The others are those that a run without a budget has.
            assert each[4][0] == unbounded[step, tuple(each[:3])][4][0]
    assert "rollout.step_token_budget = 2" in budgets["nothing"]


def test_a_budget_that_nobody_reaches_changes_nothing(budgets: dict[str, Any]) -> None:
    assert budgets["off"] == budgets["plenty"]


def test_the_trainer_marks_stale_rollouts_and_refuses_old_ones(
    budgets: dict[str, Any],
) -> None:
    old, marked, count = budgets["marked"]
    assert len(old) > 0 and old == marked and len(old) <= count
    expected, captured = budgets["captured"]
    assert expected == captured > 0
    assert budgets["too old"].startswith("RouteError") and "of policy version" in budgets["too old"]


def test_samples_do_not_depend_on_the_number_of_engines(
    budgets: dict[str, Any], tmp_path: Path
) -> None:
    left, right = run_world(partial_cases.budgets, 2, folder=str(tmp_path), timeout_s=400.0)
    for kind in KINDS:
        for one, mine, theirs in zip(
            budgets[kind]["all"], left[kind]["all"], right[kind]["all"], strict=True
        ):
            said = {tuple(each[:3]): (each[4][0], each[4][5]) for each in mine + theirs}
            assert said == {tuple(each[:3]): (each[4][0], each[4][5]) for each in one}, kind
            assert len(mine) + len(theirs) == len(one)


def test_a_resumed_run_goes_on_with_what_was_interrupted(tmp_path: Path) -> None:
    flags = (
        "--train.steps",
        "4",
        "--rollout.prompts_per_step",
        "8",
        "--rollout.step_token_budget",
        "16",
    )
    flags += ("--rollout.max_staleness", "2", "--algo.correction", "token_tis", "--eval.path", "")
    flags += ("--checkpoint.every", "2", "--checkpoint.keep", "0", "--checkpoint.export", "false")
    flags += ("--log.rollouts_every", "1")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run(straight, *flags)
    shutil.copytree(straight, resumed, symlinks=True)
    # As a kill after step 3 leaves it: the newest checkpoint is that of step 2.
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    (resumed / "checkpoints" / "latest").unlink()
    for step in (3, 4):
        for dump in (resumed / "rollouts").glob(f"step_{step:06d}.*"):
            dump.unlink()
    output = run(resumed, *flags)
    assert "resuming from" in output
    rows = rows_of(straight)
    assert list(map(timeless, rows_of(resumed))) == list(map(timeless, rows))
    assert rows[1]["rollout/carried"] > 0, "step 2 leaves conversations to step 3"
    assert any(row["rollout/stale_tokens_frac"] > 0 for row in rows)
    several = 0
    for step in (3, 4):
        dumps = [
            folder / "rollouts" / f"step_{step:06d}.safetensors" for folder in (straight, resumed)
        ]
        assert dumps[0].read_bytes() == dumps[1].read_bytes()
        rollouts, _, _ = read_rollouts(dumps[0].with_suffix(".jsonl"))
        several += sum(len(rollout.segments) > 1 for rollout in rollouts)
    assert several > 0
    for row in rows:
        assert (
            row["routing/rows_replayed"]
            == row["routing/rows_captured"]
            == row["routing/rows_expected"]
        )
        # Of rollouts that the present version alone sampled: float32 on both sides.
        assert row.get("mismatch/abs_max", 0.0) <= 1e-4
