"""Runs of `train.py` as a user starts them, for tests that look at what they leave."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

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


def start(
    log_dir: Path,
    *flags: str,
    preset: str = "tiny-smoke",
    ranks: int = 2,
    launcher: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
    is_forked: bool = True,
    is_warm: bool = False,
) -> subprocess.Popen[str]:
    """Start a run in its own process group; its output goes to a pipe.

    Args:
        launcher: further flags of torchrun.
        prefix: a command that runs torchrun.
        is_forked: whether ranks are forked, for a quicker start, or are programs that torchrun
            starts.
        is_warm: whether the launcher of forked ranks is forked too (`tests.warm`). Such a run can
            be killed, and gets no other signals.
    """
    environment = os.environ | QUIET_THREADS
    if "--max_restarts" in launcher:
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as launch/ sets it
    command = [*_launcher(ranks, is_forked=is_forked, is_warm=is_warm), *launcher]
    command += ["train.py", preset, "--log.dir", str(log_dir), "--data.path", FEW_ROWS]
    if not any(flag.startswith("--eval.") for flag in flags):
        command += ["--eval.max_prompts", "32"]  # of 256, before and after the steps
    command += flags
    return subprocess.Popen(
        [*prefix, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> str:
    """Kill torchrun and its ranks, which it starts in sessions of their own; returns what was
    printed.
    """
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for process_of_run in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process_of_run.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=10)
    return process.communicate()[0]


def finish(process: subprocess.Popen[str], timeout_s: float = 240.0) -> str:
    """Wait for a run and return what it printed; a run that hangs is killed, and fails the test."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done after {timeout_s:.0f} s\n{kill(process)[-4000:]}")
    return output


def run(log_dir: Path, *flags: str, **kwargs: object) -> str:
    """Run to the end, which must be a good one."""
    process = start(log_dir, *flags, **{"is_warm": True, **kwargs})  # type: ignore[arg-type]
    output = finish(process)
    assert process.returncode == 0, output[-4000:]
    return output


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
    return subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        text=True,
        timeout=timeout_s,
    )


def torchrun(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks, with the root of the repository as its folder.

    Without a GPU, launcher and ranks are forked (`tests.warm`).
    """
    words = (*_launcher(ranks, is_forked=True, is_warm=True), *command)
    return program(*words, env=QUIET_THREADS, timeout_s=180, together=True)


def _launcher(ranks: int, *, is_forked: bool, is_warm: bool) -> list[str]:
    """The words that start ranks, before those of their program. CUDA does not survive a fork."""
    if not is_forked or has_gpu():
        words = [sys.executable, "-m", "torch.distributed.run"]
    else:
        words = [interpreter() if is_warm else sys.executable, "-m", "tests.forked_ranks"]
    return [*words, "--standalone", "--nproc_per_node", str(ranks)]
