"""Experiment E10: captured routes are the routers' own, and equal in every byte however the request
was scheduled.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e import capture_cases as cases
from tests.e2e import schedule_cases
from tests.families import engine_checkpoint
from tests.world import run_world

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def found() -> SimpleNamespace:
    return run_world(cases.captured, 1)[0]


def test_rows_are_what_a_hook_on_the_routers_saw(found: SimpleNamespace) -> None:
    assert found.cold_cached_tokens == 0
    assert found.rows == found.rows_expected > 2000
    assert found.rows_differ == 0
    assert found.late_rows_differ > 10, (
        "routes late by a token must show, or equality shows nothing"
    )


def test_rows_in_wrong_slots_and_rows_that_no_router_wrote_are_refused(
    found: SimpleNamespace,
) -> None:
    """Their blocks held right routes of the same tokens: a row that is left over would pass."""
    assert "position 0, layer 0: experts [-1, -1] are not all in 0..7" in found.faults["late"]
    assert "position 0, layer 1: experts [-1, -1] are not all in 0..7" in found.faults["lost"]


def test_cached_prefixes_and_neighbours_change_no_byte(found: SimpleNamespace) -> None:
    assert found.warm_cached_tokens >= 32  # one block at least
    assert found.warm_equal
    assert found.together_equal


def test_members_share_the_routes_of_their_prompt_and_nothing_else(found: SimpleNamespace) -> None:
    assert found.responses > 1
    assert found.prompt_routes == 1


def test_preempted_requests_return_the_same_bytes(found: SimpleNamespace) -> None:
    # Three on the machines seen: most answers end inside their block
    assert found.preemptions >= 1
    assert found.preempted_differ == []


def test_preempted_requests_return_their_own_routes_in_bfloat16(found: SimpleNamespace) -> None:
    rounded = found.in_bfloat16
    assert rounded.preempted >= 1 and rounded.rows > 20
    # Another batch rounds otherwise and turns near ties; routes that lost their place differ in
    # most rows.
    assert rounded.differ <= 0.1 * rounded.rows
    assert rounded.late_differ >= 0.8 * rounded.rows


def test_preemptions_are_counted(found: SimpleNamespace) -> None:
    assert found.preemptions_counted == found.preemptions_in_round >= 1


def test_aborted_request_is_an_error_and_leaves_nothing_behind(found: SimpleNamespace) -> None:
    assert "the engine lost turns" in found.abort
    assert found.after_abort_equal


@pytest.fixture(scope="module")
def scheduled() -> SimpleNamespace:
    return run_world(schedule_cases.scheduled, 1)[0]


def test_a_prompt_longer_than_the_requests_at_once_is_captured(scheduled: SimpleNamespace) -> None:
    assert scheduled.longest > 20
    assert scheduled.two_equal


def test_prompts_in_chunks_have_the_routes_of_every_chunk(scheduled: SimpleNamespace) -> None:
    chunks = scheduled.chunks
    assert chunks.passes > 1
    assert chunks.rows > 300 and chunks.differ == 0
    assert chunks.late > 0.5 * chunks.rows
    assert scheduled.chunks_equal


def test_batches_scheduled_ahead_change_no_route(scheduled: SimpleNamespace) -> None:
    assert scheduled.ahead == 1
    assert scheduled.ahead_equal
    assert "experts [-1, -1] are not all in 0..7" in scheduled.ahead_stale


def test_two_turns_have_the_routes_of_the_whole_conversation(scheduled: SimpleNamespace) -> None:
    """Rows that are shifted, or too few, are refused, and the message counts them."""
    turns = scheduled.turns
    assert turns.cached >= 32 and turns.rows > 300
    assert turns.differ == 0
    counts = re.search(
        r"returned (\d+) routes .* again, and (\d+) of them name other experts. Rows are shifted",
        turns.late,
    )
    assert counts is not None, turns.late
    given, other = map(int, counts.groups())
    assert given / 2 < other <= given <= turns.rows
    assert "rows of routes, got shape" in turns.few


def test_cached_tokens_without_routes_are_refused(scheduled: SimpleNamespace) -> None:
    assert "again True" in scheduled.foreign
    assert "experts [-1, -1] are not all in 0..7" in scheduled.foreign


def test_requests_aborted_before_their_first_pass_leave_no_trace(
    scheduled: SimpleNamespace,
) -> None:
    assert "the engine lost turns [2, 3, 4, 5, 6, 7]" in scheduled.abandoned
    assert scheduled.after


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_routes_lie_in_the_slots_of_the_group_that_keeps_all_tokens(
    name: str, tmp_path: Path
) -> None:
    folder = engine_checkpoint(tmp_path / "model", name)
    (found,) = run_world(schedule_cases.groups, 1, model=str(folder))
    assert len(found.kinds) > 1 and found.chosen == "FullAttentionSpec"
    sampled = found.found
    assert sampled.rows > 150 and sampled.differ == 0
    assert sampled.late > 0.5 * sampled.rows
    # Blocks that left a window, or a state without slots.
    assert found.others
    for kind, message in found.others.items():
        assert "are not all in 0..7" in message, (kind, message)
