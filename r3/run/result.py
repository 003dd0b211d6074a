"""What a run came to: its best evaluation (`checkpoint.keep_best`), and whether `train.patience` or
its last step has ended it.

All follow from the rows of metrics, which a resumed run keeps. Each checkpoint holds the values of
evaluations too: without them, a run whose metrics.jsonl was lost would delete its best checkpoint.
Nothing heavy is imported: that a run is finished is said quickly.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from r3 import extras
from r3.cli.parse import Invocation
from r3.config import ANOTHER_FOLDER, flatten
from r3.run.folder import RunDir, read_metrics, step_folders
from r3.runtime.process import is_leader
from r3.runtime.terminal import say


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the evaluations of a run are compared by: `checkpoint.keep_best` and `best_is`.

    Attributes:
        metric: such as eval/heldout/accuracy; empty compares nothing.
        sign: 1 if higher is better, -1 if lower is.
        patience: `train.patience`; 0 is without end.
    """

    metric: str
    sign: int = 1
    patience: int = 0

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Goal:
        """The goal of settings by their full names, as values or as texts."""
        patience = str(settings.get("train.patience", ""))
        return Goal(
            metric=str(settings.get("checkpoint.keep_best", "")),
            sign=-1 if settings.get("checkpoint.best_is") == "lowest" else 1,
            patience=int(patience) if patience.isdecimal() else 0,
        )

    def values(self, rows: Iterable[Mapping[str, float]]) -> dict[int, float]:
        """The metric by step, with the sign that makes the highest the best."""
        return {
            int(row["step"]): self.sign * row[self.metric]
            for row in rows
            if self.metric and math.isfinite(row.get(self.metric, math.nan))
        }

    def rows(self, values: Mapping[int, float]) -> list[dict[str, float]]:
        """The rows that have these values and nothing else."""
        return [{"step": step, self.metric: self.sign * values[step]} for step in sorted(values)]

    def end(self, values: Mapping[int, float]) -> str:
        """Why a run with these evaluations ends after the last of them; "" if it goes on."""
        best = best_step(values)
        if best is None or not self.patience:
            return ""
        since = sum(step > best for step in values)
        if since < self.patience:
            return ""
        return (
            f"stopped after step {max(values)}: {self.metric} was best after step {best} "
            f"({self.sign * values[best]:.4g}) and not better in {since} evaluations since "
            f"(train.patience {self.patience})"
        )


def best_step(values: Mapping[int, float]) -> int | None:
    """The step with the highest value, the first of equal ones; None without any."""
    return max(sorted(values), key=values.__getitem__, default=None)


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
        rows = rows_of(run_dir)
        # Rows after the checkpoint are made again.
        has_ended = goal.end(goal.values(row for row in rows if row["step"] <= step))
        # Fewer steps than the newest checkpoint has are refused later.
        if not saved or not (step == config.train.steps or has_ended):
            return False
        if config.checkpoint.exports_after(step, is_last=True) and not run_dir.hf(step).exists():
            return False
        text = extras.result(config, run_dir, step)
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


def rows_of(run_dir: RunDir) -> list[dict[str, float]]:
    """The rows of a run so far, without an incomplete last line."""
    return read_metrics(run_dir.metrics, notes=[]) if run_dir.metrics.exists() else []
