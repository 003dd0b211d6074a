"""The console of a run on a terminal: a table of 80 to 160 columns, as wide as fits, and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from r3.metrics.console import (
    COLUMNS,
    EVAL,
    LOG_LINE,
    Column,
    Console,
    duration_text,
    least,
    notes,
    step_line,
    with_evaluation,
)
from r3.runtime.terminal import out, visible
from r3.tools.beside.lines import fitted

_TITLES_EVERY = 20  # rows between two repetitions of the column titles
_MAX_WIDTH = 160


def columns_for(width: int, keys: set[str]) -> tuple[Column, ...]:
    """The columns that have figures and fit, the least important ones left out first."""
    shown = [column for column in COLUMNS if keys.intersection(column.keys)]
    room = min(width, _MAX_WIDTH) - len(_step_cell("")) - 7  # the step and the time left
    while sum(column.width + 1 for column in shown) > room:
        shown.remove(least(shown))
    return tuple(shown)


def _step_cell(text: str) -> str:
    return f"{text:>7} "


@contextmanager
def running(what: str) -> Iterator[None]:
    """Show what is being done and the seconds that it takes; nothing is left of it."""
    columns = (TextColumn("{task.description} ..."), TimeElapsedColumn())
    console = RichConsole(file=out())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        bar.add_task(what)
        yield


class TerminalConsole(Console):
    """Writes a table, bars and coloured conversations to a terminal, of rank 0.

    Args:
        progress: whether bars are drawn.
        stream: None is stdout.
    """

    def __init__(self, *, progress: bool, stream: TextIO | None = None) -> None:
        super().__init__(is_leader=True, stream=stream)
        self._rich = RichConsole(file=self._stream)
        self._progress = progress
        self._columns: tuple[Column, ...] = ()
        self._rows = 0

    def header(self, lines: Sequence[str]) -> None:
        """Show what runs, in a frame."""
        width = self._rich.width - 4  # of the frame
        text = Text(fitted(visible("\n".join(lines)), width), overflow="fold")
        self._rich.print(Panel(text, title="r3", title_align="left", expand=False))

    def line(self, text: str) -> None:
        """Write one line at once."""
        self._print(text)

    def show(self, conversation: RenderableType) -> None:
        """Show a sample in colours."""
        self._rows = 0  # the table starts again below it
        self._rich.print(conversation)

    def row(
        self, row: Mapping[str, float], step: int, steps: int, eta_s: float | None = None
    ) -> None:
        """Show the figures of a step.

        Args:
            eta_s: seconds until the last step ends, if known.
        """
        kinds = {"reward/mean", "loss/nll"}.intersection(row)
        if not kinds:  # a row of an evaluation alone is no table
            width = min(LOG_LINE, self._rich.width)
            self.line(step_line(row, step, steps, eta_s, width))
            return
        row = with_evaluation(row)
        # Columns stay where they are; a figure that appears for the first time starts a new table.
        keys = {*row, *_keys(self._columns), *([EVAL] if "reward/mean" in row else [])}
        columns = columns_for(self._rich.width, keys)
        if columns != self._columns or self._rows % _TITLES_EVERY == 0:
            self._columns, self._rows = columns, 0
            cells = " ".join(f"{column.title:>{column.width}}" for column in columns)
            self._print(f"{_step_cell('step')}{cells}   left", style="bold")
        self._rows += 1
        cells = " ".join(f"{column.text(row):>{column.width}}" for column in columns)
        left = duration_text(eta_s) if eta_s else ""
        self._print(f"{_step_cell(f'{step}/{steps}')}{cells} {left:>6}")
        for note in notes(row):
            self._print(f"{_step_cell('')}{note}")

    def _print(self, text: str, style: str | None = None) -> None:
        text = fitted(visible(text), self._rich.width)
        self._rich.print(text, markup=False, highlight=False, style=style, soft_wrap=True)

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Callable[[int], None]]:
        """A bar that disappears when the work is done; yields the function that advances it."""
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


def _keys(columns: Sequence[Column]) -> set[str]:
    return {key for column in columns for key in column.keys}
