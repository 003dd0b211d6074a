"""Train from Python: `from r3 import train`.

    from r3 import train

    result = train("tiny", {"parallel.ep": 1, "train.steps": 2, "log.dir": "runs/mine"})
    print(result.metrics[-1]["reward/mean"])

One rank runs in the calling process, whose settings and random states are restored afterwards. With
`ranks=4`, torchrun starts four processes, and their output is printed here. In a script that
torchrun has started, every rank calls `train`.
"""

from __future__ import annotations

import gc
import json
import numbers
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r3.cli.parse import Invocation, from_python
from r3.config import Config, ConfigError, Problem, flatten
from r3.run.result import says_finished

_in_progress = threading.Lock()  # process groups and engines belong to the whole process


class RunError(RuntimeError):
    """Ranks that torchrun started failed, and printed why; or a run is in progress here already."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Attributes:
        folder: of the run.
        metrics: the rows of metrics.jsonl, one per step of training. With `eval.only` the one row
            of the evaluation.
        export: Hugging Face folder with the final weights; None if `checkpoint.export` is false.
        first_evaluation: the row of the evaluation before step 1; empty without one.
        best: the checkpoint with the best `checkpoint.keep_best`; None if there is none.
        ended_early: why the run ended before `train.steps` (train.patience); empty if it did not.
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
    start: Config | str, settings: Mapping[str, object] | None = None, *, ranks: int | None = None
) -> Result:
    """Run to the end, or resume the run in its folder. See the module for an example.

    Args:
        start: settings, or a word of the command line: a preset, a YAML file, file.py:function.
        settings: values that override them: `{"train.lr": 1e-4}` or `{"train": {"lr": 1e-4}}`. A
            function or class of an imported file may stand for its name, `path/to/file.py:name`.
        ranks: number of ranks; None is 1, or those that torchrun has started.

    Raises:
        ConfigError: everything that is wrong with the settings, before anything is written.
        DataError, CheckpointError, ResumeError: data, model folder or run folder are wrong.
        StoppedEarly: a signal such as Ctrl-C ended the run after a step, with a checkpoint. The
            same call resumes.
        RunError: one of several ranks failed; or another thread of this process makes a run.
    """
    started = int(os.environ.get("WORLD_SIZE", "0"))  # by torchrun
    world_size = started or (1 if ranks is None else ranks)
    if world_size < 1 or ranks not in (None, world_size):
        rule = f"torchrun has started {started} ranks" if started else "must be at least 1"
        raise ConfigError([Problem("ranks", ranks, rule, "leave it out")])
    invocation = from_python(start, _named(settings or {}), world_size=world_size)
    if says_finished(invocation):
        return _result(invocation.config)
    if not started and world_size > 1:
        _run_ranks(invocation)
        return _result(invocation.config)
    if not _in_progress.acquire(blocking=False):
        text = "a run is in progress in this process: wait for its end, or start another process"
        raise RunError(text)
    try:
        _run_here(invocation)
    finally:
        _in_progress.release()
        gc.collect()  # process groups, whose threads and sockets end with them
    return _result(invocation.config)


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
            return {key: named(each, f"{inside}{key}") for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([named(each, field) for each in value])
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
    from r3.run.folder import RunDir, read_metrics
    from r3.run.result import Goal

    run_dir = RunDir(Path(config.log.dir))
    if config.eval.only:
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


def _run_here(invocation: Invocation) -> None:
    """Run this rank in this process, and leave the process fit for another run."""
    from r3.run.embedded_run import imports_that_last, own_process

    several = invocation.world_size > 1
    with own_process():
        with imports_that_last():
            from r3.__main__ import train as make_steps
            from r3.run.prepare import prepare
        # One of several ranks that raised an error here would leave the others waiting.
        prepared = prepare(invocation, tries_functions=not several)
        if prepared is None:
            return
        with imports_that_last():
            from r3.run.ends import FailureReport
            from r3.run.session import begin, release_process
        rank = int(os.environ.get("RANK", "0"))
        # Other ranks would wait for one that raises an error. With several, the process ends, and
        # at once: the inner report comes before anything is closed.
        report = FailureReport(prepared.folder.path, rank=rank) if several else nullcontext()
        try:
            with report, begin(prepared) as run, closing(run), report, run.checkpointer:
                make_steps(run)
        finally:
            prepared.watchdog.close()
            release_process()


def _run_ranks(invocation: Invocation) -> None:
    """Start the ranks with torchrun and show what they print."""
    from r3.runtime.device import has_gpu

    with tempfile.TemporaryDirectory(prefix="r3-") as folder:
        settings = Path(folder) / "python.yaml"
        settings.write_text(invocation.overrides, encoding="utf-8")
        command = [
            *(sys.executable, "-m", "r3.run.ranks", "--check"),
            *(
                "--standalone",
                "--nproc_per_node",
                str(invocation.world_size),
                "-m",
                "r3",
                str(settings),
            ),
            *("--log.dir", invocation.config.log.dir),
        ]
        environment = os.environ | {"R3_RESUME": "the same call of r3.train"}
        if not has_gpu():  # threads that spin take the cores from other ranks: see launch/local.sh
            environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        # A notebook shows what Python prints, not what processes write to the terminal.
        pipe = None if sys.stdout.isatty() else subprocess.PIPE
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=pipe,
            stderr=subprocess.STDOUT if pipe else None,
            text=True,
            errors="replace",
        )
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
            code = process.wait()
        except KeyboardInterrupt:  # the ranks got the signal too; they end after their step
            process.wait()
            raise
    if code:
        where = Path(invocation.config.log.dir) / "errors"
        raise RunError(f"the ranks ended with exit code {code}; see above, and {where}")
