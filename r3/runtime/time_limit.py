"""A time limit on code that R3 did not write: users' files, chat templates."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


class _Expired(BaseException):
    """Ends a function in a thread; no handler of `Exception` stops it."""


def time_limit(
    function: Callable[[], Result], seconds: float, error: Callable[[], Exception]
) -> Result:
    """Call a function in any thread, and raise `error()` out of it after so many seconds.

    Python code is interrupted between two of its instructions, a call into C when it returns.
    """
    if threading.current_thread() is threading.main_thread():
        with _alarm(seconds, error):
            return function()
    # Threads get no signals: another thread sets the exception.
    thread, lock = threading.get_ident(), threading.Lock()
    over = sent = received = False

    def expire() -> None:
        nonlocal sent
        with lock:
            if not over:
                sent = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(_Expired)
                )

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    try:
        try:
            timer.start()
            return function()
        except _Expired:
            received = True
            raise
        finally:
            timer.cancel()
            with lock:
                over = True
            while sent and not received:  # it is raised here, and in nothing that follows
                time.sleep(0.001)
    except _Expired:
        raise error() from None


@contextmanager
def _alarm(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` in the block of the main thread after so many seconds, by a signal."""

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
