"""Starts of one run, as a user makes them: the launcher, its ranks, what they print."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from r3.runtime.device import has_gpu
from tests.runs import QUIET_THREADS, timeless_rows
from tests.tiny import FEW_ROWS
from tests.warm import PID_FILE, interpreter
from tests.world import ROOT

STEPS = 4
# Evaluation is left out and every step is saved: a fault then meets a save as often as a step.
FLAGS = ("--eval.path", "", "--checkpoint.every", "1", "--train.steps", str(STEPS))
FLAGS += ("--rollout.prompts_per_step", "8", "--data.path", FEW_ROWS)
# Ranks are forked: most of a start is imports, and CUDA does not survive a fork.
LAUNCHER = ("launch/ranks.py",) if has_gpu() else ("-m", "tests.forked_ranks")
# A function with a pool that nobody closes, and faults of its own.
REWARD = ("--reward.function", f"{ROOT}/tests/faults/reward.py:reward")
_LIMIT_S = 300.0  # of one start, which takes 30 s on two idle cores


class Unexpected(Exception):
    """A run did not do what R3 promises."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run on two ranks."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    pid_file: Path | None = None  # of a launcher that is forked: `process` stands for it

    @property
    def launcher(self) -> psutil.Process:
        """The process that starts the ranks, for signals."""
        if self.pid_file is None:
            return psutil.Process(self.process.pid)
        until = time.monotonic() + 60
        while not (self.pid_file.exists() and self.pid_file.read_text().endswith("\n")):
            if self.process.poll() is not None or time.monotonic() > until:
                raise self.unexpected("the launcher does not run")
            time.sleep(0.01)
        return psutil.Process(int(self.pid_file.read_text()))

    @property
    def text(self) -> str:
        """What launcher and ranks have printed so far."""
        return self.log.read_text(errors="replace")

    def unexpected(self, what: object) -> Unexpected:
        """An error about this start, with the end of what it printed."""
        return Unexpected(f"{what}:\n{self.text[-3000:]}")

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        for child in self.launcher.children(recursive=True):
            # A forked one shows the environment of its launcher, but has a name of its own.
            if child.name() == f"r3-rank-{number}" or child.environ().get("RANK") == str(number):
                return child
        raise Unexpected(f"rank {number} does not run")

    def family(self) -> list[psutil.Process]:
        """The launcher and everything it started."""
        return [self.launcher, *self.launcher.children(recursive=True)]

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds while the run is alive."""
        until = time.monotonic() + _LIMIT_S
        while not condition():
            if self.process.poll() is not None:
                raise self.unexpected(f"the run ended before {what}")
            if time.monotonic() > until:
                self.kill()
                raise self.unexpected(f"no {what} after {_LIMIT_S:.0f} s")
            time.sleep(0.05)

    def wait_for_rows(self, count: int) -> None:
        """Wait until the run has reported so many steps."""
        self.wait_for(f"row {count}", lambda: rows_written(self.folder) >= count)

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        try:
            return self.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self.unexpected(f"not done after {_LIMIT_S:.0f} s") from None

    def end_with(self, code: int) -> None:
        """Wait for the end; raises Unexpected unless the exit code is this one."""
        if (found := self.end()) != code:
            raise self.unexpected(f"exit code {found}, not {code}")

    def require_gone(self) -> None:
        """Raise Unexpected if a process that the run started, at any depth, lives on."""
        until = time.monotonic() + 10
        while left := [each for each in psutil.process_iter() if self._started(each)]:
            if time.monotonic() > until:
                raise Unexpected(f"{left} live on")
            time.sleep(0.1)

    def _started(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("R3_FAULTS") == str(self.folder)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False

    def kill(self) -> None:
        """Kill launcher and ranks."""
        family = self.family() if self.process.poll() is None else []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self.process.poll() is None:
            self.process.kill()
        # First, so that nobody else takes its exit code.
        self.process.wait()
        psutil.wait_procs(family[1:], timeout=10)


def launch(
    folder: Path,
    *flags: str,
    preset: str = "tiny-smoke",
    restarts: int = 0,
    prefix: tuple[str, ...] = (),
    launcher: tuple[str, ...] = LAUNCHER,
    ranks: tuple[str, ...] = ("--check", "--standalone", "--nproc_per_node", "2"),
    program: tuple[str, ...] = ("train.py",),
    is_warm: bool = False,
    base: tuple[str, ...] = FLAGS,
) -> Attempt:
    """Start a run on two ranks, with its output in a file beside its folder.

    Args:
        restarts: how often the launcher may start failed ranks again.
        prefix: a command that runs the launcher.
        launcher: the program that starts the ranks.
        ranks: where the ranks are, for the launcher.
        program: what every rank runs, with the settings of the run.
        is_warm: whether the launcher is forked (`tests.warm`).
        base: settings of every run.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.parent.glob(f"{folder.name}.*.log"))) + 1
    log = folder.with_name(f"{folder.name}.{number}.log")
    pid_file = log.with_suffix(".pid") if is_warm and not has_gpu() else None
    variables = {"R3_FAULTS": str(folder)} | ({PID_FILE: str(pid_file)} if pid_file else {})
    command = [
        *prefix,
        *(interpreter() if is_warm else sys.executable, *launcher, *ranks),
        *("--max_restarts", str(restarts)),
        *(*program, preset, "--log.dir", str(folder)),
        *base,
        *flags,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | QUIET_THREADS | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Attempt(process, folder, log, pid_file)


def finish(
    folder: Path, *flags: str, is_warm: bool = False, base: tuple[str, ...] = FLAGS
) -> Attempt:
    """Start a run that must reach its last step."""
    attempt = launch(folder, *flags, is_warm=is_warm, base=base)
    attempt.end_with(0)
    return attempt


def rows_written(folder: Path) -> int:
    """Whole lines in metrics.jsonl."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    steps = [int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*")]
    return max(steps, default=0)


def flip_bit(path: Path, position: int | None = None, bit: int = 1) -> None:
    """Flip a bit of a file, in the byte at its middle unless a position is given."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= bit
    path.write_bytes(content)


def failing_reward(folder: Path, step: int, armed: Path = ROOT) -> tuple[str, ...]:
    """Flags of a reward function that always fails in a step; its file is beside the folder.

    Args:
        armed: it fails only if this exists, and then leaves a file `failed` beside the folder.
    """
    file, metrics = folder.with_name("fails.py"), folder / "metrics.jsonl"
    file.write_text(
        "from pathlib import Path\n"
        "def fails(response, prompt):\n"
        f"    metrics = Path({str(metrics)!r})\n"
        "    done = metrics.read_text().count('\\n') if metrics.exists() else 0\n"
        f"    if done >= {step - 1} and Path({str(armed)!r}).exists():\n"
        f"        Path({str(folder.with_name('failed'))!r}).touch()\n"
        f"        raise RuntimeError('no step {step}')\n"
        "    return float(len(response) % 7)\n"
    )
    return ("--reward.function", f"{file}:fails", "--reward.retries", "0")


def require_equal(folder: Path, straight: Path) -> None:
    """Raise Unexpected unless a run came to the weights and rows of an undisturbed one.

    Weights are compared bit for bit; of the rows, times and memory are left out.
    """
    if not (folder / "metrics.jsonl").exists():
        raise Unexpected(f"{folder} has no metrics.jsonl but {sorted(folder.iterdir())}")
    mine, theirs = timeless_rows(folder), timeless_rows(straight)
    if mine != theirs:
        steps = [row["step"] for row in mine]
        keys = {
            key for a, b in zip(mine, theirs, strict=False) for key in a if a[key] != b.get(key)
        }
        raise Unexpected(f"rows of steps {steps} differ from the undisturbed run in {sorted(keys)}")
    if weights(folder) != weights(straight):
        raise Unexpected("the weights differ from those of the undisturbed run")


def weights(folder: Path) -> dict[str, str]:
    """SHA-256 of each exported file of weights."""
    files = sorted((folder / "hf").glob("step_*/*.safetensors"))
    if not files:
        raise Unexpected(f"{folder} has no exported weights")
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return dict(zip((str(file.relative_to(folder)) for file in files), digests, strict=True))
