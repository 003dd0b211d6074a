"""Runs with one random fault each at a random time, started again until they are finished.

Every run must come to the weights and rows of an undisturbed run. The same seed gives the same
faults after the same number of steps; how far a step has come then depends on the machine.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.attempts import (
    REWARD,
    STEPS,
    Attempt,
    Unexpected,
    finish,
    flip_bit,
    launch,
    newest_checkpoint,
    require_equal,
)

_MOST_STARTS = 5
# A hang is ended after so many seconds; phases of an undisturbed run are far shorter.
_FLAGS = ("--debug.stall_s", "15", "--debug.kill_after_s", "30", *REWARD)


@dataclass(frozen=True)
class Ended:
    """One run of the soak."""

    number: int
    fault: str
    moment: str
    struck: bool  # the process was there, and the run not yet at its end
    starts: int
    seconds: float

    def __str__(self) -> str:
        missed = "" if self.struck else ", too late"
        return (
            f"run {self.number:2d}: {self.fault} {self.moment}{missed}; {self.starts} starts, "
            f"{self.seconds:.0f} s"
        )


def _interrupt_twice(attempt: Attempt, chance: random.Random) -> None:
    attempt.process.send_signal(signal.SIGINT)
    time.sleep(chance.uniform(0.1, 2.0))
    attempt.process.send_signal(signal.SIGINT)


def _pause(attempt: Attempt, chance: random.Random) -> None:
    """Stop launcher, ranks and watchers for longer than a stall takes, then let them go on."""
    family = attempt.family()
    for process in family:
        process.suspend()
    time.sleep(chance.uniform(16.0, 40.0))
    for process in family:
        process.resume()


def _flip_bit(attempt: Attempt, chance: random.Random) -> None:
    """Kill the run, then flip one bit anywhere in its newest checkpoint."""
    attempt.kill()
    if step := newest_checkpoint(attempt.folder):
        folder = attempt.folder / "checkpoints" / f"step_{step:06d}"
        files = sorted(file for file in folder.iterdir() if file.stat().st_size)
        file = chance.choice(files)
        flip_bit(file, chance.randrange(file.stat().st_size), 1 << chance.randrange(8))


FAULTS: dict[str, Callable[[Attempt, random.Random], object]] = {
    "SIGKILL of a rank": lambda attempt, chance: attempt.rank(chance.randrange(2)).kill(),
    "SIGKILL of the launcher": lambda attempt, chance: attempt.process.kill(),
    "SIGUSR1 to a rank": lambda attempt, chance: attempt.rank(chance.randrange(2)).send_signal(
        signal.SIGUSR1
    ),
    "SIGTERM to the launcher": lambda attempt, chance: attempt.process.send_signal(signal.SIGTERM),
    "SIGSTOP of a rank": lambda attempt, chance: attempt.rank(chance.randrange(2)).suspend(),
    "a regular expression without end in the reward function of a rank": lambda attempt, chance: (
        Path(f"{attempt.folder}.regex.{chance.randrange(2)}").touch()
    ),
    "SIGHUP to the launcher": lambda attempt, chance: attempt.process.send_signal(signal.SIGHUP),
    "Ctrl-C twice": _interrupt_twice,
    "SIGSTOP of all, SIGCONT": _pause,
    "one bit of the newest checkpoint": _flip_bit,
}


def soak(
    count: int, seed: int, root: Path, *, first: int = 1, until: float, say: Callable[[str], None]
) -> int:
    """Make `count` runs, fewer if the time ends; returns how many ended as they must.

    Args:
        first: number of the first run, to repeat one that failed.
        until: no run begins after this time (of time.monotonic).
        say: takes a line about each run.

    Raises:
        Unexpected: a run hangs, cannot be resumed, or comes to other weights or rows.
    """
    began = time.monotonic()
    straight = root / "straight"
    finish(straight, *_FLAGS)
    duration_s = time.monotonic() - began
    say(f"the undisturbed run took {duration_s:.0f} s")
    ended: list[Ended] = []
    for number in range(first, first + count):
        if time.monotonic() > until:
            break
        ended.append(_disturbed(number, seed, root, straight, duration_s))
        say(str(ended[-1]))
    struck = [each for each in ended if each.struck]
    kinds = Counter(each.fault for each in struck)
    say(
        f"{len(ended)} of {count} runs (seed {seed}): all ended with the weights and rows of the "
        f"undisturbed run; the fault struck in {len(struck)}: "
        + ", ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items()))
    )
    return len(ended)


def _disturbed(number: int, seed: int, root: Path, straight: Path, duration_s: float) -> Ended:
    chance = random.Random(f"{seed}/{number}")
    fault = chance.choice(list(FAULTS))
    # A step and its save take some seconds, the start most of the time: one fault in four is there.
    steps = chance.randrange(STEPS)
    later_s = chance.uniform(0.0, 3.0) if steps else chance.uniform(0.1, 0.9) * duration_s
    restarts = chance.choice((0, 3))  # of the launcher; without, the run is started by hand
    folder = root / f"run_{number:03d}"
    began = time.monotonic()
    attempt = launch(folder, *_FLAGS, restarts=restarts)
    moment = f"{later_s:.1f} s after {f'step {steps}' if steps else 'the start'}"
    struck = False
    attempt.wait_for_rows(steps)
    try:
        attempt.process.wait(later_s)
    except subprocess.TimeoutExpired:
        # The process may not be there: before its start or after its end.
        with suppress(psutil.NoSuchProcess, Unexpected, ProcessLookupError):
            FAULTS[fault](attempt, chance)
            struck = True
    starts = 1
    while attempt.end():
        starts += 1
        if starts > _MOST_STARTS:
            raise Unexpected(f"run {number}, {fault}: {_MOST_STARTS} starts:\n{attempt.text}")
        attempt = launch(folder, *_FLAGS, restarts=restarts)
    try:
        require_equal(folder, straight)
    except Unexpected as error:
        raise Unexpected(f"run {number}, {fault} {moment}, {starts} starts: {error}") from None
    attempt.require_gone()
    for unused in folder.parent.glob(f"{folder.name}.regex.*"):  # no response was left to reward
        unused.unlink()
        struck = False
    shutil.rmtree(folder)
    return Ended(number, fault, moment, struck, starts, time.monotonic() - began)
