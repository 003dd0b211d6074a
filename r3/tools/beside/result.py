"""What a run came to, in one line; and whether it is finished."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

from r3.cli.parse import Invocation
from r3.config import ANOTHER_FOLDER, Config, flatten
from r3.metrics.glossary import headlines
from r3.run.folder import RunDir, read_metrics, step_folders
from r3.run.goal import Goal, best_step
from r3.runtime.process import is_leader
from r3.runtime.terminal import say

FINISHED = 76  # exit code of the check before a launch: there is nothing to launch


def says_finished(invocation: Invocation) -> bool:
    """Whether all steps are made, and the model is exported if it is to be; rank 0 says so.

    The check before a launch ends here then. A check that the user asked for is made all the same.
    """
    config, run_dir = invocation.config, RunDir.of(invocation.config)
    is_launched = invocation.check and "R3_RESUME" in os.environ
    if not config.trains or (invocation.check and not is_launched):
        return False
    saved = step_folders(run_dir.checkpoints)
    step = saved[-1][0] if saved else 0
    goal = Goal.of(flatten(config))
    try:
        rows = _rows(run_dir)
        # Rows after the checkpoint are made again.
        has_ended = goal.end(goal.values(row for row in rows if row["step"] <= step))
        # Fewer steps than the newest checkpoint has are refused later.
        if not saved or not (step == config.train.steps or has_ended):
            return False
        if config.checkpoint.exports_after(step, is_last=True) and not run_dir.hf(step).exists():
            return False
        text = result(config, run_dir, step)
    except ValueError:  # rows that cannot be read: `open_run` names them
        return False
    if is_leader():
        more = "--train.patience" if step < config.train.steps else "--train.steps"
        say(
            f"{run_dir.path} is finished: {text}. "
            f"Set a larger {more} to continue, or {ANOTHER_FOLDER} for a new run."
        )
    if is_launched:
        sys.exit(FINISHED)
    return True


def result(config: Config, run_dir: RunDir, step: int) -> str:
    """What a run came to, from its rows: steps, the figure of each held-out set before and after,
    mismatch with and without replay, the best checkpoint, and why it ended early if it did.

    A figure is left out unless it was measured before and after, the mismatch unless it was
    measured at all.
    """
    rows = _rows(run_dir)
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


def _rows(run_dir: RunDir) -> list[dict[str, float]]:
    """The rows of a run so far, without an incomplete last line."""
    return read_metrics(run_dir.metrics, notes=[]) if run_dir.metrics.exists() else []
