"""A stall is reported with rank, phase, stacks and laggards; progress is not."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from r3.run import RunDir, hold, write_json
from r3.tools.beside.watchdog import ENDS_RANK, Watchdog
from tests.runs import program, soon
from tests.world import ROOT

STALL_S = 0.2
HERE: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}


class Said:
    """What watchers write to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    @property
    def text(self) -> str:
        return self._path.read_text()

    def wait_for(self, text: str, *, count: int = 1) -> str:
        """The text of the file once `text` is in it so many times; ten seconds are given, for a
        busy machine.
        """
        in_time = soon(lambda: self.text.count(text) >= count, 10)
        assert in_time, f"{text!r} not in time; got:\n{self.text}"
        return self.text


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Said]:
    """A file for reports."""
    file = Said(tmp_path / "said")
    yield file
    os.close(file.descriptor)


def test_the_watcher_starts_in_a_python_without_packages() -> None:
    """It would die unseen otherwise, and nothing would report a stall."""
    words = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {{}}"
    for module, starts in (("r3.tools.beside.watcher", True), ("r3.config", False)):
        bare = program(sys.executable, "-IS", "-c", words.format(module))
        assert (bare.returncode == 0) == starts, bare.stderr


def test_a_stall_is_reported_with_rank_phase_and_stacks(said: Said) -> None:
    def this_very_function() -> str:
        return said.wait_for("end of report")

    other = threading.Thread(target=lambda: said.wait_for("end of report"), name="other")
    with Watchdog(3, 4, stall_s=STALL_S, says=said.descriptor) as watchdog:
        watchdog.beat("generate")
        other.start()
        report = this_very_function()
    other.join()
    assert "rank 3 made no progress for 0." in report
    assert "in phase 'generate'" in report
    assert "in this_very_function" in report  # the stalled thread's stack
    assert "in _bootstrap" in report  # all threads' stacks


def test_reports_repeat_at_doubled_distance_and_begin_anew_after_a_beat(said: Said) -> None:
    with Watchdog(0, 1, stall_s=STALL_S, says=said.descriptor) as watchdog:
        watchdog.beat("pack")
        report = said.wait_for("made no progress", count=3)
        silent = map(float, re.findall(r"made no progress for ([\d.]+) s in", report)[:3])
        for reported, least in zip(silent, (1, 2, 4), strict=True):
            assert reported >= round(least * STALL_S, 1)
        watchdog.beat("train")
        report = said.wait_for("in phase 'train'")
        (silent_s,) = re.findall(r"([\d.]+) s in phase 'train'", report)
        # The first report after a beat does not wait as the fourth would have
        assert float(silent_s) < 8 * STALL_S


@pytest.mark.parametrize(("stall_s", "beats"), [(2.0, 60), (0.0, 1)], ids=["progress", "off"])
def test_progress_is_not_a_stall_and_zero_reports_none(
    stall_s: float, beats: int, said: Said
) -> None:
    with Watchdog(0, 1, stall_s=stall_s, says=said.descriptor) as watchdog:
        for _ in range(beats):
            watchdog.beat("generate")
            time.sleep(0.05 if stall_s else 0.5)
    assert said.text == ""


def test_it_stops_cleanly_and_at_once() -> None:
    before = len(psutil.Process().children())
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="own error"), Watchdog(0, 1, stall_s=600.0):
        raise RuntimeError("own error")
    assert time.monotonic() - began < 2.0
    assert len(psutil.Process().children()) == before


def beat_of(run_dir: RunDir, rank: int, phase: str) -> None:
    """Wait until the heartbeat of a rank has a phase."""
    file = run_dir.heartbeat(rank)
    assert soon(lambda: file.exists() and json.loads(file.read_text())["phase"] == phase, 10)


def test_heartbeats_name_the_rank_that_lags(said: Said, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with (
        Watchdog(1, 3, stall_s=4.0) as behind,
        Watchdog(0, 3, stall_s=STALL_S, says=said.descriptor) as ahead,
    ):
        behind.watch(run_dir, kill_after_s=0.0)
        ahead.watch(run_dir, kill_after_s=0.0)
        for phase in ("sync", "generate"):
            behind.beat(phase)
        for phase in ("sync", "generate", "generate", "train"):
            ahead.beat(phase)
        beat_of(run_dir, 1, "generate")
        beat_of(run_dir, 0, "train")
        report = said.wait_for("end of report", count=1 + said.text.count("end of report"))
    state = json.loads(run_dir.heartbeat(0).read_text())
    facts = [state[key] for key in ("rank", "phase", "phases", "pid")]
    assert facts == [0, "train", 3, os.getpid()]
    report = report.rsplit("rank 0 made no progress", 1)[1]
    assert "rank 2: no heartbeat" in report
    assert "rank 1: phase 'generate'" in report
    assert "LAGS by 1 phase" in report
    (line,) = [line for line in report.splitlines() if line.startswith("  rank 0:")]
    assert "LAGS" not in line


def test_a_heartbeat_that_is_no_longer_written_is_told_apart(said: Said, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    dead = {"rank": 1, "phase": "train", "phases": 9, "silent_s": 0.0, "host": "h", "pid": 1}
    dead |= {"written_at": time.time() - 100, "users_code": "", "stopped": False}
    write_json(run_dir.heartbeat(1), dead)
    with Watchdog(0, 2, stall_s=STALL_S, says=said.descriptor) as watchdog:
        watchdog.watch(run_dir, kill_after_s=0.0)
        # On a busy machine a first report may come before the folder is known.
        report = said.wait_for("its process or its machine is gone")
    assert re.search(r"rank 1: .*, heartbeat 10\d s old: its process", report)


def test_a_disk_that_refuses_heartbeats_does_not_end_the_watch(said: Said, tmp_path: Path) -> None:
    (tmp_path / "heartbeats").write_text("a file where the folder should be")
    with Watchdog(0, 2, stall_s=STALL_S, says=said.descriptor) as watchdog:
        watchdog.watch(RunDir(tmp_path), kill_after_s=0.0)
        report = said.wait_for("end of report")
    assert report.count("cannot write its heartbeat") == 1
    assert "in phase 'start'" in report


_MINE = """
import ctypes, os, re, signal
def regex(response, prompt):
    return re.match(r"(a+)+$", "a" * 40 + "b")
def native(response, prompt):
    return ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
def stopped(response, prompt):
    os.kill(os.getpid(), signal.SIGSTOP)
"""
_RANK = """
import os, sys, time
from pathlib import Path
from r3.run.folder import RunDir, read_metrics
from r3.tools.beside.watchdog import Watchdog
from r3.user_code.loading import load
from r3.user_code.workers import Pool, Threads
folder, rank, function = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
run_dir, done = RunDir(folder), folder / "done"
with Watchdog(rank, 2, stall_s=0.5, kill_after_s=60.0) as watchdog:
    watchdog.watch(run_dir, kill_after_s=0.0)
    while not all(run_dir.heartbeat(each).exists() for each in range(2)):
        watchdog.beat("start")
        time.sleep(0.01)
    watchdog.watch(run_dir, kill_after_s=1.5)
    watchdog.beat("generate")
    if rank == 1 and function == "works":
        for _ in range(40):
            watchdog.beat("generate")
            time.sleep(0.1)
        done.touch()
    elif rank == 1 and function == "":
        os.mkfifo(folder / "metrics.jsonl")
        read_metrics(folder / "metrics.jsonl")  # nobody writes
    elif rank == 1:
        pool = Pool(Threads(), timeout_s=0.5)
        pool.submit("a key", load(f"{folder / 'mine.py'}:{function}"), "", None)
        pool.poll(50)
    watchdog.beat("score")
    until = time.monotonic() + 50
    while time.monotonic() < until and not done.exists():
        time.sleep(0.05)
"""


def hang(function: str, folder: Path) -> tuple[list[int], list[str]]:
    """Two ranks of which the second one calls a function of a user (empty: one of R3 that waits),
    and the first one waits for it; returns their exit codes and what they printed. A user's own
    file starts them.
    """
    (folder / "mine.py").write_text(_MINE)
    (folder / "starts.py").write_text(_RANK)
    command = [sys.executable, str(folder / "starts.py"), str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), function], **HERE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("regex", "runs your code, regex ({folder}/mine.py:4)"),
        ("native", "runs your code, native ({folder}/mine.py:6)"),
        ("stopped", "is stopped (SIGSTOP)"),
    ],
)
def test_code_that_blocks_all_threads_is_ended(function: str, cause: str, tmp_path: Path) -> None:
    codes, (waits, hangs) = hang(function, tmp_path)
    assert codes == [-ENDS_RANK] * 2, hangs
    cause = cause.format(folder=tmp_path)
    first = hangs.splitlines()[0]
    assert first.startswith("r3 watchdog: rank 1 made no progress for ")
    assert first.endswith(f" s in phase 'generate': it {cause}")
    assert f"; rank 1 ends in phase 'generate': it {cause}\n" in hangs
    assert "LAGS by 1 phase, " in waits and f", {cause} (pid " in waits
    last = waits.splitlines()[-1]
    assert "; rank 0 ends in phase 'score': it waits for rank 1, which " in last
    assert cause in last and last.endswith(" in phase 'generate'")
    assert cause in RunDir(tmp_path).first_failure.read_text()


def test_a_file_that_starts_the_run_is_not_named_as_what_blocks(tmp_path: Path) -> None:
    codes, (_, hangs) = hang("", tmp_path)
    assert codes == [-ENDS_RANK] * 2 and "read_metrics" in hangs, hangs
    assert "; rank 1 ends in phase 'generate'\n" in hangs and "your code" not in hangs


def test_a_rank_that_waits_for_one_that_works_is_not_ended(tmp_path: Path) -> None:
    codes, said = hang("works", tmp_path)
    assert codes == [0, 0], said


_STARTS = """
import multiprocessing, os, subprocess, sys, time
from r3.run.lock import hold
from pathlib import Path
from r3.tools.beside.watchdog import Watchdog
watchdog = Watchdog(0, 1, stall_s=0.4)
watchdog.start()
lock = hold(Path(sys.argv[1]))
context = multiprocessing.get_context("fork")
pool = context.Pool(2)
pool.map(abs, [1])
program = subprocess.Popen(["sleep", "600"], start_new_session=True)
pids = [*(each.pid for each in multiprocessing.active_children()), program.pid]
# Two daemons, as libraries make them: a forked one and a program, of which nothing is seen.
for command in (None, ["sleep", "600"]):
    reading, writing = os.pipe()
    if not os.fork():
        os.setsid()
        if not (child := os.fork()) and command:
            os.execvp(command[0], command)
        if not child:
            os.closerange(3, 256)
            time.sleep(600)
        os.write(writing, str(child).encode())
        os._exit(0)
    pids.append(int(os.read(reading, 16)))
    os.wait()
print(*pids, flush=True)
if sys.argv[3] == "later":
    time.sleep(1)
if sys.argv[2] == "release":
    lock.release()
    os._exit(0)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("end", "when"), [("release", "later"), ("kill", "at once")])
def test_what_a_run_started_ends_and_holds_no_lock(end: str, when: str, tmp_path: Path) -> None:
    beside = subprocess.Popen(["sleep", "600"], start_new_session=True)  # of nobody's run
    done = program(sys.executable, "-c", _STARTS, tmp_path / "run", end, when)
    assert done.returncode == (0 if end == "release" else -signal.SIGKILL)
    hold(tmp_path / "run").release()  # at once, and not when they have ended
    started = list(map(int, done.stdout.split()))
    assert len(started) == 5
    assert soon(lambda: not any(map(psutil.pid_exists, started)), 10), started
    assert beside.poll() is None
    beside.kill()
    beside.wait()


_SAVES = """
import sys, time
from r3.tools.beside.watchdog import Watchdog
with Watchdog(0, 1, stall_s=600.0, kill_after_s=1.0) as watchdog, open(sys.argv[1], "wb") as file:
    watchdog.beat(sys.argv[2])
    for _ in range(60):
        file.write(bytes(int(sys.argv[3])))
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("phase", "size", "ends"),
    [
        ("checkpoint of step 2", 1 << 18, False),  # slow and steady
        ("checkpoint of step 2", 1 << 10, True),  # what any process writes is no progress
        ("generate", 1 << 18, True),  # nor what users' code writes while it hangs
    ],
)
def test_a_slow_checkpoint_is_progress(phase: str, size: int, ends: bool, tmp_path: Path) -> None:
    rank = program(sys.executable, "-c", _SAVES, tmp_path / "file", phase, size)
    assert rank.returncode == (-ENDS_RANK if ends else 0), rank.stderr


_WORKS = """
import time
from r3.tools.beside.watchdog import Watchdog
with Watchdog(0, 1, stall_s=1.0, kill_after_s=2.0) as watchdog:
    print("works", flush=True)
    for _ in range(100):
        watchdog.beat("train")
        time.sleep(0.02)
"""


def test_a_run_that_was_stopped_as_a_whole_has_not_stalled() -> None:
    """As by Ctrl-Z; the stop is longer than a stall, and than the end of the run would take."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    rank = subprocess.Popen([sys.executable, "-c", _WORKS], **HERE, **pipes)
    assert rank.stdout is not None and rank.stdout.readline() == "works\n"
    time.sleep(0.5)  # the watcher starts
    family = [psutil.Process(rank.pid), *psutil.Process(rank.pid).children()]
    assert len(family) == 2
    for process in family:
        process.suspend()
    time.sleep(5)
    for process in family:
        process.resume()
    said = rank.communicate(timeout=60)[1]
    assert (rank.returncode, said) == (0, "")
