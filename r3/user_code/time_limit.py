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


_AGAIN_S = 1.0  # until a function that has caught its end is ended again, in the main thread


class _Expired(BaseException):
    """Ends a function; no handler of `Exception` stops it."""


def time_limit(
    function: Callable[[], Result], seconds: float, error: Callable[[], Exception]
) -> Result:
    """Call a function in any thread, and raise `error()` out of it after so many seconds.

    Python code is interrupted between two of its instructions, a call into C when it returns. In
    the main thread a regular expression is interrupted, too.
    """
    if threading.current_thread() is threading.main_thread():
        expired = _Expired()
        try:
            with _alarm(seconds, expired):
                return function()
        except _Expired as caught:
            if caught is not expired:  # of a limit around this one
                raise
            raise error() from None
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
def _alarm(seconds: float, expired: _Expired) -> Iterator[None]:
    """Raise `expired` in the block of the main thread after so many seconds, by a signal."""

    def end(number: int, frame: FrameType | None) -> None:
        raise expired

    previous = signal.signal(signal.SIGALRM, end)
    began = time.monotonic()
    pending_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        # An earlier alarm, such as that of a test's time limit, stays set.
        left_s = max(pending_s - (time.monotonic() - began), 0.001) if pending_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, left_s)
