"""Partial rollouts: interrupted conversations continue with newer weights; their parts are kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from r3 import assets
from r3.tools import read_rollouts
from tests.e2e import partial_cases
from tests.runs import (
    dumped,
    require_replayed,
    rows_of,
    run,
    timeless_rows,
    without_last_checkpoint,
    words,
)
from tests.world import run_world

pytestmark = pytest.mark.e2e

KINDS = ("single", "chatty", "stops")


@pytest.fixture(scope="module")
def budgets(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = str(tmp_path_factory.mktemp("budgets"))
    return run_world(partial_cases.budgets, 1, folder=folder, timeout_s=400.0)[0]


def rollouts_of(kind: SimpleNamespace) -> list[SimpleNamespace]:
    return [each for step in kind.rollouts for each in step]


@pytest.mark.parametrize("kind", KINDS)
def test_each_segment_is_what_its_own_version_says(budgets: SimpleNamespace, kind: str) -> None:
    found, versions = budgets.kinds[kind], budgets.kinds[kind].versions
    spans = [len(each.segments) for each in rollouts_of(found)]
    assert max(spans) >= 2, "some conversations take several steps"
    assert found.complete
    # Float32 on both sides: rounding leaves some 1e-6, and a near tie of two experts flips once in
    # ten thousand slots at most.
    assert versions.slots > 500 and versions.wrong <= max(1, versions.slots / 5000)
    assert versions.worst <= 1e-4
    # The versions do differ: against the next one the same figures are far off.
    assert versions.worst_next > 1e-2 and versions.wrong_next > 10


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_whole_and_as_many_are_in_flight_in_every_step(
    budgets: SimpleNamespace, kind: str
) -> None:
    carried = 0
    for step, (rollouts, row) in enumerate(
        zip(budgets.kinds[kind].rollouts, budgets.kinds[kind].metrics, strict=True), start=1
    ):
        members: dict[int, list[int]] = {}
        for each in rollouts:
            _, group, sample_index = each.name
            members.setdefault(group, []).append(sample_index)
            assert step - 1 >= each.segments[-1][1] >= each.segments[0][1] >= step - 1 - 2, (
                "max_staleness is 2"
            )
        assert all(0 <= group < 4 for group in members)
        assert row["rollout/dropped_by_budget"] or all(
            found == [0, 1] for found in members.values()
        )
        carried = max(carried, row["rollout/carried"])
    assert carried > 0
    assert any(row["rollout/stale_tokens_frac"] > 0 for row in budgets.kinds[kind].metrics)
    assert budgets.kinds[kind].metrics[0]["rollout/stale_tokens_frac"] == 0


def test_the_budget_never_cuts_a_stop_string(budgets: SimpleNamespace) -> None:
    for each in rollouts_of(budgets.kinds["single"]):
        ends = [token for token, _ in each.segments[1:]]
        # 14 tokens of each step but the last, exactly
        begins = [each.loss_mask.index(1.0), *ends]
        assert all((after - before) % 14 == 0 for before, after in zip(begins, ends, strict=False))
        assert len(each.tokens) - begins[-1] <= 60
    for each in rollouts_of(budgets.kinds["stops"]):
        for token, _ in each.segments[1:]:  # a new version begins with an observation
            assert each.loss_mask[token - 1] == 1 and each.loss_mask[token] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_checkpoint_holds_goes_on_bit_for_bit(budgets: SimpleNamespace, kind: str) -> None:
    assert budgets.kinds[kind].saved


def test_interrupted_conversations_are_dropped_where_none_may_grow_old(
    budgets: SimpleNamespace,
) -> None:
    rows = budgets.drop.metrics
    assert sum(row["rollout/dropped_by_budget"] for row in rows) > 0
    assert all(row["rollout/carried"] == row["rollout/stale_tokens_frac"] == 0 for row in rows)
    unbounded = {(step, *each.name): each for step, all_ in enumerate(budgets.off) for each in all_}
    for step, rollouts in enumerate(budgets.drop.rollouts):
        for each in rollouts:
            assert len(each.segments) == 1 and sum(each.loss_mask) <= 24
            # The others are those that a run without a budget has.
            assert each.tokens == unbounded[step, *each.name].tokens
    assert "rollout.step_token_budget = 2" in budgets.nothing


def test_a_budget_that_nobody_reaches_changes_nothing(budgets: SimpleNamespace) -> None:
    assert budgets.off == budgets.plenty


@pytest.mark.large
def test_samples_do_not_depend_on_the_number_of_engines(
    budgets: SimpleNamespace, tmp_path: Path
) -> None:
    kinds, folder = ("chatty", "stops"), str(tmp_path)
    left, right = run_world(partial_cases.budgets, 2, folder=folder, kinds=kinds, timeout_s=400.0)
    for kind in kinds:
        for one, mine, theirs in zip(
            *(each.kinds[kind].rollouts for each in (budgets, left, right)), strict=True
        ):
            both = {tuple(each.name): (each.tokens, each.segments) for each in mine + theirs}
            assert both == {tuple(each.name): (each.tokens, each.segments) for each in one}, kind
            assert len(mine) + len(theirs) == len(one)


@pytest.mark.large
def test_a_resumed_run_goes_on_with_what_was_interrupted(tmp_path: Path) -> None:
    """A distillation, so that the teacher is resumed too; its rewards are only reported."""
    flags = words("--train.steps 4 --rollout.prompts_per_step 8 --rollout.step_token_budget 16")
    flags += ("--rollout.max_staleness", "2", "--algo.correction", "token_tis", "--eval.path", "")
    flags += ("--checkpoint.every", "2", "--checkpoint.keep", "0", "--checkpoint.export", "false")
    flags += ("--log.rollouts_every", "1", "--train.objective", "distill")
    flags += ("--algo.teacher", str(assets.TINY_MOE_TIES))
    flags += ("--data.path", str(assets.WORD_PROBLEMS_TRAIN))
    straight = tmp_path / "straight"
    run(straight, *flags)
    resumed = shutil.copytree(straight, tmp_path / "resumed", symlinks=True)
    # As a kill after step 3 leaves it: the newest checkpoint is that of step 2.
    without_last_checkpoint(resumed, 4)
    for step in (3, 4):
        for dump in (resumed / "rollouts").glob(f"step_{step:06d}.*"):
            dump.unlink()
    output = run(resumed, *flags)
    assert "resuming from" in output
    rows = rows_of(straight)
    assert timeless_rows(resumed) == timeless_rows(straight)
    assert len({row["loss/kl_teacher"] for row in rows}) == 4
    assert rows[1]["rollout/carried"] > 0, "step 2 leaves conversations to step 3"
    assert any(row["rollout/stale_tokens_frac"] > 0 for row in rows)
    sampled, trained = (
        [row[f"rollout/{name}_tokens"] for row in rows] for name in ("sampled", "trained")
    )
    stale = [row["rollout/stale_tokens_frac"] * row["rollout/trained_tokens"] for row in rows]
    assert rows[0]["rollout/carried"] > 0
    assert sampled[0] > trained[0], "what is suspended was sampled"
    assert sum(trained) <= sum(sampled) and all(
        new >= used - old - 1e-6 for new, used, old in zip(sampled, trained, stale, strict=True)
    ), "a step trains on what it sampled and on what is stale"
    several = 0
    assert {each["advantage"] for each in dumped(straight)} == {None}, "each token has its own"
    for step in (3, 4):
        dumps = [
            folder / "rollouts" / f"step_{step:06d}.safetensors" for folder in (straight, resumed)
        ]
        assert dumps[0].read_bytes() == dumps[1].read_bytes()
        rollouts, _, _ = read_rollouts(dumps[0].with_suffix(".jsonl"))
        several += sum(len(rollout.segments) > 1 for rollout in rollouts)
    assert several > 0
    for row in rows:
        require_replayed(row)
        # Of rollouts that the present version alone sampled: float32 on both sides.
        assert row.get("mismatch/abs_max", 0.0) <= 1e-4
