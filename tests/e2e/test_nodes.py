"""Runs on two nodes with their own network, host name and shared memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.attempts import Attempt, finish, newest_checkpoint, require_equal
from tests.nodes import Nodes, no_nodes, two_nodes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.large,
    pytest.mark.timeout(1200),  # two starts and more, on machines that may be busy
    pytest.mark.skipif(bool(no_nodes()), reason=no_nodes()),
]
_KILL_AFTER_S = 20.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with two_nodes(tmp_path) as made:
        yield made


def end(attempts: list[Attempt]) -> list[int]:
    """Exit codes of both nodes' launchers."""
    try:
        return [attempt.end() for attempt in attempts]
    finally:
        for attempt in attempts:
            attempt.kill()


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_two_nodes_of_one_rank_equal_one_node(nodes: Nodes, tmp_path: Path, axis: str) -> None:
    """The test of the lost link shows the same for `parallel.ep` 2."""
    sizes = {"ep": 1} | ({axis: 2} if axis != "dp" else {})
    flags = [word for name, size in sizes.items() for word in (f"--parallel.{name}", str(size))]
    flags += ["--train.steps", "1", "--rollout.prompts_per_step", "4"]
    finish(tmp_path / "one", *flags, is_warm=True)
    attempts = nodes.launch(tmp_path / "two", *flags)
    assert end(attempts) == [0, 0], "\n".join(attempt.text[-3000:] for attempt in attempts)
    require_equal(tmp_path / "two", tmp_path / "one")


def test_lost_link_ends_the_run_in_time_and_it_resumes(nodes: Nodes, tmp_path: Path) -> None:
    """The resumed run equals that of one node: weights and rows, with experts on both nodes."""
    limits = ("--debug.stall_s", "5", "--debug.kill_after_s", f"{_KILL_AFTER_S:.0f}")
    flags = (*limits, "--parallel.ep", "2", "--train.steps", "3")
    flags += ("--rollout.prompts_per_step", "4")
    finish(tmp_path / "one", *flags, is_warm=True)
    folder = tmp_path / "two"
    attempts = nodes.launch(folder, *flags)
    try:
        attempts[0].wait_for_rows(2)
        nodes.link("down")
        began = time.monotonic()
    finally:
        codes = end(attempts)
    seconds = time.monotonic() - began
    assert all(codes) and newest_checkpoint(folder)
    texts = [attempt.text for attempt in attempts]
    assert any("(debug.kill_after_s); rank " in text for text in texts), texts
    # Stacks are written and the launchers leave; on a busy machine that takes a while.
    assert seconds < _KILL_AFTER_S + 60, f"{seconds:.0f} s"

    nodes.link("up")
    again = nodes.launch(folder, *flags)
    assert end(again) == [0, 0], "\n".join(attempt.text[-3000:] for attempt in again)
    assert "resuming from" in again[0].text
    require_equal(folder, tmp_path / "one")


def test_health_of_two_nodes_names_the_disk_that_is_not_shared(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Each node has a /dev/shm of its own, so rank 1 does not see what rank 0 writes there."""
    program = ("-m", "r3.doctor", "--fast")
    attempts = nodes.launch(tmp_path / "x", "--log.dir", "/dev/shm/run", program=program)
    assert end(attempts) == [1, 1]
    text = attempts[0].text
    assert "FAIL  disk" in text and "/dev/shm is not that of rank 0: log.dir must be on" in text
    assert "rank 1 on node1: " in text and "rank 0 on " not in text.partition("FAIL")[2]
    for check in ("devices", "ring", "clocks", "versions"):
        assert f"pass  {check}" in text
    assert "2 machine(s)" in text and "4 of 5 passed; FAILED: disk" in text
