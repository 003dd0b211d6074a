"""Cache of compiled CPU kernels: one process per machine compiles, once.

The files are code, so the folder is the user's own (0700), or it is not used. Its name is a digest
of all that decides the code: the sources of this package, the compiler's version, Python's and the
processor. A clone, an environment or a wheel with the same sources thus finds the same files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import llvmlite
import numba
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

from r3.runtime.terminal import say


@cache
def folder() -> Path | None:
    """Return the folder, which exists; None if no folder of the user's own can be made."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    aside = Path(tempfile.gettempdir()) / f"r3-{os.getuid()}"  # as launch/slurm.sbatch
    for root in (home / "r3", aside):
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            for each in (root, place := root / "kernels", place := place / _digest()):
                each.mkdir(mode=0o700, exist_ok=True)
            if not os.access(place, os.W_OK):
                continue
        except OSError:  # a home that cannot be written
            continue
        if all(map(_is_private, (root, root / "kernels", place))):
            return place
        break
    else:
        place = home / "r3"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(
            f"CPU kernels are compiled in every process: {place} is not a folder of yours alone "
            "(permissions 0700) that can be written"
        )
    return None


def _is_private(path: Path) -> bool:
    found = path.lstat()
    is_own = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return is_own and stat.S_ISDIR(found.st_mode)


def _digest() -> str:
    """Return a digest of what decides the machine code."""
    versions = numba.__version__, llvmlite.__version__, platform.python_version()
    processor = get_host_cpu_name(), get_host_cpu_features().flatten()
    found = hashlib.sha256(repr((versions, processor)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Let one process compile in the block, while others wait; then they load what it compiled.

    Args:
        what: name of all that is compiled in the block.
    """
    place = folder()
    done = place and place / f"{what}.done"
    if place is None or done is None or done.exists():
        yield
        return
    with (place / "lock").open("w") as file:
        try:
            fcntl.flock(
                file, fcntl.LOCK_EX
            )  # until the file is closed, also by a process that dies
        except OSError:  # a file system without locks: each compiles
            say("CPU kernels: no lock, so that every rank compiles")
        if not done.exists():
            say("compiling CPU kernels, once for this user and processor (a minute at most)")
        yield
        done.touch()
