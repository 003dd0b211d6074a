"""This process: which one it dies with, what it has started, how it imports."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def boot_id() -> str:
    """What Linux calls the time since this machine was started; "" elsewhere."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def addresses(host: str) -> list[str]:
    """The addresses of a host; none if its name does not resolve."""
    try:
        return [
            str(entry[4][0]) for entry in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
        ]
    except OSError:
        return []


def is_leader() -> bool:
    """Whether this process is rank 0, before the ranks have joined too."""
    return os.environ.get("RANK", "0") == "0"


def start_command(arguments: str) -> str:
    """The command that starts this program with other words, as this process was started."""
    # launch/ and `r3.train` set R3_RESUME. Without it, torchrun or Python started a program.
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = f"torchrun --nproc_per_node {ranks}" if ranks else "python"
    program = "-m r3" if Path(sys.argv[0]).name == "__main__.py" else sys.argv[0]
    by_hand = f"{launcher} {program} --from RUN_DIR"
    return os.environ.get("R3_RESUME", by_hand).replace("--from RUN_DIR", arguments)


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

    Without this, ranks whose launcher was killed continue and write during the next run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


@contextmanager
def importing(*, without: Iterable[str] = ()) -> Iterator[None]:
    """Search no garbage while the block imports modules, nor ever among their objects.

    Modules live as long as the process. Python would search their objects again and again while
    more are made, which takes a quarter of the CPU time of a start.

    Args:
        without: modules that cannot be imported in the block, for packages that would import them
            only because they are installed. Those that are imported already stay.
    """
    enabled = gc.isenabled()
    gc.disable()
    hidden = [name for name in without if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))  # where it finds None, Python raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
        gc.freeze()
        if enabled:
            gc.enable()
