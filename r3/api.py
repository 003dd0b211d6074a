"""Train from Python: `from r3 import train`.

    from r3 import train

    result = train("tiny", {"parallel.ep": 1, "train.steps": 2, "log.dir": "runs/mine"})
    print(result.metrics[-1]["reward/mean"])

One rank runs in the calling process. With `ranks=4`, torchrun starts four processes, and their
output is printed here. In a script that torchrun has started, every rank calls `train`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from r3.cli.parse import Invocation, from_python
from r3.config import Config, ConfigError, Problem

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RunError(RuntimeError):
    """Ranks that torchrun started for `train` ended with an error, which they printed."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Attributes:
        folder: of the run.
        metrics: the rows of metrics.jsonl, one per step.
        export: Hugging Face folder with the final weights; None if `checkpoint.export` is false.
    """

    folder: Path
    metrics: list[dict[str, float]]
    export: Path | None


def train(
    start: Config | str, settings: Mapping[str, object] | None = None, *, ranks: int | None = None
) -> Result:
    """Make a run to its end, or go on with the one in its folder. See the module for an example.

    Args:
        start: settings, or a word of the command line: a preset, a YAML file, file.py:function.
        settings: values laid over them: `{"train.lr": 1e-4}` or `{"train": {"lr": 1e-4}}`.
        ranks: number of ranks; None is 1, or those that torchrun has started.

    Raises:
        ConfigError: everything that is wrong with the settings, before anything is written.
        DataError, CheckpointError, ResumeError: data, model folder or run folder are wrong.
        StoppedEarly: a signal such as Ctrl-C ended the run after a step, with a checkpoint. The
            same call goes on.
        RunError: one of several ranks failed.
    """
    started = int(os.environ.get("WORLD_SIZE", "0"))  # by torchrun
    world_size = started or (1 if ranks is None else ranks)
    if world_size < 1 or ranks not in (None, world_size):
        rule = f"torchrun has started {started} ranks" if started else "must be at least 1"
        raise ConfigError([Problem("ranks", ranks, rule, "leave it out")])
    invocation = from_python(start, settings or {}, world_size=world_size)
    if started or world_size == 1:
        _run_here(invocation)
    else:
        _run_ranks(invocation)

    from r3.run.folder import RunDir, read_metrics

    run_dir = RunDir(Path(invocation.config.log.dir))
    export = run_dir.hf(invocation.config.train.steps)
    return Result(
        folder=run_dir.path,
        metrics=read_metrics(run_dir.metrics) if run_dir.metrics.exists() else [],
        export=export if export.exists() else None,
    )


def _run_here(invocation: Invocation) -> None:
    """Run this rank in this process, and leave the process fit for another run."""
    from r3.__main__ import train as make_steps
    from r3.run.build import release_process
    from r3.run.failures import FailureReport
    from r3.run.prepare import prepare
    from r3.run.start import begin

    with _kept_environment():
        prepared = prepare(invocation)
        if prepared is None:
            return
        rank = int(os.environ.get("RANK", "0"))
        # Other ranks would wait for one that raises an error. With several, the process ends, and
        # at once: the inner report comes before anything is closed.
        several = invocation.world_size > 1
        report = FailureReport(prepared.folder.path, rank=rank) if several else nullcontext()
        try:
            with report, begin(prepared) as run, closing(run), report, run.background:
                make_steps(run)
        finally:
            prepared.watchdog.close()
            release_process()


def _run_ranks(invocation: Invocation) -> None:
    """Start the ranks with torchrun and show what they print."""
    from r3.runtime.device import has_gpu

    with tempfile.TemporaryDirectory(prefix="r3-") as folder:
        settings = Path(folder) / "python.yaml"
        settings.write_text(invocation.overrides_with_secrets, encoding="utf-8")
        command = [
            *(sys.executable, "-m", "r3.run.ranks", *([] if has_gpu() else ["--preload"])),
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


@contextmanager
def _kept_environment() -> Iterator[None]:
    """Remove the variables of a single rank afterwards: the next run may have several."""
    before = {name: os.environ.get(name) for name in _RANK_VARIABLES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
