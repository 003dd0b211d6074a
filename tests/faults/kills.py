"""Kills at random moments of runs of several kinds; one more start must finish each bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
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
_LONGEST_S = 0.5  # between the beginning of a phase and the kill


def kills(
    count: int,
    seed: int,
    root: Path,
    *,
    first: int = 1,
    until: float,
    say: Callable[[str], None],
) -> int:
    """Kill `count` runs from number `first` on, fewer if the time ends; returns how many.

    Raises:
        Unexpected: a run that was started once more did not finish, or has other weights or rows.
    """
    straight: dict[str, tuple[Path, float]] = {}
    struck: Counter[str] = Counter()
    made = 0
    for number in range(first, first + count):
        if time.monotonic() > until:
            break
        chance = random.Random(f"{seed}/{number}")
        kind, moment = chance.choice(list(KINDS)), chance.choice(MOMENTS)
        if kind not in straight:
            began = time.monotonic()
            finish(root / kind, *KINDS[kind], base=_BASE)
            straight[kind] = root / kind, time.monotonic() - began
        folder = root / f"kill_{number:03d}"
        attempt = launch(folder, *KINDS[kind], base=_BASE)
        phase = _kill(attempt, moment, chance, straight[kind][1])
        if attempt.end():
            finish(folder, *KINDS[kind], base=_BASE)
        try:
            require_equal(folder, straight[kind][0])
        except Unexpected as error:
            raise Unexpected(f"run {number} ({kind}), killed in {phase!r}: {error}") from None
        attempt.require_gone()
        shutil.rmtree(folder)
        made += 1
        struck[f"{kind}, {moment.strip() or 'anywhere'}" if phase else "too late"] += 1
        say(f"run {number:2d}: {kind}, killed in {phase or 'no phase: it had ended'}")
    say(
        f"{made} of {count} runs (seed {seed}) finished bit for bit after one more start: "
        + ", ".join(f"{number} x {what}" for what, number in sorted(struck.items()))
    )
    return made


def _kill(attempt: Attempt, moment: str, chance: random.Random, duration_s: float) -> str:
    """Kill a rank or the launcher at a moment; returns the rank's phase, "" if it had ended."""
    number, target = chance.randrange(2), chance.choice(("rank", "launcher"))
    later_s = chance.uniform(0.0, _LONGEST_S if moment else duration_s)
    rows = chance.randrange(STEPS) if moment else 0
    with suppress(psutil.NoSuchProcess, Unexpected, OSError):
        if moment:
            attempt.wait_for_rows(rows)
            rank = attempt.rank(number)
            attempt.wait_for(moment, lambda: _phase_of(rank.pid).startswith(moment))
        time.sleep(later_s)
        rank = attempt.rank(number)
        phase = _phase_of(rank.pid) or "the start"
        (rank if target == "rank" else attempt.launcher).kill()
        return f"{phase} of rank {number}, after {rows_written(attempt.folder)} rows"
    return ""


def _phase_of(rank: int) -> str:
    """The phase of a rank, from the memory in which it beats for its watcher; "" before that."""
    with suppress(OSError, ValueError):
        for file in Path(f"/proc/{rank}/fd").iterdir():
            if "memfd:r3-beats" in os.readlink(file):
                beat = json.loads(file.read_bytes().partition(b"\n")[0])
                return str(beat["phase"])
    return ""
