"""A small disk of its own for a run, and a file that keeps it full."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from r3.run import REQUEUE
from r3.runtime.device import has_gpu
from tests.faults.attempts import Attempt, newest_checkpoint, rows_written
from tests.warm import PLACE

_PIECE = bytes(1 << 16)
_MOST_FREE = 2 << 20  # room for rows of metrics, not for a checkpoint


@dataclass(frozen=True)
class OwnDisk:
    """An empty disk that only some processes see.

    Attributes:
        folder: where they see it.
        keeper: process that has it mounted.
    """

    folder: Path
    keeper: subprocess.Popen[str]

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before the command of a forked launcher that sees it."""
        return ("env", f"{PLACE}={self.keeper.pid}:user,mnt")

    @property
    def inside(self) -> Path:
        """The folder, for processes that do not see the disk."""
        return Path(f"/proc/{self.keeper.pid}/root{self.folder}")


@contextmanager
def own_disk(folder: Path, size: str) -> Iterator[OwnDisk | None]:
    """Mount an empty disk at `folder`, which is created; None if this system does not allow it.

    Args:
        size: of the disk, as tmpfs takes it.
    """
    folder.mkdir(parents=True)
    mount = f'mount -t tmpfs -o size={size} tmpfs "$0" && echo up && exec sleep infinity'
    command = ("unshare", "-Urm", "sh", "-c", mount, str(folder))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as keeper:
        assert keeper.stdout is not None
        try:
            is_up = keeper.stdout.readline() == "up\n" and not has_gpu()  # which forks nothing
            yield OwnDisk(folder, keeper) if is_up else None
        finally:
            keeper.kill()


def fill_and_empty(attempt: Attempt, disk: OwnDisk, *texts: str) -> None:
    """Keep the disk of a run full until it has printed these texts and made a further step; then
    make room until it has saved, and end it by a signal.

    A save in flight holds space that it frees when it fails, so one large file is not enough.
    """
    ballast = disk.inside / "ballast"

    def fill() -> None:
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while shutil.disk_usage(disk.inside).free > _MOST_FREE:
                if os.write(file.fileno(), _PIECE) < len(_PIECE):
                    return

    def said() -> bool:
        fill()
        return all(text in attempt.text for text in texts)

    try:
        attempt.wait_for("row 1", lambda: rows_written(disk.inside) >= 1)
        attempt.wait_for(f"{texts}", said)
        rows = rows_written(disk.inside)
        attempt.wait_for("a further row", lambda: rows_written(disk.inside) > rows)
        ballast.unlink()
        attempt.wait_for("a checkpoint", lambda: newest_checkpoint(disk.inside) > rows)
        attempt.launcher.send_signal(signal.SIGTERM)
        attempt.end_with(REQUEUE)
    finally:
        attempt.kill()


class HeldDisk:
    """A disk that does not finish writing the checkpoint of a step until `let_go`.

    Attributes:
        prefix: the words before a command whose processes write to it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Build the library that holds the writes; needs a C compiler."""
        self._until = folder / "let_go"
        library = folder / "held_disk.so"
        source = Path(__file__).with_name("held_disk.c")
        build = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(build, check=True, timeout=60)
        self.prefix = (
            "env",
            f"LD_PRELOAD={library}",
            f"HELD_PATH=.step_{step:06d}.partial",
            f"HELD_UNTIL={self._until}",
        )

    def let_go(self) -> None:
        """Let the writes go on."""
        self._until.touch()
