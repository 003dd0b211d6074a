"""Let a process die with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


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


def die_with_launcher() -> None:
    """Let a rank die with the torchrun that started it. Does nothing without a launcher.

    Without this, ranks whose launcher was killed continue and write beside the next run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
