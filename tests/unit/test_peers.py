"""A rank that waits in shared memory notices who has ended, stays away or stopped waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from r3.runtime.peers import SharedBarrier, is_running

pytestmark = pytest.mark.unit


def words() -> memoryview:
    """Of a rank that has not come yet."""
    return memoryview(bytearray(24)).cast("q")


@pytest.mark.parametrize("is_collected", [False, True])
def test_a_rank_whose_process_has_ended_is_not_waited_for(is_collected: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    if is_collected:
        process.wait(30)
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    own = words()
    barrier = SharedBarrier([own, words()], 0, [os.getpid(), process.pid], limit_s=60.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 1 .*\(process {process.pid}\): it has ended"):
        barrier.wait(0)
    assert time.monotonic() - began < 5.0
    process.wait(30)
    # Whoever comes now hears that this rank does not wait any more.
    late = SharedBarrier([own, words()], 1, [os.getpid(), os.getpid()], limit_s=60.0)
    with pytest.raises(RuntimeError, match=r"rank 0 .*: it stopped waiting"):
        late.wait(0)


def test_a_rank_that_came_and_then_ended_is_not_missed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    theirs = words()
    theirs[0], theirs[2] = 1, 7  # at the first barrier, with the number 7
    barrier = SharedBarrier([words(), theirs], 0, [os.getpid(), process.pid], limit_s=60.0)
    assert barrier.wait(5) == [5, 7]


def test_a_rank_that_came_while_this_one_was_suspended_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "10000")  # sleep at once
    theirs = words()
    barrier = SharedBarrier([words(), theirs], 0, [os.getpid()] * 2, limit_s=0.05)

    def suspended(_: float) -> None:
        theirs[0] = 1
        until = time.monotonic() + 0.1  # longer than the limit
        while time.monotonic() < until:
            pass

    monkeypatch.setattr(time, "sleep", suspended)
    assert barrier.wait(5) == [5, 0]


def test_a_rank_waits_without_sleeping_only_if_there_are_enough_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def processor_seconds(ranks: int) -> float:
        """Of a rank that waits 8 ms for another one, 30 times."""
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        theirs = words()
        barrier = SharedBarrier([words(), theirs], 0, [os.getpid()] * 2, limit_s=60.0)

        def come() -> None:
            for number in range(1, 31):
                time.sleep(0.008)
                theirs[0] = number

        other = threading.Thread(target=come)
        began = time.process_time()
        other.start()
        for _ in range(30):
            barrier.wait(0)
        other.join()
        return time.process_time() - began

    # Of 0.24 s of waiting, a rank that sleeps wakes 1,200 times, of 30 us at most: a seventh.
    assert processor_seconds(ranks=10_000) < processor_seconds(ranks=0) / 2


def test_a_running_process_is_told_from_one_that_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_running(process.pid) and is_running(os.getpid())
    process.communicate(b"\n", timeout=30)
    assert not is_running(process.pid)
