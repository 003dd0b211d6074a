"""Console output of a run: a header, one table row per step, progress bars.

A log file gets plain lines; a terminal a table (r3.tools.beside.tables).
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType

from r3 import extras
from r3.metrics.glossary import headlines
from r3.runtime.process import is_leader
from r3.runtime.terminal import is_line_open, out, say, visible

_LOG_WIDTH = 100  # of samples in log files
LOG_LINE = 120  # of a step in log files; metrics.jsonl has all figures


def share_text(value: float) -> str:
    """A share such as coverage; a value just below 1 is never shown as 1.000."""
    return f"{value if value >= 1 else min(value, 0.999):.3f}"


def duration_text(seconds: float) -> str:
    """Seconds in the largest unit that keeps two digits: 45s, 12m, 3.5h, 2.1d."""
    for unit, size in (("d", 86400), ("h", 3600)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds / 60:.0f}m" if seconds >= 100 else f"{seconds:.0f}s"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


@dataclass(frozen=True)
class Column:
    """One figure of the table.

    Attributes:
        key: metric of the row that it shows.
        title: its title; log files use it as a label.
        form: how it is written: of `format`, or a function.
        priority: columns with larger numbers are dropped first where there is no room; a log file
            keeps those of 0 and 1.
        instead: metric that it shows in a row without the other.
    """

    key: str
    title: str
    form: str | Callable[[float], str]
    width: int
    priority: int
    instead: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Metrics that it may show; the first one present counts."""
        return (self.key, self.instead) if self.instead else (self.key,)

    def text(self, row: Mapping[str, float]) -> str:
        """The figure as text; empty if the row has none."""
        value = next((row[key] for key in self.keys if key in row), None)
        if value is None:
            return ""
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)


_SILENT_AT_0 = (  # 0 in many runs, at every step
    *("rollout/truncated_frac", "reward/group_zero_std_frac"),
    *("loss/clip_frac", "/unjudged"),
)
EVAL = "eval/"  # stands for the figure of the first held-out set
COLUMNS = (
    Column("reward/mean", "reward", ".3f", 6, 0),
    Column(EVAL, "eval", ".3f", 5, 0),
    Column("mismatch/k3_replay", "k3", ".1e", 7, 1, instead="mismatch/k3"),
    Column("mismatch/k3_live", "k3 live", ".1e", 7, 1),
    Column("loss/nll", "nll", ".4f", 6, 1),
    Column("rollout/response_tokens_mean", "tokens", _short, 6, 2),
    Column("rollout/truncated_frac", "trunc", ".0%", 5, 3),
    Column("reward/group_zero_std_frac", "flat", ".0%", 4, 4),
    Column("policy/entropy", "entropy", ".3f", 7, 5),
    Column("loss/clip_frac", "clip", ".1%", 5, 7),
    Column("loss/kl_ref", "kl", ".1e", 7, 7),
    Column("loss/kl_teacher", "kl T", ".1e", 7, 2),
    Column("optim/grad_norm", "grad", ".2f", 5, 6),
    Column("routing/agreement", "agree", share_text, 5, 8),
    Column("perf/tokens_per_s", "tok/s", ".0f", 6, 6),
    Column("time/step_s", "s/step", ".1f", 6, 5),
    Column("time/generate_s", "gen", "{:.1f}s".format, 6, 9),
    Column("time/train_s", "train", "{:.1f}s".format, 6, 9),
    Column("time/sync_s", "sync", "{:.1f}s".format, 6, 9),
)
"""`r3.tools.help` says what they mean."""


def least(columns: Collection[Column]) -> Column:
    """The rightmost of the least important columns."""
    return max(reversed(list(columns)), key=lambda column: column.priority)


def with_evaluation(row: Mapping[str, float]) -> dict[str, float]:
    """The row with the figure of its first held-out set under `eval/`, without idle figures."""
    first = next(iter(headlines(row).values()), None)
    figures = {key: value for key, value in row.items() if value or not key.endswith(_SILENT_AT_0)}
    return figures | ({EVAL: row[first]} if first else {})


def notes(row: Mapping[str, float]) -> list[str]:
    """What a person should know of a row and the table does not show."""
    coverage = row.get("routing/coverage", 1.0)
    lines = [] if coverage == 1.0 else [f"coverage {share_text(coverage)}: routes are missing"]
    if dropped := row.get("env/dropped", 0.0) + row.get("reward/dropped", 0.0):
        lines.append(f"{dropped:.0f} samples dropped")
    figures = list(headlines(row).values())
    for key in sorted(row):
        if key.startswith(EVAL) and key not in (EVAL, *figures[:1]):
            name = key.removeprefix(EVAL)
            # The accuracy of a set is named only where another figure stands for the set.
            name = name.removesuffix("/accuracy") if key in figures else name
            lines.append(f"{name.replace('/', ' ')} {row[key]:.3f}")
    return lines


def step_line(
    row: Mapping[str, float],
    step: int,
    steps: int,
    eta_s: float | None = None,
    width: int = LOG_LINE,
) -> str:
    """One labelled line for a log file: `step 12/40  reward 0.610  k3 1.2e-07 ...`."""
    row = with_evaluation(row)
    texts = {column: f"{column.title} {text}" for column in COLUMNS if (text := column.text(row))}
    first = [f"step {step}/{steps}"]
    rest = [*notes(row), *([f"left {duration_text(eta_s)}"] if eta_s else [])]
    spare = [column for column in texts if column.priority > 1]  # several sets may fill a line
    while len("  ".join([*first, *texts.values(), *rest])) > width and spare:
        del texts[spare.pop(spare.index(least(spare)))]
    return "  ".join([*first, *texts.values(), *rest])


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Say on rank 0 what is being loaded, and the seconds that it took; on a terminal they run."""
    if not is_leader():
        yield
        return
    started = time.perf_counter()
    on_terminal = out().isatty()
    if not on_terminal:
        say(f"{what} ...", end="")
    try:
        with extras.terminal().running(what) if on_terminal else nullcontext():
            yield
    finally:
        took = f"{time.perf_counter() - started:.1f} s"
        if is_line_open():
            say(f" {took}", continues=True)
        else:
            say(f"{what} ... {took}")


class Console:
    """Writes plain lines to one stream, such as a log file.

    Args:
        is_leader: whether anything is written at all.
        stream: None is stdout.
    """

    def __init__(self, *, is_leader: bool, stream: TextIO | None = None) -> None:
        self._stream, self._is_leader = stream or out(), is_leader

    def header(self, lines: Sequence[str]) -> None:
        """Show what runs, before it starts."""
        self.line("\n".join(lines))

    def line(self, text: str) -> None:
        """Write one line at once."""
        if self._is_leader:
            print(visible(text), file=self._stream, flush=True)

    def show(self, conversation: RenderableType) -> None:
        """Show a sample: on a terminal in colours, in a log file as plain lines."""
        plain = RichConsole(file=io.StringIO(), color_system=None, width=_LOG_WIDTH)
        with plain.capture() as captured:
            plain.print(conversation)
        self.line("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def row(
        self, row: Mapping[str, float], step: int, steps: int, eta_s: float | None = None
    ) -> None:
        """Show the figures of a step.

        Args:
            eta_s: seconds until the last step ends, if known.
        """
        self.line(step_line(row, step, steps, eta_s))

    def progress(self, total: int, label: str) -> AbstractContextManager[Callable[[int], None]]:
        """A bar that disappears when the work is done; yields the function that advances it."""
        return nullcontext(lambda count: None)


def console_of(*, is_leader: bool, progress: bool, stream: TextIO | None = None) -> Console:
    """The console of a run: tables on a terminal, else plain lines; the leader's alone writes.

    Args:
        is_leader: whether anything is written at all.
        progress: whether bars are drawn, on a terminal.
        stream: None is stdout.
    """
    if is_leader and (stream or out()).isatty():
        terminal: Console = extras.terminal().TerminalConsole(progress=progress, stream=stream)
        return terminal
    return Console(is_leader=is_leader, stream=stream)
