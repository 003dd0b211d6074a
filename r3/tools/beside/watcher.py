"""The process that watches a rank: heartbeats, reports of stalls, cleanup of leftover processes.

    python -IS -c "... from r3.tools.beside.watcher import main; main(...)"

It shares no lock with the rank, so that it also sees a rank that holds the interpreter's lock, is
stopped, or waits inside native code. Each rank has one. Ranks differ in how far they came: each
watcher keeps a small file with the phase of its rank, and a report reads the files of all ranks.

When the rank has ended, in whatever way, the watcher ends the processes that the rank had started:
a pool that nobody closed would keep memory, ports and the console for ever. A daemon has left its
parents and its session; it is known by what it inherits: forked ones map the file of the beats,
programs have the variable `MARK`.

Imports the standard library and a few small modules of R3 only, because it starts with each rank.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3.run.folder import RunDir, write_json, write_text
from r3.tools.beside.watchdog import ENDS_RANK, MARK, SHOWS_STACKS, Beat, mark_of

_RECORD = 1 << 16  # bytes, more than a beat has
_MAX_TICK_S = 5.0
_MAX_NAMED = 16
_STACKS_S = 3.0  # for a rank to write its stacks
_END_S = 1.0  # for processes that end by themselves when the rank has ended
# Phases in which no users' code runs, and bytes that are read or written are progress.
_OF_FILES = ("checkpoint of ", "export to ", "loading ", "verifying the checkpoint")
_PIECE = 1 << 20
_INTERRUPTED_S = 10.0  # between a second Ctrl-C and the end by force


class Watcher:
    """Watches one rank until it ends.

    Args:
        rank, size: of the rank in the run.
        pid: its process.
        beats: descriptor of the file with its `Beat`.
        stacks: descriptor of the file into which it writes its stacks after `SHOWS_STACKS`.
        stall_s: seconds without a beat that make a stall; reported again after twice, four times
            ... that; 0 = never.
        says: descriptor for reports.
    """

    def __init__(
        self, *, rank: int, size: int, pid: int, beats: int, stacks: int, stall_s: float, says: int
    ) -> None:
        self._rank, self._size, self._pid = rank, size, pid
        self._beats, self._stacks, self._says = beats, stacks, says
        self._stall_s = stall_s or float("inf")
        self._ended = os.pidfd_open(pid)
        self._began = _started_at(os.getpid())
        self._leads_session = os.getsid(pid) == pid
        self._started: dict[int, int] = {}  # processes of the rank, with their start times
        self._users_code = ""
        self._said_unwritable = False
        self._mark, self._file = f"{MARK}={mark_of(pid, beats)}".encode(), os.fstat(beats).st_ino
        self._moved, self._moved_at = 0, 0.0  # bytes that count as progress, and when

    def watch(self) -> None:
        """Watch until the rank has ended; then end what it had started."""
        last = self._last()
        reported, wait_s = last, self._stall_s
        ticked, stopped_s = time.monotonic(), 0.0
        while True:
            last, now = self._last(), time.monotonic()
            limits = [limit for limit in (self._stall_s, last.kill_after_s) if limit > 0]
            tick_s = min(*(limit / 4 for limit in limits), _MAX_TICK_S)
            # Rank and watcher were stopped together (Ctrl-Z): there was no chance for progress.
            if now - ticked > tick_s + _MAX_TICK_S:
                stopped_s += now - ticked
            ticked = now
            if last != reported:
                reported, wait_s, stopped_s, self._users_code = last, self._stall_s, 0.0, ""
            silent_s = max(0.0, now - last.at - stopped_s)
            self._write_heartbeat(last, silent_s)
            if silent_s >= wait_s:
                self._report(last, silent_s)
                wait_s *= 2
            if 0 < last.kill_after_s <= min(silent_s, self._silence_of_others(last)):
                self._end_rank(last)
            if select.select([self._ended], [], [], tick_s)[0]:
                break
            self._note_started()
        self.end_started()

    def _last(self) -> Beat:
        """The rank's last beat. A read beside a write may mix two, so it must come twice."""
        content = b""
        while content != (content := os.pread(self._beats, _RECORD, 0)):
            pass
        beat, moved = Beat(**json.loads(content.partition(b"\n")[0])), _bytes_moved(self._pid)
        if not beat.phase.startswith(_OF_FILES):
            self._moved = moved
        elif moved - self._moved >= _PIECE:
            self._moved, self._moved_at = moved, time.monotonic()
        return replace(beat, at=max(beat.at, self._moved_at))

    # --- heartbeats -----------------------------------------------------------------------------

    def _write_heartbeat(self, last: Beat, silent_s: float) -> None:
        if not last.folder or not Path(last.folder).is_dir():
            return
        state = {
            "rank": self._rank,
            "phase": last.phase,
            "phases": last.phases,
            "silent_s": round(silent_s, 1),
            "written_at": time.time(),
            "host": socket.gethostname(),
            "pid": self._pid,
            "users_code": self._users_code,
            "stopped": _state(self._pid) == "T",
        }
        try:
            write_json(RunDir(Path(last.folder)).heartbeat(self._rank), state, durable=False)
        except OSError as error:  # a full disk must not end the watch, and may have room again
            if not self._said_unwritable:
                self._say(f"r3 watchdog: rank {self._rank} cannot write its heartbeat: {error}\n")
            self._said_unwritable = True

    def _states(self, last: Beat) -> dict[int, dict[str, Any]]:
        """The heartbeats of all ranks that have one."""
        states = {}
        for rank in range(self._size) if last.folder else ():
            with suppress(OSError, ValueError):
                file = RunDir(Path(last.folder)).heartbeat(rank)
                states[rank] = json.loads(file.read_bytes())
        return states

    def _silence_of_others(self, last: Beat) -> float:
        """Seconds since some other rank made progress; infinite if nothing is known of any."""
        now = time.time()
        return min(
            (
                state["silent_s"] + now - state["written_at"]
                for rank, state in self._states(last).items()
                if rank != self._rank
            ),
            default=float("inf"),
        )

    # --- reports --------------------------------------------------------------------------------

    def _report(self, last: Beat, silent_s: float) -> None:
        stacks = self._read_stacks()
        self._users_code = _users_code(stacks)
        self._write_heartbeat(last, silent_s)
        # One write, so that the reports of several ranks on one terminal do not mix line by line.
        self._say(
            f"r3 watchdog: rank {self._rank} made no progress for {silent_s:.1f} s in phase "
            f"{last.phase!r}{self._cause(last)}\n"
            f"{''.join(self._standing(last))}stacks of rank {self._rank}:\n{stacks}"
            f"r3 watchdog: end of report of rank {self._rank}\n"
        )

    def _cause(self, last: Beat) -> str:
        """What keeps this rank from its work: itself, or one that came less far."""
        if own := _place(self._users_code, _state(self._pid) == "T"):
            return f": it {own.rstrip(',')}"
        states = [state for state in self._states(last).values() if state["phases"] < last.phases]
        if not states:
            return ""
        lags = min(states, key=lambda state: state["phases"])
        place = _place(lags["users_code"], lags["stopped"]) or "is there"
        return f": it waits for rank {lags['rank']}, which {place} in phase {lags['phase']!r}"

    def _standing(self, last: Beat) -> list[str]:
        """One line per rank with its phase, ranks that lag first."""
        if self._size == 1 or not last.folder:
            return []
        states = self._states(last)
        lines = [
            f"  rank {rank}: no heartbeat, it never started or cannot write\n"
            for rank in range(self._size)
            if rank not in states
        ]
        furthest = max((state["phases"] for state in states.values()), default=0)
        for state in sorted(states.values(), key=lambda s: (s["phases"], s["rank"])):
            age_s = time.time() - state["written_at"]
            behind = furthest - state["phases"]
            line = (
                f"  rank {state['rank']}: phase {state['phase']!r}, silent for "
                f"{state['silent_s'] + age_s:.1f} s"
            )
            line += f", LAGS by {behind} phase{'s' * (behind > 1)}" if behind else ""
            place = _place(state["users_code"], state["stopped"]).rstrip(",")
            line += f", {place}" if place else ""
            # A watcher writes whatever its rank does: an old file means more than a silent rank.
            if age_s > max(4 * _MAX_TICK_S, min(self._stall_s, 600.0)):
                line += f", heartbeat {age_s:.0f} s old: its process or its machine is gone"
            lines.append(f"{line} (pid {state['pid']} on {state['host']})\n")
        if len(lines) > _MAX_NAMED:
            lines[_MAX_NAMED:] = [f"  ... and {len(lines) - _MAX_NAMED} ranks that came further\n"]
        return lines

    def _read_stacks(self) -> str:
        """The Python stacks of all threads of the rank, by `faulthandler` in its signal handler."""
        if _state(self._pid) == "T":
            return "(none: the process is stopped)\n"
        os.ftruncate(self._stacks, 0)
        with suppress(ProcessLookupError):
            os.kill(self._pid, SHOWS_STACKS)
        until, size = time.monotonic() + _STACKS_S, 0
        while time.monotonic() < until:
            time.sleep(0.1)
            before, size = size, os.fstat(self._stacks).st_size
            if size and size == before:
                break
        text = os.pread(self._stacks, size, 0).decode(errors="replace")
        return text or "(none: it does not answer a signal)\n"

    def _say(self, text: str) -> None:
        with suppress(OSError):  # nobody reads any more
            os.write(self._says, text.encode(errors="backslashreplace"))

    # --- the end --------------------------------------------------------------------------------

    def _end_rank(self, last: Beat) -> None:
        if not self._users_code:
            self._users_code = _users_code(self._read_stacks())
        text = (
            f"r3 watchdog: no rank made progress for {last.kill_after_s:g} s "
            f"(debug.kill_after_s); rank {self._rank} ends in phase {last.phase!r}"
            f"{self._cause(last)}\n"
        )
        self._say(text)
        first = RunDir(Path(last.folder)).first_failure
        # What other ranks say now, they say because of this end.
        if last.folder and Path(last.folder).is_dir() and not first.exists():
            with suppress(OSError):
                write_text(first, text, private=True)
        self.kill_rank()

    def kill_rank(self) -> None:
        """End the rank at once, whatever it does."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, ENDS_RANK)
            os.kill(self._pid, signal.SIGCONT)  # a stopped process takes no other signal

    def _note_started(self) -> None:
        """Remember the processes that the rank has started since, and those that they started."""
        family = {self._pid}
        table = _processes()
        grown = True
        while grown:
            more = {pid for pid, process in table.items() if process.parent in family} - family
            family, grown = family | more, bool(more)
        for pid in family - {self._pid, os.getpid()}:
            if table[pid].started >= self._began:
                self._started[pid] = table[pid].started

    def end_started(self) -> None:
        """Kill what the rank had started and what does not end with it."""
        until = time.monotonic() + _END_S
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        return [
            pid
            for pid, process in _processes().items()
            if pid != os.getpid()
            and process.started >= self._began
            and process.state != "Z"
            and (
                self._started.get(pid) == process.started
                or (self._leads_session and process.session == self._pid)
                or self._is_marked(pid)
            )
        ]

    def _is_marked(self, pid: int) -> bool:
        with suppress(OSError):  # another user's
            if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
            mapped = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            return any("/memfd:r3-beats" in line and f" {self._file} " in line for line in mapped)
        return False


@dataclass(frozen=True)
class _Process:
    state: str
    parent: int
    session: int
    started: int  # clock ticks after the start of the machine


def _read_process(pid: int) -> _Process | None:
    with suppress(OSError):
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Process(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))
    return None


def _processes() -> dict[int, _Process]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return {pid: process for pid in pids if (process := _read_process(pid))}


def _bytes_moved(pid: int) -> int:
    """Bytes that a process has read and written so far; 0 if the system does not tell."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def _state(pid: int) -> str:
    """The kernel's letter for what a process does; T is stopped. Empty if it is gone."""
    process = _read_process(pid)
    return process.state if process else ""


def _started_at(pid: int) -> int:
    process = _read_process(pid)
    return process.started if process else 0


def _place(users_code: str, is_stopped: bool) -> str:
    if is_stopped:
        return "is stopped (SIGSTOP)"
    return f"runs your code, {users_code}," if users_code else ""


_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_ROOT = str(Path(__file__).resolve().parents[3])


def _users_code(stacks: str) -> str:
    """The user's function in which a thread of R3 stands, in the stacks of `faulthandler`.

    Empty if there is none: the innermost frame that is no library's decides, so a file that
    starts the run is not blamed for R3's waiting. Threads that users have started do not count.
    """
    paths = sysconfig.get_paths()
    libraries = (sys.prefix, paths["stdlib"], paths["platstdlib"], "<")
    own = (f"{_ROOT}/r3/", f"{_ROOT}/train.py")
    for thread in stacks.split("\n\n"):
        for frame in _FRAME.finditer(thread) if f"{_ROOT}/r3/" in thread else ():
            file = (
                frame["file"] if frame["file"].startswith("<") else os.path.abspath(frame["file"])
            )
            if file.startswith(own):
                break
            if "site-packages" not in file and not file.startswith(libraries):
                return f"{frame['name']} ({frame['file']}:{frame['line']})"
    return ""


def main(words: Sequence[str]) -> None:
    """Watch a rank; `words` are the arguments of `Watcher` in order, as text."""
    numbers = dict(zip(("rank", "size", "pid", "beats", "stacks", "says"), words[:-1], strict=True))
    watcher = Watcher(**{key: int(word) for key, word in numbers.items()}, stall_s=float(words[-1]))
    # It outlives the signals that stop or end the rank, and acts on a second Ctrl-C alone: a rank
    # that holds the interpreter's lock does not see one.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    interrupts = 0

    def interrupted(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts == 2:
            signal.setitimer(signal.ITIMER_REAL, _INTERRUPTED_S)

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGALRM, lambda *_: watcher.kill_rank())
    watcher.watch()
    os._exit(0)  # nothing is left to do, and a person waits for the prompt
