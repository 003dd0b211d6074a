"""A stall is reported with rank, phase, stacks and laggards; progress is not."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from r3.run.folder import RunDir, write_json
from r3.run.watchdog import Watchdog
from tests.world import ROOT

pytestmark = pytest.mark.unit

STALL_S = 0.2


def wait_for(stream: io.StringIO, text: str, *, count: int = 1) -> str:
    """What the stream holds once `text` is there; the watching thread is given ten seconds on a
    busy machine.
    """
    deadline = time.monotonic() + 10
    while stream.getvalue().count(text) < count:
        assert time.monotonic() < deadline, f"{text!r} not in time; got:\n{stream.getvalue()}"
        time.sleep(0.01)
    return stream.getvalue()


def test_a_stall_is_reported_with_rank_phase_and_stacks() -> None:
    stream = io.StringIO()

    def this_very_function() -> str:
        return wait_for(stream, "end of report")

    with Watchdog(3, 4, stall_s=STALL_S, stream=stream) as watchdog:
        watchdog.beat("generate")
        report = this_very_function()
    assert "rank 3 made no progress for 0." in report
    assert "in phase 'generate'" in report
    assert "in this_very_function" in report  # the stalled thread's stack
    assert "in _watch" in report  # all threads' stacks


def test_reports_repeat_at_doubled_distance_and_begin_anew_after_a_beat() -> None:
    stream = io.StringIO()
    with Watchdog(0, 1, stall_s=STALL_S, stream=stream) as watchdog:
        watchdog.beat("pack")
        report = wait_for(stream, "made no progress", count=3)
        silent = [
            float(part.split(" s in")[0]) for part in report.split("made no progress for ")[1:4]
        ]
        for reported, least in zip(silent, (1, 2, 4), strict=True):
            assert reported >= round(least * STALL_S, 1)
        watchdog.beat("train")
        report = wait_for(stream, "in phase 'train'")
        silent_s = float(report.split(" s in phase 'train'")[0].rsplit(" ", 1)[1])
        # The first report after a beat does not wait as the fourth would have
        assert silent_s < 8 * STALL_S


def test_progress_is_not_a_stall() -> None:
    stream = io.StringIO()
    with Watchdog(0, 1, stall_s=2.0, stream=stream) as watchdog:
        for _ in range(60):
            watchdog.beat("generate")
            time.sleep(0.05)
    assert stream.getvalue() == ""


def test_zero_watches_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    with Watchdog(0, 1, stall_s=0, run_dir=RunDir(tmp_path)) as watchdog:
        watchdog.beat("generate")
        assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_it_stops_cleanly_and_at_once() -> None:
    before = threading.active_count()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="own error"), Watchdog(0, 1, stall_s=600.0):
        raise RuntimeError("own error")
    assert time.monotonic() - began < 2.0
    assert threading.active_count() == before


def test_heartbeats_name_the_rank_that_lags(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    ours, theirs = io.StringIO(), io.StringIO()
    with (
        Watchdog(0, 3, stall_s=STALL_S, run_dir=run_dir, stream=ours) as ahead,
        Watchdog(1, 3, stall_s=STALL_S, run_dir=run_dir, stream=theirs) as behind,
    ):
        for phase in ("sync", "generate", "generate", "train"):
            ahead.beat(phase)
        for phase in ("sync", "generate"):
            behind.beat(phase)
        wait_for(theirs, "end of report")
        # By the second, both heartbeats surely hold the last phases
        wait_for(ours, "end of report", count=2)
        deadline = time.monotonic() + 10
        while json.loads(run_dir.heartbeat(1).read_text())["phase"] != "generate":
            assert time.monotonic() < deadline
    state = json.loads(run_dir.heartbeat(0).read_text())
    assert (state["rank"], state["phase"], state["phases"], state["pid"]) == (
        0,
        "train",
        3,
        os.getpid(),
    )
    report = ours.getvalue().rsplit("rank 0 made no progress", 1)[1]
    assert "rank 2: no heartbeat" in report
    assert "rank 1: phase 'generate'" in report
    assert "LAGS by 1 phase" in report
    (line,) = [line for line in report.splitlines() if line.startswith("  rank 0:")]
    assert "LAGS" not in line


def test_a_heartbeat_that_is_no_longer_written_is_told_apart(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    dead = {
        "rank": 1,
        "phase": "train",
        "phases": 9,
        "silent_s": 0.0,
        "written_at": time.time() - 100,
        "host": "h",
        "pid": 1,
    }
    write_json(run_dir.heartbeat(1), dead)
    stream = io.StringIO()
    with Watchdog(0, 2, stall_s=STALL_S, run_dir=run_dir, stream=stream) as watchdog:
        watchdog.beat("train")
        report = wait_for(stream, "end of report")
    assert "heartbeat 100 s old: process dead, stopped, or locked inside native code" in report


def test_a_disk_that_refuses_heartbeats_does_not_end_the_watch(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").write_text("a file where the folder should be")
    stream = io.StringIO()
    with Watchdog(0, 2, stall_s=STALL_S, run_dir=RunDir(tmp_path), stream=stream):
        report = wait_for(stream, "end of report")
    assert report.count("cannot write its heartbeat") == 1
    assert "in phase 'start'" in report


_HANGS = """
import sys, time
from pathlib import Path
from r3.run.folder import RunDir
from r3.run.watchdog import Watchdog
from tests.world import ROOT
folder, rank, other_is_silent = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "silent"
run_dir, done = RunDir(folder), folder / "done"
while rank == 0 and not run_dir.heartbeat(1).exists():
    time.sleep(0.01)
with Watchdog(rank, 2, stall_s=0, kill_after_s=1.0, run_dir=run_dir) as watchdog:
    until = time.monotonic() + (4 if rank == 0 else 50)
    while time.monotonic() < until and not done.exists():
        if rank == 1 and not other_is_silent:
            watchdog.beat("generate")
        time.sleep(0.05)
    done.touch()
"""


@pytest.mark.parametrize(("other", "codes"), [("silent", [75, 75]), ("works", [0, 0])])
def test_stall_of_all_ranks_ends_them_and_waiting_does_not(
    other: str, codes: list[int], tmp_path: Path
) -> None:
    """Two processes: both hang, or one waits for the other, which makes progress."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _HANGS, str(tmp_path), str(rank), other],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in processes]
    # A rank whose own time is up exits at once; the second follows within a heartbeat.
    assert [process.returncode for process in processes] == codes, said
    assert ("no rank made progress for 1 s" in said[0]) == (other == "silent")
