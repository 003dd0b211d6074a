"""A small disk of its own for a run, and a file that keeps it full."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.faults.attempts import Attempt

_PIECE = bytes(1 << 16)
_MOST_FREE = 2 << 20  # room for rows of metrics, not for a checkpoint


def own_disk(folder: Path, size: str) -> tuple[str, ...]:
    """A command that runs another one with an empty disk at `folder`, which is created.

    Args:
        size: of the disk, as tmpfs takes it.

    Returns:
        The words before the other command; none if this system lets no user mount a file system.
    """
    folder.mkdir(parents=True)
    mount = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    command = ("unshare", "-Urm", "sh", "-c", mount, str(folder))
    done = subprocess.run([*command, "true"], capture_output=True, check=False)
    return () if done.returncode else command


class FullDisk:
    """Keeps the disk of a living run full until `empty`.

    Args:
        folder: the disk, as the run sees it.
    """

    def __init__(self, attempt: Attempt, folder: Path) -> None:
        self.inside = Path(f"/proc/{attempt.process.pid}/root{folder}")
        self._attempt = attempt
        self._ballast = self.inside / "ballast"

    def fill_until_said(self, *texts: str) -> None:
        """Fill the disk again and again until the run has printed all of these texts.

        A save in flight holds space that it frees when it fails, so one large file is not enough.
        """

        def said() -> bool:
            self._fill()
            return all(text in self._attempt.text for text in texts)

        self._attempt.wait_for(f"{texts}", said)

    def empty(self) -> None:
        """Make room again."""
        self._ballast.unlink()

    def _fill(self) -> None:
        with suppress(OSError), self._ballast.open("ab", buffering=0) as ballast:
            while shutil.disk_usage(self.inside).free > _MOST_FREE:
                if os.write(ballast.fileno(), _PIECE) < len(_PIECE):
                    return


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
