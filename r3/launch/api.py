"""Train from Python: `from r3 import train`.

    from r3 import train

    result = train("tiny", {"parallel.ep": 1, "train.steps": 2, "log.dir": "runs/mine"})
    print(result.metrics[-1]["reward/mean"])

The ranks are processes that torchrun starts, one rank too, and their output is printed here. The
calling process imports neither torch nor vLLM, and stays as it is.
"""

from __future__ import annotations

import json
import numbers
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from r3 import extras
from r3.cli.base_config import Base, changed_settings, find_base
from r3.cli.parse import MODELS, Invocation, examined, folder_is_chosen, invocation_of, laid_over
from r3.config import Config, ConfigError, Problem, flatten, read_values
from r3.launch.ranks import FINISHED, SIGNALS
from r3.run.folder import RunDir, read_metrics
from r3.runtime.terminal import say
from r3.user_code.loading import forget_files

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_LAST_LINES = 10


class RunError(RuntimeError):
    """The ranks have failed, were refused or were stopped; the text is what they said.

    Attributes:
        code: exit code: 2 for data, model or run folder that are wrong; 75 for a run that a signal
            stopped after a step, with a checkpoint: the same call resumes it.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Attributes:
        folder: of the run.
        metrics: the rows of metrics.jsonl, one per step of training. With `eval.only` the one row
            of the evaluation.
        export: Hugging Face folder with the final weights; None if `checkpoint.export` is false.
        first_evaluation: the row of the evaluation before step 1; empty without one.
        best: of the checkpoints, that with the best `checkpoint.keep_best`; None if there is none.
            The starting model may be better: `first_evaluation`.
        ended_early: why the run ended before its last step (train.patience); empty if it did not.
    """

    folder: Path
    metrics: list[dict[str, float]]
    export: Path | None
    first_evaluation: dict[str, float] = field(default_factory=dict)
    best: Path | None = None
    ended_early: str = ""

    def __repr__(self) -> str:
        last = self.metrics[-1] if self.metrics else self.first_evaluation
        shown = [key for key in last if key == "reward/mean" or key.endswith("/accuracy")]
        facts = [f"folder={str(self.folder)!r}", f"step={last.get('step', 0):.0f}"]
        facts += [f"{key}={last[key]:.3f}" for key in sorted(shown)[:1]]  # eval/ before reward/
        facts += [f"best={str(self.best)!r}"] if self.best else []
        facts += [f"ended_early={self.ended_early!r}"] if self.ended_early else []
        return f"Result({', '.join(facts)}, export={str(self.export) if self.export else None!r})"


def train(
    start: Config | str, settings: Mapping[str, object] | None = None, *, ranks: int = 1
) -> Result:
    """Run to the end, or resume the run in its folder. See the module for an example.

    Args:
        start: settings, or a word of the command line: a preset, a YAML file, file.py:function.
        settings: values that override them: `{"train.lr": 1e-4}` or `{"train": {"lr": 1e-4}}`. A
            function or class of an imported file may stand for its name, `path/to/file.py:name`.
        ranks: number of ranks.

    Raises:
        ConfigError: everything that is wrong with the settings, before anything is written.
        RunError: everything else, with the message of the rank that failed first.
        KeyboardInterrupt: after Ctrl-C, when the ranks have ended: after their step, with a
            checkpoint from which the same call resumes; at once after a second Ctrl-C.
    """

    if "TORCHELASTIC_RUN_ID" in os.environ:
        rule = "torchrun has started this process, and `train` starts ranks of its own"
        fix = "call it in one process, `python my_run.py`, and give it ranks=N"
        raise ConfigError.of("ranks", ranks, rule, fix)
    if ranks < 1:
        raise ConfigError.of("ranks", ranks, "must be at least 1", "leave it out")
    invocation = from_python(start, _named(settings or {}), world_size=ranks)
    if not extras.result().says_finished(invocation):
        _run(invocation)
    return _result(invocation.config)


def from_python(
    start: Config | str, settings: Mapping[str, object], *, world_size: int
) -> Invocation:
    """The run that a Python program asks for, checked like a command line; prints notes.

    Args:
        start: settings, or a word of the command line: a preset, a YAML file, file.py:function.
        settings: values that override them, in sections or by full names such as "train.lr".
        world_size: number of ranks.

    Raises:
        ConfigError: everything that is wrong with the settings.
    """
    forget_files()  # they may have been edited since an earlier call
    base = find_base(start) if isinstance(start, str) else _base_of_config(start)
    problems, notes = list(base.problems), list(base.notes)
    values = read_values(settings, problems, notes)
    config = laid_over(base, values)
    examined(config, base, values, world_size, problems, fetched=MODELS, loads=True)
    config, note = extras.placed(config, problems, is_chosen=folder_is_chosen(base, values))
    if problems:
        raise ConfigError(problems)
    if note:
        say(note)
    for warning in notes:  # the ranks print the others
        say(f"warning: {warning}", error=True)
    return invocation_of(base, config, base.describe(config), world_size)


def _base_of_config(config: Config) -> Base:
    """The settings that a Python program gives, as differences from the defaults."""
    values = changed_settings(Config(), config)
    log_dir = config.log.dir or "runs/python"
    return Base(name="Python", root="", root_config=Config(), values=values, log_dir=log_dir)


def _named(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings with Python's own numbers, and the names of functions and classes in their place.

    Every rank and worker loads them from their files, as those of a command line.

    Raises:
        ConfigError: what has no such name.
    """
    problems: list[Problem] = []

    def named(value: Any, field: str) -> Any:
        if isinstance(value, Mapping):
            inside = f"{field}." if field else ""
            return {key: named(entry, f"{inside}{key}") for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([named(entry, field) for entry in value])
        if isinstance(value, numbers.Real) and type(value) not in (bool, int, float):  # of numpy
            return int(value) if isinstance(value, numbers.Integral) else float(value)
        if not callable(value):
            return value
        name = getattr(value, "__qualname__", type(value).__qualname__)
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        file = getattr(module, "__file__", None) or ""
        if file.endswith(".py") and getattr(module, name, None) is value:
            if getattr(module, "__name__", "") != "__main__":
                return f"{os.path.relpath(file)}:{name}"
        rule = "is not defined at the top of an imported file: other processes could not load it"
        fix = "write it into a file of its own, and give 'my_file.py:function'"
        problems.append(Problem(field, name, rule, fix))
        return name

    values: dict[str, object] = named(settings, "")
    if problems:
        raise ConfigError(problems)
    return values


def _result(config: Config) -> Result:
    from r3.run.goal import Goal

    run_dir = RunDir.of(config)
    if not config.trains:
        return Result(
            folder=run_dir.path,
            metrics=[json.loads(run_dir.evaluated.read_text(encoding="utf-8"))],
            export=None,
        )
    rows = read_metrics(run_dir.metrics) if run_dir.metrics.exists() else []
    export = run_dir.hf(int(rows[-1]["step"]) if rows else config.train.steps)
    best = run_dir.checkpoints / "best"
    goal = Goal.of(flatten(config))
    return Result(
        folder=run_dir.path,
        metrics=[row for row in rows if row["step"] > 0],
        export=export if export.exists() else None,
        first_evaluation=next((row for row in rows if row["step"] == 0), {}),
        best=best.resolve() if goal.metric and best.exists() else None,
        ended_early=goal.end(goal.values(rows)),
    )


def _run(invocation: Invocation) -> None:
    """Check the run in a process of its own, then start its ranks; print what they print.

    Raises:
        RunError: the exit code is not 0.
        KeyboardInterrupt: Ctrl-C has ended the ranks.
    """
    ranks, folder = str(invocation.world_size), invocation.config.log.dir
    with tempfile.TemporaryDirectory(prefix="r3-") as place, _Forwarded() as signals:
        settings = Path(place) / "python.yaml"
        settings.write_text(invocation.overrides, encoding="utf-8")
        program = ["-m", "r3", str(settings), "--log.dir", folder]
        environment = {name: each for name, each in os.environ.items() if name not in _OF_TORCHRUN}
        environment["R3_RESUME"] = "the same call of r3.train"
        environment["R3_READ"] = place  # ranks take what the check has read of the data
        errors = Path(place) / "errors"
        with errors.open("w+b") as file:  # the exception has them
            command = [*program, "--check", "--world-size", ranks]
            code, _ = _printed(command, environment, signals, errors=file.fileno())
        said = errors.read_text(encoding="utf-8", errors="replace")
        if code == 0:
            _show(said, sys.stderr)  # warnings
            began = time.time()
            command = ["-m", "r3.launch.ranks", "--die-with-parent", "--standalone"]
            command += ["--nproc_per_node", ranks, *program]
            code, said = _printed(command, environment, signals)
            said = _failure(RunDir(Path(folder)).first_failure, began) or said
    if signal.SIGINT in signals.caught:
        raise KeyboardInterrupt
    if code not in (0, FINISHED):
        raise RunError(said.strip() or f"the ranks ended with exit code {code}; see above", code)


def _failure(file: Path, began: float) -> str:
    """What the first rank that failed said, unless that was in an earlier run."""
    try:
        return file.read_text(encoding="utf-8") if file.stat().st_mtime >= began - 1 else ""
    except FileNotFoundError:
        return ""


class _Forwarded:
    """Forwards the signals that this process gets in its block to the process that it runs.

    Outside of the main thread, where Python has no handlers, it forwards none.
    """

    def __init__(self) -> None:
        self.caught: list[int] = []
        self._process: subprocess.Popen[str] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Forwarded:
        if threading.current_thread() is threading.main_thread():
            for number in map(signal.Signals.__getitem__, SIGNALS):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, _frame: object) -> None:
        self.caught.append(number)
        if self._process is not None:
            self._process.send_signal(number)

    def to(self, process: subprocess.Popen[str] | None) -> None:
        """Forward to a process from now on, and what came before it ran."""
        self._process = process
        if process is not None and self.caught:
            process.send_signal(self.caught[-1])


def _show(text: str, stream: TextIO | None) -> None:
    if stream is not None:  # a program without a console has none
        stream.write(text)
        stream.flush()


def _printed(
    command: Sequence[str],
    environment: Mapping[str, str],
    signals: _Forwarded,
    *,
    errors: int | None = None,
) -> tuple[int, str]:
    """Run Python with these words; returns its exit code and the last lines that it has printed.

    This process prints them: a notebook shows no output of other processes. On a
    terminal the other process writes for itself, and has its progress bars.

    Args:
        errors: a descriptor for its stderr.
    """
    terminal = sys.__stdout__ if sys.stdout is sys.__stdout__ else None
    writes = terminal is not None and terminal.isatty()
    process = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=None if writes else subprocess.PIPE,
        stderr=errors or (None if writes else subprocess.STDOUT),
        text=True,
        errors="replace",
        start_new_session=True,  # it gets signals from here alone, and once
    )
    signals.to(process)
    last: deque[str] = deque(maxlen=_LAST_LINES)
    for line in process.stdout or ():
        _show(line, sys.stdout)
        last.append(line)
    code = process.wait()
    signals.to(None)
    return code, "".join(last)
