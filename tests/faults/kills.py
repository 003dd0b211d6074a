"""Kills at random moments of runs of several kinds; one more start must finish each bit for bit.

Where the phases of a run are comes from the undisturbed run of its kind, so that a kill meets the
phase that was drawn. A kill counts if it ended the run; one that came too late is drawn again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.attempts import (
    STEPS,
    Attempt,
    Unexpected,
    finish,
    launch,
    require_equal,
    rows_written,
)
from tests.tiny import FEW_ROWS

_BASE = (
    *("--train.steps", str(STEPS), "--rollout.prompts_per_step", "8", "--data.path", FEW_ROWS),
    *("--checkpoint.every", "1", "--checkpoint.export_every", "1"),
    *("--eval.every", "1", "--eval.max_prompts", "8"),
)
KINDS = {
    "plain": (),
    "LoRA": ("--lora.rank", "4"),
    "streamed": ("--train.optimizer", "streamed"),
    "partial": (
        *("--rollout.step_token_budget", "6", "--rollout.max_staleness", "2"),
        *("--algo.correction", "token_tis"),
    ),
}
# What the phase of the rank begins with; "" is any moment, also of the start.
MOMENTS = ("", "checkpoint of ", "export to ", "evaluate", "sync", "train")
_TICK_S = 0.001  # the shortest phases, of a sync, take some tens of milliseconds


@dataclass(frozen=True)
class _Phase:
    """A phase of a rank: after how many rows of metrics it began, and how long it took."""

    name: str
    rows: int
    seconds: float


@dataclass(frozen=True)
class _Undisturbed:
    folder: Path
    phases: tuple[list[_Phase], list[_Phase]]  # of both ranks
    seconds: float


def kills(
    count: int,
    seed: int,
    root: Path,
    *,
    first: int = 1,
    until: float,
    say: Callable[[str], None],
) -> int:
    """Start runs from number `first` on until kills ended `count`; fewer if the time is over.

    Returns:
        How many kills ended a run.

    Raises:
        Unexpected: a run that was started once more did not finish, or has other weights or rows.
    """
    straight: dict[str, _Undisturbed] = {}
    struck, number = 0, first
    say("| run | setting | killed in | SIGKILL to | starts | equal |\n|---|---|---|---|---|---|")
    while struck < count and time.monotonic() < until:
        chance = random.Random(f"{seed}/{number}")
        kind, moment = chance.choice(list(KINDS)), chance.choice(MOMENTS)
        if kind not in straight:
            straight[kind] = _undisturbed(root / kind, kind)
        folder = root / f"kill_{number:03d}"
        attempt = launch(folder, *KINDS[kind], base=_BASE, is_warm=True)
        killed = _kill(attempt, moment, chance, straight[kind])
        try:
            if attempt.end():
                struck += bool(killed)
                finish(folder, *KINDS[kind], base=_BASE, is_warm=True)
            else:
                killed = None
            require_equal(folder, straight[kind].folder)
        except Unexpected as error:
            raise Unexpected(f"run {number} ({kind}), killed in {killed}: {error}") from None
        attempt.require_gone()
        shutil.rmtree(folder)
        line = f"{' | '.join(killed)} | 2 | yes" if killed else "too late, not counted | | 1 | yes"
        say(f"| {number} | {kind} | {line} |")
        number += 1
    runs = f"runs {first} to {number - 1}, seed {seed}"
    say(f"\n{struck} kills of {count} ({runs}): all runs bit-equal")
    return struck


def _undisturbed(folder: Path, kind: str) -> _Undisturbed:
    """A run without a kill, and the phases of its ranks."""
    attempt = launch(folder, *KINDS[kind], base=_BASE, is_warm=True)
    began = time.monotonic()
    ranks = _Beats(attempt, 0), _Beats(attempt, 1)
    now = [(rank.phase(), 0, time.monotonic()) for rank in ranks]
    phases: tuple[list[_Phase], list[_Phase]] = [], []
    with suppress(Unexpected):  # it ends then
        while True:
            for number, rank in enumerate(ranks):
                name, rows, since = now[number]
                if (new := rank.phase()) != name:
                    phases[number].append(_Phase(name, rows, time.monotonic() - since))
                    now[number] = new, rows_written(folder), time.monotonic()
            time.sleep(_TICK_S)
    attempt.end_with(0)
    return _Undisturbed(folder, phases, time.monotonic() - began)


def _kill(
    attempt: Attempt, moment: str, chance: random.Random, straight: _Undisturbed
) -> tuple[str, str] | None:
    """Kill a rank or the launcher at a moment.

    Returns:
        The phase of the rank and who was killed; None if the run had ended before.
    """
    number, target = chance.randrange(2), chance.choice(("rank", "launcher"))
    with suppress(psutil.NoSuchProcess, Unexpected):
        if moment:
            own = straight.phases[number]
            phase = chance.choice([each for each in own if each.name.startswith(moment)])
            later_s = chance.uniform(0.0, phase.seconds)
            beats = _Beats(attempt, number)
            while beats.phase() != phase.name or rows_written(attempt.folder) < phase.rows:
                time.sleep(_TICK_S)
            time.sleep(later_s)
        else:
            time.sleep(chance.uniform(0.0, straight.seconds))
            beats = _Beats(attempt, number)
        victim = beats.rank if target == "rank" else attempt.launcher
        name = beats.phase()
        victim.kill()
        where = f"{name}, rank {number}, after {rows_written(attempt.folder)} rows"
        return where, f"rank {number}" if target == "rank" else "the launcher"
    return None


class _Beats:
    """What a rank says about its progress, in the memory that its watcher reads."""

    def __init__(self, attempt: Attempt, number: int) -> None:
        self._attempt = attempt
        self._file = -1
        while self._file < 0:
            with suppress(psutil.NoSuchProcess, OSError, Unexpected):
                self.rank = attempt.rank(number)
                for file in Path(f"/proc/{self.rank.pid}/fd").iterdir():
                    if "memfd:r3-beats" in os.readlink(file):
                        self._file = os.open(file, os.O_RDONLY)
                        break
            self._require_run()
            time.sleep(20 * _TICK_S)

    def phase(self) -> str:
        """The rank's phase.

        Raises:
            Unexpected: the run has ended.
        """
        self._require_run()
        line = os.pread(self._file, 4096, 0).partition(b"\n")[0]
        phase = str(json.loads(line)["phase"]) if line else "start"
        return phase.replace(f"{self._attempt.folder}/", "")

    def _require_run(self) -> None:
        if self._attempt.process.poll() is not None:
            raise Unexpected("the run has ended")

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
