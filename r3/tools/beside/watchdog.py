"""The rank's side of the watchdog: report progress to its watcher."""

from __future__ import annotations

import faulthandler
import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from r3.run.folder import RunDir

ENDS_RANK = signal.SIGRTMAX  # nothing else sends it, so a launcher knows who ended a rank
SHOWS_STACKS = signal.SIGRTMAX - 1
MARK = "R3_WATCHED_BY"


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last progress of a rank, and how it is watched.

    Attributes:
        phases: phases entered so far. Ranks go through the same ones: the smallest number lags.
        at: time.monotonic(), which all processes of a machine share.
        kill_after_s: as `debug.kill_after_s`, for this phase; 0 = never.
        folder: of the run, for heartbeats; "" writes none.
    """

    phase: str
    phases: int
    at: float
    kill_after_s: float
    folder: str

    def line(self) -> bytes:
        """The beat as one line. What follows in its file is of an earlier, longer one."""
        return json.dumps(vars(self)).encode() + b"\n"


def mark_of(pid: int, beats: int) -> str:
    """The value of `MARK` in what rank `pid` starts; `beats` is the file of its beats."""
    return f"{pid}-{os.fstat(beats).st_ino}"


class Watchdog:
    """Has this rank watched from `start` to `close`; `beat(phase)` says that work proceeds.

    A process of its own reports when this rank stalls, with the stacks of all threads. It ends the
    rank by the signal `ENDS_RANK`, whatever the rank does. When this process ends
    without `close`, it also ends the processes that were started meanwhile.

    Args:
        rank, size: of this process in the run.
        stall_s: seconds without a beat that make a stall; reported again after twice, four times
            ... that; 0 = never.
        kill_after_s: seconds without progress on any rank after which this process ends, so that a
            launcher can start the run again; 0 = never. A rank that only waits for one that makes
            progress is not ended.
        says: descriptor for reports.
    """

    def __init__(
        self, rank: int, size: int, *, stall_s: float, kill_after_s: float = 0.0, says: int = 2
    ) -> None:
        self._words = (rank, size, stall_s, says)
        self._last = Beat(phase="start", phases=0, at=0.0, kill_after_s=kill_after_s, folder="")
        self._beats = self._stacks = -1
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to watch."""
        rank, size, stall_s, says = self._words
        # Memory, not files: a full disk must not end the watch.
        self._beats, self._stacks = (os.memfd_create(f"r3-{name}") for name in ("beats", "stacks"))
        fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)
        self._note(replace(self._last, at=time.monotonic()))
        self._map = mmap.mmap(self._beats, 1)  # forked processes have it, also daemons
        os.environ[MARK] = mark_of(os.getpid(), self._beats)
        faulthandler.register(SHOWS_STACKS, file=self._stacks, all_threads=True)
        words = [str(each) for each in (rank, size, os.getpid(), self._beats, self._stacks, says)]
        root = str(Path(__file__).resolve().parents[3])  # the folder that holds r3/
        program = (
            f"import sys; sys.path.insert(0, {root!r}); "
            f"from r3.tools.beside.watcher import main; main({[*words, str(stall_s)]})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-IS", "-c", program],
            env={"PATH": os.environ.get("PATH", "")},  # it is no rank
            pass_fds=(self._beats, self._stacks, says),
            stdin=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """Stop to watch. Closing twice does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            os.environ.pop(MARK, None)
            self._map.close()
            faulthandler.unregister(SHOWS_STACKS)
            os.close(self._beats)
            os.close(self._stacks)
            self._beats = self._stacks = -1

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def beat(self, phase: str) -> None:
        """Note progress in `phase`. Cheap enough for an inner loop."""
        last = self._last
        phases = last.phases + (phase != last.phase)
        self._note(replace(last, phase=phase, phases=phases, at=time.monotonic()))

    def watch(self, run_dir: RunDir | None = None, *, kill_after_s: float) -> None:
        """Watch by another limit from now on; with a folder, write heartbeats there."""
        folder = str(run_dir.path.absolute()) if run_dir else ""
        self._note(replace(self._last, folder=folder, kill_after_s=kill_after_s))

    def _note(self, beat: Beat) -> None:
        self._last = beat
        if self._beats >= 0:
            os.pwrite(self._beats, beat.line(), 0)
