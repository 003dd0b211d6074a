"""Command blocks of the README, of docs/ and of examples/: found, and run as a reader would paste
them.

A block that is to be run has a comment above it, which code hosts do not show:

    <!-- runnable -->
    ```bash
    launch/local.sh tiny --train.steps 1
    ```
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from r3.runtime.device import has_gpu
from tests.warm import write_stand_in

ROOT = Path(__file__).resolve().parent.parent
MARKER = "<!-- runnable -->"
_FENCE = "```bash"
_SHOWN = 4000  # characters of a failed block's output


@dataclass(frozen=True, kw_only=True)
class Block:
    """A command block: where it stands and what it says."""

    page: str
    line: int
    script: str


class BlockError(AssertionError):
    """A block that failed, or a marker without a block; the message says where, and what was
    printed.
    """


def blocks(page: str, text: str) -> list[Block]:
    """The marked blocks of a page, in its order.

    Raises:
        BlockError: a marker stands above something else than a bash block, or a block does not end.
    """
    found: list[Block] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.strip() != MARKER:
            continue
        if number + 1 == len(lines) or lines[number + 1] != _FENCE:
            raise BlockError(
                f"{page}:{number + 1}: {MARKER} must stand right above a line {_FENCE}"
            )
        start = number + 2
        if "```" not in lines[start:]:
            raise BlockError(f"{page}:{start}: the block has no end")
        end = lines.index("```", start)
        found.append(Block(page=page, line=start + 1, script="\n".join(lines[start:end])))
    return found


def pages() -> list[str]:
    """Every page that may have blocks, relative to the root."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    return sorted(str(file.relative_to(ROOT)) for file in files)


def pages_with_blocks(names: Sequence[str]) -> Iterator[str]:
    """Those of the pages that have a marked block."""
    for name in names:
        if blocks(name, (ROOT / name).read_text(encoding="utf-8")):
            yield name


def checkout(folder: Path, *, is_warm: bool = False) -> Path:
    """A folder that looks like the repository to a command that runs in it, and keeps what it
    writes.

    Args:
        is_warm: whether its interpreter is the one of `tests.warm`, where there is no GPU.
    """
    folder.mkdir(parents=True)
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "runs") and not entry.name.startswith(".venv"):
            (folder / entry.name).symlink_to(entry)
    if is_warm and not has_gpu():
        (folder / ".venv" / "bin").mkdir(parents=True)
        write_stand_in(folder / ".venv" / "bin" / "python")
    else:
        (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run(block: Block, folder: Path, *, timeout_s: float = 240.0) -> str:
    """Run a block in a folder and return what it printed.

    Raises:
        BlockError: a command of it failed, or it took longer than the limit.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    warm = folder / ".venv" / "bin" / "python"  # of a checkout; what resolves links would leave it
    if not warm.parent.parent.is_symlink() and warm.exists():
        environment["PYTHON"] = str(warm)
    where = f"{block.page}:{block.line}"
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.output or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        raise BlockError(f"{where}: not done after {timeout_s:.0f} s\n{text[-_SHOWN:]}") from error
    if done.returncode:
        raise BlockError(f"{where}: exit code {done.returncode}\n{done.stdout[-_SHOWN:]}")
    return done.stdout
