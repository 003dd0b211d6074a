"""What a run came to: its best evaluation (`checkpoint.keep_best`), and whether `train.patience` or
its last step has ended it.

All follow from the rows of metrics, which a resumed run keeps. Each checkpoint holds the values of
evaluations too: without them, a run whose metrics.jsonl was lost would delete its best checkpoint.
Nothing heavy is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the evaluations of a run are compared by: `checkpoint.keep_best` and `best_is`.

    Attributes:
        metric: such as eval/heldout/accuracy; empty compares nothing.
        sign: 1 if higher is better, -1 if lower is.
        patience: `train.patience`; 0 is without end.
        steps: of the whole run, after which nothing ends early; 0 if they are not known.
    """

    metric: str
    sign: int = 1
    patience: int = 0
    steps: int = 0

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Goal:
        """The goal of settings by their full names, as values or as texts."""
        texts = [str(settings.get(f"train.{name}", "")) for name in ("patience", "steps")]
        patience, steps = (int(text) if text.isdecimal() else 0 for text in texts)
        return Goal(
            metric=str(settings.get("checkpoint.keep_best", "")),
            sign=-1 if settings.get("checkpoint.best_is") == "lowest" else 1,
            patience=patience,
            steps=steps,
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
        if best is None or not self.patience or max(values) == self.steps:
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
