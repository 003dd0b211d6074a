"""Metrics of a run: collect them per step, reduce them over ranks, and write one row per step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from r3 import extras
from r3.config import Config
from r3.errors import Explained
from r3.metrics.console import console_of
from r3.metrics.glossary import explain
from r3.metrics.reduce import Max, Partial, UsersMean

if TYPE_CHECKING:
    from r3.runtime.mesh import Axis


class TrackerError(Explained):
    """The experiment tracker could not start."""


class Writer(Protocol):
    """Shows rows and samples elsewhere: TensorBoard, or an experiment tracker."""

    def log(self, row: Mapping[str, float], step: int) -> None: ...

    def log_samples(self, texts: Mapping[str, str], step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class RunFiles(Protocol):
    """Where rows go; `r3.run.folder.RunDir` is one."""

    @property
    def tensorboard(self) -> Path: ...

    def append_metrics(self, row: Mapping[str, float]) -> bool: ...


class Trace(Protocol):
    """What records the operations of a step; `r3.tools.beside.step_trace.StepTrace` is one."""

    def open_step(self, step: int) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[Any]: ...

    def close_step(self) -> None: ...


class Meter:
    """Collects the parts of metrics on every rank; once a step they meet, and rank 0 writes and
    shows the row.

    Args:
        run_dir: where rank 0 writes metrics.jsonl and TensorBoard's events; None = nowhere.
        axis: the ranks whose parts make a row. All of them call `close_step`.
        config: of the run.
        on_phase: told the phase whenever it changes or proceeds: the watchdog's `beat`.
        first_step: steps that a resumed run has already made; its rows continue from there.
        tracker: gets rows and samples on rank 0, and is closed with the meter.
        trace: told of steps and phases.
        stream: the console; None = stdout.

    Attributes:
        writers: TensorBoard and the tracker, on rank 0.
        console: shows what runs, lines from any thread, samples and rows.
        last_row: the newest row; empty before the first.
        last_step: its step, or that of the checkpoint that the run resumes from; -1 before both.
    """

    def __init__(
        self,
        run_dir: RunFiles | None,
        axis: Axis,
        config: Config,
        *,
        on_phase: Callable[[str], None] = lambda phase: None,
        first_step: int = 0,
        tracker: Writer | None = None,
        trace: Trace | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._axis = axis
        self._steps = config.train.steps
        self._on_phase = on_phase
        self.console = console_of(
            is_leader=axis.rank == 0, progress=config.log.progress, stream=stream
        )
        self._run_dir = run_dir if axis.rank == 0 else None
        self._trace = trace
        self._watch = extras.mismatch_watch()
        self.writers = [tracker] if tracker else []
        if self._run_dir and config.log.tensorboard:
            self.writers.append(
                extras.tensorboard().Events(
                    self._run_dir.tensorboard, first_step, config.eval.name, self.console.line
                )
            )
        self.last_row: dict[str, float] = {}
        self._unwritten: list[dict[str, float]] = []  # rows for which the disk had no room
        self._has_written = False
        self.last_step = first_step if first_step else -1  # a fresh run may report a step 0
        self._parts: dict[str, list[Partial]] = {}
        self._seconds: dict[str, float] = {}
        self._open_phases: list[str] = []
        self._began: float | None = None
        self._recent_s: deque[float] = deque(maxlen=10)

    def open_step(self, step: int) -> None:
        """Say that a step of training begins."""
        if self._trace:
            self._trace.open_step(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. Phases may nest (the outer one's time includes the inner one's) and repeat
        (times add up).
        """
        explain(f"time/{name}_s")
        began = time.perf_counter()
        self._began = began if self._began is None else self._began
        self._open_phases.append(name)
        self._on_phase(name)
        try:
            with self._trace.phase(name) if self._trace else nullcontext():
                yield
        finally:
            self._open_phases.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            self._beat()

    @contextmanager
    def between_steps(self, what: str, *, says: bool = True) -> Iterator[None]:
        """Time work that belongs to no row, such as saving; the console says what took how long.

        Args:
            says: whether it does; not for work in the background of the steps.
        """
        began = time.perf_counter()
        self._on_phase(what)
        try:
            yield
        finally:
            self._beat()
        if says:
            self.console.line(f"{what}: {time.perf_counter() - began:.1f} s")

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Callable[..., None]]:
        """A progress bar on rank 0's terminal; the yielded `tick(count=1)` moves it, and tells the
        watchdog.
        """
        with self.console.progress(total, label) as advance:

            def tick(count: int = 1) -> None:
                advance(count)
                self._beat()

            yield tick

    def add(self, parts: Mapping[str, Partial]) -> None:
        """Take this rank's parts of some metrics, any number of times a step, on any ranks.

        Raises:
            UnknownMetricError: the glossary does not have the metric.
        """
        for key, part in parts.items():
            explain(key, users=isinstance(part, UsersMean))
            self._parts.setdefault(key, []).append(part)

    def close_step(self, step: int) -> dict[str, float]:
        """Merge everything since the last row into one, in one collective.

        All ranks must call, and get the same row.

        Raises:
            ValueError: the step is not later than that of the last row.
        """
        if step <= self.last_step:
            raise ValueError(
                f"a row of step {step} after one of step {self.last_step} would repeat the step"
            )
        self._on_phase("report")
        now = time.perf_counter()
        if self._trace:
            self._trace.close_step()
        mine: dict[str, list[Partial]] = self._parts | {
            f"time/{name}_s": [Max(seconds)] for name, seconds in self._seconds.items()
        }
        if self._began is not None:
            mine["time/step_s"] = [Max(now - self._began)]
        self._parts, self._seconds, self._began, self.last_step = {}, {}, None, step

        ranks = self._axis.all_gather_object(mine)
        row = merged_parts(ranks)
        row |= _over_layers(row)
        row |= _rates(row)
        row = self.last_row = dict(sorted(row.items()))
        if self._run_dir:
            self._unwritten.append({"step": step, **row})
            try:
                self._write_rows()
            except OSError as error:
                self.console.line(f"row of step {step} not written: {error}; it is kept")
        for writer in self.writers:
            writer.log(row, step)
        self.console.row(row, step, self._steps, self._eta_s(row, step))
        for line in self._watch.lines(row, step):
            self.console.line(line)
        self._beat()
        return row

    def _write_rows(self) -> None:
        while self._run_dir and self._unwritten:
            row = self._unwritten[0]
            if self._run_dir.append_metrics(row) and self._has_written:
                text = f"was removed or emptied: rows before step {row['step']:.0f} are lost"
                self.console.line(f"metrics.jsonl {text}")
            self._has_written = True
            del self._unwritten[0]

    def _eta_s(self, row: Mapping[str, float], step: int) -> float | None:
        """Seconds until the last step ends without evaluations, from the latest steps."""
        if "time/step_s" not in row or step == 0:
            return None
        self._recent_s.append(_own_seconds(row))
        return (self._steps - step) * sum(self._recent_s) / len(self._recent_s)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Write out what TensorBoard and the tracker still hold.

        Raises:
            OSError: rows of metrics cannot be written, and the run has not failed anyway.
        """
        try:
            self._write_rows()
        except OSError:
            if not failed:
                raise
        for writer in self.writers:
            writer.close(failed=failed)

    def _beat(self) -> None:
        self._on_phase(self._open_phases[-1] if self._open_phases else "between phases")


# How the metrics of the experts' load per layer become one number.
_OVER_LAYERS: dict[str, Callable[[Sequence[float]], float]] = {
    "load_max": max,
    "load_entropy": fmean,
    "load_dead": math.fsum,
}


def _over_layers(row: Mapping[str, float]) -> dict[str, float]:
    """The load of the experts over all layers, from that of each."""
    combined = {}
    for name, combine in _OVER_LAYERS.items():
        values = [row[key] for key in sorted(row) if key.startswith(f"routing/{name}_layer/")]
        if values:
            combined[f"routing/{name}"] = float(combine(values))
    return combined


def _own_seconds(row: Mapping[str, float]) -> float:
    """Seconds of the step itself: steps with an evaluation are not slower ones."""
    return max(0.0, row["time/step_s"] - row.get("time/evaluate_s", 0.0))


def _rates(row: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second, of the whole step and of the engine."""
    rates = {}
    if "time/step_s" in row and "rollout/tokens" in row and (seconds := _own_seconds(row)):
        rates["perf/tokens_per_s"] = row["rollout/tokens"] / seconds
    if row.get("time/generate_s") and "rollout/sampled_tokens" in row:
        rate = row["rollout/sampled_tokens"] / row["time/generate_s"]
        rates["perf/sampled_tokens_per_s"] = rate
    return rates


def merged_parts(ranks: Sequence[Mapping[str, Sequence[Partial]]]) -> dict[str, float]:
    row = {}
    for key in set().union(*ranks):
        parts = [part for rank in ranks for part in rank.get(key, ())]
        if len(kinds := {type(part) for part in parts}) > 1:
            raise TypeError(
                f"{key}: its parts are of different kinds: "
                f"{sorted(kind.__name__ for kind in kinds)}"
            )
        value = type(parts[0]).reduce(parts)
        if value is not None:
            row[key] = value
    return row
