"""What a process sets about itself: it ends with the one that started it; how it imports."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as process `parent`, which started it, is gone.

    Args:
        parent: the process id that `os.getppid` gave when this process began. If it has changed
            since, the parent is dead already, and this process ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before that line
        os._exit(1)


def name_process(name: str) -> None:
    """Show this process under a name, of up to 15 characters, in top and in the kernel's messages.

    A forked process has the command line of the one that forked it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_launcher() -> None:
    """Let a rank die with the torchrun that started it. Does nothing without a launcher.

    Without this, ranks whose launcher was killed continue and write beside the next run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


@contextmanager
def importing() -> Iterator[None]:
    """Search no garbage while the block imports modules, nor ever among their objects.

    Modules live as long as the process. Python would search their objects again and again while
    more are made, which takes a quarter of the CPU time of a start.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
