"""Heartbeats and stall reports: a rank without progress prints its phase, its stacks and who lags.

A hang in a collective looks the same on every rank that waits in it. Ranks differ in how far they
came: each rank keeps a small file with its phase, and a report reads the files of all ranks. If no
rank makes progress for long enough, the processes end, so that a launcher can start the run again.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, TextIO

from r3.run.folder import RunDir, write_json
from r3.run.stop import REQUEUE

_MAX_TICK_S = 5.0
_MAX_NAMED = 16


@dataclass(frozen=True)
class _Beat:
    phase: str
    # phases entered so far: ranks go through the same ones, so the smallest number lags
    phases: int
    at: float  # monotonic clock


class Watchdog:
    """Reports when this rank stalls: `with Watchdog(...) as watchdog:`, `watchdog.beat(phase)`
    where work proceeds.

    Args:
        rank, size: of this process in the run.
        kill_after_s: seconds without progress on any rank after which this process ends, with exit
            code 75, so that a launcher can start the run again; 0 = never. A rank that only waits
            for one that makes progress is not ended.
        stall_s: seconds without a beat that make a stall; reported again after twice, four times
            ... that; 0 = never.
        run_dir: folder of the heartbeats; None writes none and cannot name ranks that lag.
        stream: where reports go; None = stderr.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        stall_s: float,
        kill_after_s: float = 0.0,
        run_dir: RunDir | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._stall_s = stall_s
        self._kill_after_s = kill_after_s
        self._run_dir = run_dir
        self._stream = stream
        self._last = _Beat(phase="start", phases=0, at=time.monotonic())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._stall_s > 0 or self._kill_after_s > 0:
            self._last = replace(self._last, at=time.monotonic())
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="r3-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def beat(self, phase: str) -> None:
        """Note progress in `phase`. Cheap enough for an inner loop."""
        last = self._last
        # One assignment of a complete object: the watching thread needs no lock.
        self._last = _Beat(
            phase=phase, phases=last.phases + (phase != last.phase), at=time.monotonic()
        )

    def _watch(self) -> None:
        limits = [each for each in (self._stall_s, self._kill_after_s) if each > 0]
        tick_s = min(*(each / 4 for each in limits), _MAX_TICK_S)
        reported, wait_s = self._last, self._stall_s or float("inf")
        ticked, stopped_s = time.monotonic(), 0.0
        while True:
            last, now = self._last, time.monotonic()
            # A process that was stopped (Ctrl-Z, SIGSTOP) had no chance to make progress.
            if now - ticked > tick_s + _MAX_TICK_S:
                stopped_s += now - ticked
            ticked = now
            if last is not reported:
                reported, wait_s, stopped_s = last, self._stall_s or float("inf"), 0.0
            silent_s = max(0.0, now - last.at - stopped_s)
            self._write_heartbeat(last, silent_s)
            if silent_s >= wait_s:
                self._report(last, silent_s)
                wait_s *= 2
            if 0 < self._kill_after_s <= min(silent_s, self._silence_of_others()):
                self._say(
                    f"r3 watchdog: no rank made progress for {self._kill_after_s:g} s "
                    f"(debug.kill_after_s); rank {self._rank} ends in phase {last.phase!r}\n"
                )
                os._exit(REQUEUE)
            if self._stop.wait(tick_s):
                return

    def _silence_of_others(self) -> float:
        """Seconds since some other rank made progress; infinite if nothing is known of any."""
        if self._run_dir is None:
            return float("inf")
        others = (self._read_heartbeat(rank) for rank in range(self._size) if rank != self._rank)
        now = time.time()
        silences = (state["silent_s"] + now - state["written_at"] for state in others if state)
        return min(silences, default=float("inf"))

    def _write_heartbeat(self, last: _Beat, silent_s: float) -> None:
        if self._run_dir is None or not self._run_dir.path.is_dir():
            return
        state = {
            "rank": self._rank,
            "phase": last.phase,
            "phases": last.phases,
            "silent_s": round(silent_s, 1),
            "written_at": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            write_json(self._run_dir.heartbeat(self._rank), state, durable=False)
        except OSError as error:  # a full disk must not end the watch
            self._say(f"r3 watchdog: rank {self._rank} cannot write its heartbeat: {error}\n")
            self._run_dir = None

    def _report(self, last: _Beat, silent_s: float) -> None:
        # One write, so that the reports of several ranks on one terminal do not mix line by line.
        self._say(
            f"r3 watchdog: rank {self._rank} made no progress for {silent_s:.1f} s in phase "
            f"{last.phase!r}\n"
            f"{''.join(self._standing())}"
            f"stacks of rank {self._rank}:\n{_stacks()}"
            f"r3 watchdog: end of report of rank {self._rank}\n"
        )

    def _standing(self) -> list[str]:
        """One line per rank with its phase, ranks that lag first."""
        if self._run_dir is None or self._size == 1:
            return []
        states = {rank: self._read_heartbeat(rank) for rank in range(self._size)}
        lines = [
            f"  rank {rank}: no heartbeat, it never started or cannot write\n"
            for rank in states
            if not states[rank]
        ]
        known = sorted(
            (state for state in states.values() if state), key=lambda s: (s["phases"], s["rank"])
        )
        furthest = max((state["phases"] for state in known), default=0)
        for state in known:
            age_s = time.time() - state["written_at"]
            behind = furthest - state["phases"]
            line = (
                f"  rank {state['rank']}: phase {state['phase']!r}, silent for "
                f"{state['silent_s'] + age_s:.1f} s"
            )
            line += f", LAGS by {behind} phase{'s' * (behind > 1)}" if behind else ""
            # The watchdog of a rank writes even while its program waits: an old file means more
            # than a silent rank.
            if age_s > max(4 * _MAX_TICK_S, self._stall_s):
                line += (
                    f", heartbeat {age_s:.0f} s old: process dead, stopped, or locked inside "
                    "native code"
                )
            lines.append(f"{line} (pid {state['pid']} on {state['host']})\n")
        if len(lines) > _MAX_NAMED:
            lines[_MAX_NAMED:] = [f"  ... and {len(lines) - _MAX_NAMED} ranks that came further\n"]
        return lines

    def _read_heartbeat(self, rank: int) -> dict[str, Any] | None:
        assert self._run_dir is not None
        try:
            return json.loads(self._run_dir.heartbeat(rank).read_bytes())
        except (OSError, ValueError):
            return None

    def _say(self, text: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(text)
        stream.flush()


def _stacks() -> str:
    """The Python stacks of all threads, as faulthandler prints them (it needs a real file)."""
    with tempfile.TemporaryFile("w+b") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
