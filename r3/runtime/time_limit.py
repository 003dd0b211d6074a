"""A time limit on code that R3 did not write: users' files, chat templates."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def time_limit(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` in the block after so many seconds; only the main thread can do so.

    Python code is interrupted between two of its instructions, a call into C when it returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        raise error()

    previous = signal.signal(signal.SIGALRM, expired)
    began = time.monotonic()
    pending_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # An earlier alarm, such as that of a test's time limit, stays set.
        left_s = max(pending_s - (time.monotonic() - began), 0.001) if pending_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, left_s)
