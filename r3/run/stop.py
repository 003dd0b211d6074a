"""End a run early without losing work: a signal asks, the ranks agree at the end of a step."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from r3.runtime.mesh import Axis

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REQUEUE = 75  # exit code; sysexits.h calls it "temporary failure: try again later"


class StoppedEarly(Exception):
    """A signal ended the run after a step, with a checkpoint of that step."""

    def __init__(self, step: int, name: str) -> None:
        super().__init__(f"stopped by {name} after step {step}")


class StopRequest:
    """Listens for SIGTERM, SIGINT and SIGUSR1: `with StopRequest() as stop:`.

    The first signal asks for an end after the current step. A second SIGINT interrupts at once.
    """

    def __init__(self) -> None:
        self._name = ""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
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
        if not self._name and os.environ.get("RANK", "0") == "0":
            # os.write: the handler may run in the middle of a print.
            text = f"\n{signal.Signals(number).name}: stopping after this step, with a checkpoint"
            os.write(sys.stderr.fileno(), f"{text}\n".encode())
        self._name = signal.Signals(number).name
