"""The state of a run as text: progress, curves of metrics, what each rank does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from r3.metrics.console import duration_text
from r3.metrics.glossary import headlines
from r3.run.folder import RunDir
from r3.run.lock import is_abandoned
from r3.runtime.terminal import visible
from r3.tools.view.runs import RunFacts

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 32
_RECENT = 10  # steps that tell how long the others take
STALE_S = 120.0
"""A heartbeat older than this belongs to a run that ended or hangs."""

_PLAIN: Callable[[float], str] = "{:.3f}".format
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "reward/mean": ("reward", _PLAIN),
    "loss/nll": ("supervised loss", "{:.4f}".format),
    "loss/kl_teacher": ("KL to teacher", "{:.2e}".format),
    "policy/entropy": ("entropy", _PLAIN),
    "rollout/response_tokens_mean": ("response tokens", "{:.1f}".format),
    "rollout/truncated_frac": ("truncated", _PLAIN),
    "reward/group_zero_std_frac": ("groups without signal", _PLAIN),
    "loss/clip_frac": ("clipped", _PLAIN),
    "loss/kl_ref": ("KL to reference", "{:.2e}".format),
    "mismatch/k3": ("mismatch k3", "{:.1e}".format),
    "mismatch/k3_replay": ("  sampled, replayed", "{:.1e}".format),
    "mismatch/k3_live": ("  the same, live", "{:.1e}".format),
    "routing/agreement": ("routing agreement", "{:.4f}".format),
    "optim/grad_norm": ("gradient norm", "{:.2f}".format),
    "perf/tokens_per_s": ("tokens per second", "{:.0f}".format),
    "memory/peak_gib": ("memory peak, GiB", "{:.2f}".format),
}


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank wrote last.

    Attributes:
        silent_s: seconds without progress when it wrote.
        age_s: seconds since it wrote.
    """

    rank: int
    phase: str
    silent_s: float
    age_s: float


def read_heartbeats(path: Path, now: float, notes: list[str]) -> list[Heartbeat]:
    """The heartbeats of a run's ranks; `notes` gets the names of files of another form."""
    beats = []
    for file in sorted(RunDir(path).heartbeat(0).parent.glob("rank_*.json")):
        try:
            state = json.loads(file.read_bytes())
            beats.append(
                Heartbeat(
                    rank=int(state["rank"]),
                    phase=str(state["phase"]),
                    silent_s=float(state["silent_s"]),
                    age_s=now - float(state["written_at"]),
                )
            )
        except (OSError, LookupError, TypeError, ValueError, RecursionError):
            notes.append(f"{file.name} in heartbeats/ cannot be read: left out")
    return beats


def curve(values: Sequence[float | None], width: int = CURVE_WIDTH) -> str:
    """The newest values as bars of eight heights, from the lowest to the highest; None is a gap."""
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None and math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BARS[round((value - low) * scale)] if value is not None and math.isfinite(value) else " "
        for value in shown
    )


def remaining_s(rows: Sequence[Mapping[str, float]], steps: int) -> float | None:
    """Seconds to the end, by the mean of the newest steps; None before the first step.

    As on the console, evaluations do not count.
    """
    times = [
        row["time/step_s"] - row.get("time/evaluate_s", 0.0)
        for row in rows
        if row["step"] > 0 and "time/step_s" in row
    ]
    return fmean(times[-_RECENT:]) * (steps - rows[-1]["step"]) if times else None


def screen(facts: RunFacts, beats: Sequence[Heartbeat]) -> RenderableType:
    """Everything that `r3.watch` shows."""
    steps = facts.steps
    done = int(facts.rows[-1]["step"]) if facts.rows else 0
    end = facts.end
    if not end and not facts.is_finished and is_abandoned(facts.path):
        end = "the run was killed: no process writes to its folder"
    is_old = bool(beats) and all(beat.age_s > STALE_S for beat in beats)
    is_silent = is_old and not facts.is_finished
    return Group(
        Text(visible(facts.path), style="bold"),
        _progress(done, steps, "" if end or is_silent else _time_left(facts)),
        *([Text(visible(end), style="bold red")] if end else []),
        *(Text(visible(note), style="yellow") for note in facts.notes),
        Text(""),
        _figures(facts.rows),
        Text(""),
        _ranks(beats, is_done=bool(end) or facts.is_finished, is_silent=is_silent),
    )


def _time_left(facts: RunFacts) -> str:
    if facts.is_finished:
        return "finished"
    left = remaining_s(facts.rows, facts.steps)
    return f"about {duration_text(left)} left" if facts.steps and left is not None else ""


def _progress(done: int, steps: int, end: str) -> RenderableType:
    line = Table.grid(padding=(0, 2))
    line.add_row(
        f"step {done}/{steps or '?'}",
        ProgressBar(total=max(1, steps), completed=done, width=CURVE_WIDTH),
        end,
    )
    return line


def _figures(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    labels = dict(_FIGURES)
    for key in headlines(key for row in rows for key in row).values():
        _, name, figure = key.split("/")
        labels = {key: (f"{name} {figure}", _PLAIN)} | labels
    for key, (label, show) in labels.items():
        values = [row.get(key) for row in rows]
        known = [value for value in values if value is not None]
        if not known:
            continue
        if key.startswith("eval/"):
            values = known  # evaluated every so many steps: without the gaps
        table.add_row(
            Text(visible(label)),
            Text(show(known[-1]), style="bold"),
            Text(curve(values), style="cyan"),
        )
    return table


def _ranks(beats: Sequence[Heartbeat], *, is_done: bool, is_silent: bool) -> RenderableType:
    if is_done:
        return Text("")
    if not beats:  # the first ones come after some seconds
        return Text("no heartbeats yet, or debug.stall_s is 0", style="dim")
    if is_silent:
        age = duration_text(min(beat.age_s for beat in beats))
        return Text(f"all ranks silent for {age}: the run was stopped, or hangs", style="bold red")
    phases: dict[str, list[int]] = {}
    for beat in beats:
        phases.setdefault(beat.phase, []).append(beat.rank)
    text = Text()
    for phase, ranks in phases.items():
        named = ", ".join(map(str, ranks[:8])) + (
            f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        )
        text.append(f"{visible(phase)}: rank{'s' if len(ranks) > 1 else ''} {named}   ")
    slowest = max(beats, key=lambda beat: beat.silent_s + beat.age_s)
    silent = slowest.silent_s + slowest.age_s
    if silent > STALE_S:
        text.append(
            f"\nrank {slowest.rank} made no progress for {duration_text(silent)}", style="bold red"
        )
    return text
