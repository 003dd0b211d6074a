"""Runs of `train.py` as a user starts them, for tests that look at what they leave."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from r3.metrics import explain
from r3.run import read_jsonl
from r3.runtime.device import has_gpu
from tests.tiny import FEW_ROWS
from tests.warm import interpreter
from tests.world import QUIET_THREADS, ROOT


def is_wall_clock(key: str) -> bool:
    """Whether a metric depends on the machine's speed and memory, and so differs between two equal
    runs.
    """
    explain(key)
    return key.startswith(("time/", "memory/")) or key.endswith("tokens_per_s")


def run(log_dir: Path, *flags: str, preset: str = "tiny-smoke", ranks: int = 2) -> str:
    """Run to the end, which must be a good one; returns what was printed."""
    command = ["train.py", preset, "--log.dir", str(log_dir), "--data.path", FEW_ROWS]
    if not any(flag.startswith("--eval.") for flag in flags):
        command += ["--eval.max_prompts", "32"]  # of 256, before and after the steps
    done = torchrun(ranks, *command, *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def soon(condition: Callable[[], object], within_s: float = 20.0) -> bool:
    """Wait until a condition holds; whether it does in time."""
    until = time.monotonic() + within_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(condition())


def words(flags: str) -> tuple[str, ...]:
    """The words of a command line, as a shell separates them."""
    return tuple(shlex.split(flags))


def rows_of(log_dir: Path) -> list[dict[str, float]]:
    return read_jsonl(log_dir / "metrics.jsonl")


def dumped(log_dir: Path, step: int = 1, *, kind: str = "rollouts") -> list[dict[str, Any]]:
    """What a run wrote of each sample of a step, or of an evaluation (`kind="eval"`)."""
    return read_jsonl(log_dir / kind / f"step_{step:06d}.jsonl")


def timeless(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key == "step" or not is_wall_clock(key)}


def timeless_rows(log_dir: Path) -> list[dict[str, float]]:
    return [timeless(row) for row in rows_of(log_dir)]


def require_replayed(row: Mapping[str, float], more_than: int = 0) -> None:
    """Require that all routes of a step were captured, and that the policy's routers used them."""
    counts = [row[f"routing/rows_{name}"] for name in ("expected", "captured", "replayed")]
    assert min(counts) == max(counts) > more_than and row["routing/coverage"] == 1, counts


def without_last_checkpoint(log_dir: Path, step: int) -> None:
    """Leave a finished run as a kill after its last but one checkpoint does."""
    shutil.rmtree(log_dir / "checkpoints" / f"step_{step:06d}")
    (log_dir / "checkpoints" / "latest").unlink()


def program(
    *words: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 240.0,
    together: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end: what it said, and its exit code.

    Args:
        env: added to our own.
        together: both streams are in `stdout`.
    """
    try:
        return subprocess.run(
            [*map(str, words)],
            cwd=cwd,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if together else subprocess.PIPE,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        for said in filter(None, (late.stdout, late.stderr)):  # bytes, whatever `text` says
            late.add_note(
                (said if isinstance(said, str) else said.decode(errors="replace"))[-4000:]
            )
        raise


def torchrun(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks, with the root of the repository as its folder.

    Without a GPU, launcher and ranks are forked (`tests.warm`). CUDA does not survive a fork.
    """
    if has_gpu():
        launcher = (sys.executable, "-m", "torch.distributed.run")
    else:
        launcher = (interpreter(), "-m", "tests.forked_ranks")
    words = (*launcher, "--standalone", "--nproc_per_node", ranks, *command)
    return program(*words, env=QUIET_THREADS, together=True)
