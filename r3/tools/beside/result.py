"""What a run came to, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from r3.config import Config, flatten
from r3.metrics.glossary import headlines
from r3.run.folder import RunDir
from r3.run.result import Goal, best_step, rows_of


def result(config: Config, run_dir: RunDir, step: int) -> str:
    """What a run came to, from its rows: steps, the figure of each held-out set before and after,
    mismatch with and without replay, the best checkpoint, and why it ended early if it did.

    A figure is left out unless it was measured before and after, the mismatch unless it was
    measured at all.
    """
    rows = rows_of(run_dir)
    by_step = {row["step"]: row for row in rows}
    before, after = by_step.get(0, {}), by_step.get(step, {}) if step else {}
    figures = [
        f"{name} {key.rpartition('/')[2]} {before[key]:.3f} -> {after[key]:.3f}"
        for name, key in headlines(after).items()
        if key in before
    ]
    parts = [", ".join([f"{step} step{'s' * (step != 1)}", *figures]), *_mismatch_of(rows)]
    goal = Goal.of(flatten(config))
    values = goal.values(rows)
    if (best := best_step(values)) is not None:
        where = run_dir.checkpoint(best)
        kept = f": {where}" if where.exists() else ", which has no checkpoint"
        parts.append(f"best after step {best}{kept}")
    return "; ".join([*parts, *filter(None, [goal.end(values)])])


def closing(
    config: Config, run_dir: RunDir, seconds: float, step: int, row: Mapping[str, float]
) -> str:
    """The last line of a run: its duration, its result, its files. `row` is its last one."""
    if not config.trains:
        figures = ", ".join(
            f"{name} {key.rpartition('/')[2]} {row[key]:.3f}"
            for name, key in headlines(row).items()
        )
        return f"done       in {seconds:.0f} s: {figures}; answers in {run_dir.eval(step)}"
    places = [str(run_dir.hf(step))] if run_dir.hf(step).exists() else []
    places += [
        str(run_dir.metrics),
        *([str(run_dir.tensorboard)] if config.log.tensorboard else []),
    ]
    return f"done       in {seconds:.0f} s: {result(config, run_dir, step)}; {', '.join(places)}"


def _mismatch_of(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Mean k3 over the steps with replayed and with live routes of the same tokens, or nothing."""
    pairs = [
        (row["mismatch/k3_replay"], row["mismatch/k3_live"])
        for row in rows
        if "mismatch/k3_replay" in row and "mismatch/k3_live" in row
    ]
    if not pairs:
        return []
    replay, live = (fmean(column) for column in zip(*pairs, strict=True))
    ratio = live / replay if replay else 0
    times = [f"{ratio:,.{0 if ratio >= 10 else 1}f} times"] if replay else []
    return [", ".join([f"replay: k3 {replay:.1e}", f"live: {live:.1e}", *times])]
