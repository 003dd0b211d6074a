"""What a person sees: a header, a line per step, progress bars. Rich on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


def _share(value: float) -> str:
    # 0.9996 must not read as 1.000: that a single route is missing is what this figure is there to show.
    return f"{value if value >= 1 else min(value, 0.999):.3f}"


_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "reward/mean": ("reward", "{:.2f}".format),
    "mismatch/k3": ("k3", "{:.1e}".format),
    "routing/agreement": ("agree", _share),
    "routing/coverage": ("cov", _share),
    "rollout/response_tokens_mean": ("len", "{:.1f}".format),
    "optim/grad_norm": ("grad", "{:.2f}".format),
}
_TIMES = {
    "generate": "gen",
    "train": "train",
    "sync": "sync",
    "evaluate": "eval",
    "checkpoint": "save",
}


def step_line(row: Mapping[str, float], step: int, steps: int) -> str:
    """The figures to follow a run by: `step 12/40  reward 0.61  k3 1.2e-07  ...  |  gen 0.9s train 1.4s sync 0.1s`."""
    figures = [f"{label} {show(row[key])}" for key, (label, show) in _FIGURES.items() if key in row]
    for key in sorted(row):
        if key.startswith("eval/"):
            figures.append(
                f"{key.removeprefix('eval/').removesuffix('/accuracy').replace('/', ' ')} {row[key]:.3f}"
            )
    times = [
        f"{label} {row[f'time/{phase}_s']:.1f}s"
        for phase, label in _TIMES.items()
        if f"time/{phase}_s" in row
    ]
    line = "  ".join([f"step {step}/{steps}", *figures])
    return f"{line}  |  {' '.join(times)}" if times else line


class Console:
    """Writes to one stream. A silent one serves the ranks that do not speak.

    Args:
        speaks: whether anything is written at all.
        progress: whether bars are drawn, on a terminal.
        stream: None = stdout.
    """

    def __init__(self, *, is_leader: bool, progress: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._speaks = is_leader
        self._rich = RichConsole(file=self._stream) if is_leader and self._stream.isatty() else None
        self._progress = progress and self._rich is not None

    def header(self, lines: Sequence[str]) -> None:
        """What runs, before it starts."""
        if self._rich:
            self._rich.print(
                Panel(Text("\n".join(lines)), title="r3", title_align="left", expand=False)
            )
        else:
            self.line("\n".join(lines))

    def line(self, text: str) -> None:
        """One line, whole, as soon as it is there."""
        if self._rich:
            self._rich.print(text, markup=False, soft_wrap=True)
        elif self._speaks:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Callable[[int], None]]:
        """A bar that leaves when the work is done; yields what moves it on."""
        if not self._progress:
            yield lambda count: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._rich, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)
