"""How a run ends before its last step: a signal asks and the ranks agree, or an error fails it.

A failed run prints one block from one rank; full tracebacks are in files.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import traceback
from pathlib import Path
from types import FrameType

from r3 import extras
from r3.errors import EXPLAINED
from r3.run.checkpointer import SaveError
from r3.run.folder import RunDir, step_folders, write_text
from r3.runtime.mesh import Axis
from r3.runtime.process import is_leader, start_command
from r3.runtime.terminal import flush, say, say_in_handler

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
REQUEUE = 75  # exit code; sysexits.h calls it "temporary failure: try again later"


class StoppedEarly(Exception):
    """A signal ended the run after a step, with a checkpoint of that step."""

    def __init__(self, step: int, name: str) -> None:
        super().__init__(step, name)  # what unpickling gives to __init__

    def __str__(self) -> str:
        return "stopped by {1} after step {0}".format(*self.args)


class StopRequest:
    """Listens for SIGTERM, SIGHUP, SIGINT and SIGUSR1: `with StopRequest(first_failure) as stop:`.

    In another thread than the main one, where Python allows no handlers, it hears none.
    The first signal asks for an end after the current step. A second SIGINT interrupts at once.
    A signal that this process was told to ignore, as by nohup, stays ignored.

    Args:
        first_failure: the file that the first rank that fails makes. If it is there, the launcher
            sent the signal because of that rank: the run does not stop after its step, and its
            failure stays the last thing on the console.
    """

    def __init__(self, first_failure: Path) -> None:
        self._first_failure = first_failure
        self._name = ""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        on_main_thread = threading.current_thread() is threading.main_thread()
        for number in _SIGNALS if on_main_thread else ():
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def agreed(self, world: Axis) -> str:
        """The name of a signal that some rank has received, or "". All ranks must call."""
        return next(filter(None, world.all_gather_object(self._name)), "")

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._name and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._name:
            return  # the launcher or Slurm may add one; the first is the cause
        self._name = signal.Signals(number).name
        if is_leader() and not self._first_failure.exists():
            say_in_handler(f"\n{self._name}: stopping after this step, with a checkpoint")


_SHOWN_FRAMES = 3
_OF_A_RANK = re.compile(r"rank \d+: ")
INTERRUPTED = 130  # the shell's exit code for Ctrl-C


class FailureReport:
    """Ends the process when an error leaves its block: `with FailureReport(folder, rank=0):`.

    Every rank writes its traceback to `errors/` in the folder of the run. The first rank that fails
    prints one block to stderr; ranks that fail because of it print nothing. Exit code 1, or 130
    after Ctrl-C. `SystemExit` passes.

    Args:
        folder: the folder of the run.
        rank: this process; rank 0 forgets the errors of an earlier run.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        # The first rank that fails creates this file and prints its block.
        self._first = RunDir(folder.absolute()).first_failure  # users' code may change the folder
        self._folder = self._first.parent
        self._rank = rank
        if rank == 0:
            self._first.unlink(missing_ok=True)

    def _claim(self, text: str) -> bool:
        """Write the block of the first rank that fails; False if another rank did."""
        try:
            os.close(os.open(self._first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        try:
            write_text(self._first, f"{text.strip()}\n", private=True)
        except OSError:
            self._first.unlink(missing_ok=True)  # whole, or not there
            raise
        return True

    def __enter__(self) -> FailureReport:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        flush()
        path = self._folder / f"rank_{self._rank:05d}.txt"
        text = failure_text(error, rank=self._rank, path=path)
        full = "".join(traceback.format_exception(error))
        try:
            write_text(path, full, private=True)  # it may quote users' data
            if not self._claim(text):
                os._exit(1)
        except OSError as unwritable:
            text = failure_text(error, rank=self._rank, path=path, is_written=path.exists())
            text = f"{full}the traceback could not be written: {unwritable}\n{text}"
        say(text, error=True)
        os._exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def resume_command(folder: Path) -> str:
    """The command that continues the run of a folder, as this process was started."""
    return start_command(f"--from {folder}")


def failure_text(error: BaseException, *, rank: int, path: Path, is_written: bool = True) -> str:
    """The block that a person reads.

    Args:
        path: file with the full traceback, in `errors/` of the run's folder.
        is_written: whether that file is there.
    """
    folder = path.parent.parent
    saved = step_folders(RunDir(folder).checkpoints)
    resume = f"{'continue' if saved else 'start again'} with: {resume_command(folder)}"
    if isinstance(error, KeyboardInterrupt):
        return f"\ninterrupted by SIGINT; {resume}"
    where = "" if _OF_A_RANK.match(str(error)) else f" on rank {rank}"
    if isinstance(error, (*EXPLAINED, FloatingPointError, SaveError)):
        lines = [f"{type(error).__name__}{where}: {error}"]
    elif explained := extras.exhausted(error, where):
        lines = explained
    else:
        frames = traceback.extract_tb(error.__traceback__)[-_SHOWN_FRAMES:]
        lines = [f"{type(error).__name__}{where}: {error}"]
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    if is_written:
        lines.append(f"  full traceback: {path}")
    return "\n".join(["", *lines, f"  {resume}"])
