"""End a run early without losing work: a signal asks, the ranks agree at the end of a step."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

from r3.runtime.mesh import Axis
from r3.runtime.process import is_leader
from r3.runtime.terminal import say_in_handler

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
        if not self._name and is_leader() and not self._first_failure.exists():
            name = signal.Signals(number).name
            say_in_handler(f"\n{name}: stopping after this step, with a checkpoint")
        self._name = signal.Signals(number).name
