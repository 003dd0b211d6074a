"""Decide, before anything heavy is imported, whether a run starts or resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from r3.cli.base_config import OVERRIDES
from r3.config import (
    Config,
    ConfigError,
    Problem,
    fixed_changes,
    from_yaml,
    other_run,
    to_yaml,
    with_values,
)
from r3.models.hf_checkpoint import replace_folder
from r3.run.folder import (
    RunDir,
    read_metrics,
    samples_after,
    step_folders,
    truncate_metrics,
    write_text,
)
from r3.run.lock import RunLock, hold, unusable
from r3.run.manifest import DamageError, read_manifest
from r3.run.run_json import (
    Identity,
    is_automatic,
    new_identity,
    read_identity,
    write_identity,
)
from r3.run.sources import Sources, require_same_sources, write_sources

_FRUITLESS_RESTARTS = 1
_FAILURES_OF_A_STEP = 1  # the same failure twice is no accident
_ASIDE = (
    *("metrics.jsonl", "tensorboard", "rollouts", "eval", "config.yaml", OVERRIDES, "hf"),
    "sources.json",
)


class ResumeError(ValueError):
    """A checkpoint that cannot be resumed from. R3 does not start a new run in its place."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest complete checkpoint of a run: its folder and the steps done when it was saved."""

    folder: Path
    step: int


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a run begins: the checkpoint, if any, and notes for the console."""

    found: Found | None = None
    notes: tuple[str, ...] = ()
    lock: RunLock | None = None  # of the process that writes, until the run ends
    identity: Identity | None = None  # of that process, read once: the file may vanish


def find_latest(checkpoints: Path) -> Found | None:
    """The checkpoint of the highest step, or None. All ranks verify its contents later."""
    folders = step_folders(checkpoints)
    return Found(step=folders[-1][0], folder=folders[-1][1]) if folders else None


def resume_note(found: Found) -> str:
    """The line about where a run resumes."""
    return f"resuming from {found.folder} after step {found.step}"


def register_start(run_dir: RunDir, *, reached: int = 0) -> tuple[Identity, list[str]]:
    """Note this start in `run.json`, which the first start makes.

    Args:
        reached: the last step that the attempt before has reported.

    Returns:
        The identity of the run, and a note if the folder is a copy of the run's or lost its key.

    Raises:
        ResumeError: launchers have restarted the run after the same step failed twice, or again
            and again without a new checkpoint.
    """
    found = find_latest(run_dir.checkpoints)
    identity = read_identity(run_dir.path)
    notes = []
    if identity is None:
        # Checkpoints that are here keep the id of their run.
        ids = (_run_id(folder) for _, folder in reversed(step_folders(run_dir.checkpoints)))
        identity = new_identity(next(filter(None, ids), ""))
        if found is not None:
            text = "run.json is missing: checkpoints with suspended conversations do not resume"
            notes.append(f"{text} without the key in it; others do")
    step = found.step if found is not None else 0
    before, identity = identity, identity.placed(run_dir.path)
    identity = identity.started(step, reached=reached, automatic=is_automatic())
    write_identity(run_dir.path, identity)
    if identity.failures > _FAILURES_OF_A_STEP:
        raise ResumeError(
            f"{run_dir.path}: step {identity.failed_step} failed {_times(identity.failures)} in a "
            "row. The run stops here. Fix: correct the cause of its last error, then start the run "
            f"by hand. The error:\n{_last_error(run_dir)}"
        )
    if identity.fruitless > _FRUITLESS_RESTARTS:
        raise ResumeError(
            f"{run_dir.path}: {identity.fruitless} automatic restarts in a row ended before a "
            f"checkpoint newer than step {step}. The run stops here. Fix: look for its error above "
            "or in the log of the last attempt, or set a smaller checkpoint.every; then start it "
            "by hand"
        )
    if before.place and identity.tracker != before.tracker:
        place = f"{run_dir.path} is a copy of {before.place[1]}"
        notes.append(f"{place}: an experiment tracker gets its rows as another run")
    return identity, notes


def _run_id(checkpoint: Path) -> str:
    with suppress(DamageError):
        return read_manifest(checkpoint).run_id
    return ""


def _rows(run_dir: RunDir) -> list[dict[str, float]]:
    """The rows of the run so far, without an incomplete last line."""
    fix = "Fix: correct that row or remove it; it holds metrics and nothing else"
    try:
        return read_metrics(run_dir.metrics, notes=[])  # `truncate_metrics` returns them
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ResumeError(f"{error}. {fix}") from None


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _last_error(run_dir: RunDir) -> str:
    try:
        return run_dir.first_failure.read_text(errors="replace").strip()
    except OSError:
        return "none was written: a process was killed, or hung"


def open_run(
    run_dir: RunDir,
    config: Config,
    *,
    writes: bool,
    overrides: str = "",
    sources: Callable[[], Sources] | None = None,
) -> Start:
    """Look at the run's folder and make it ready to start or to resume.

    All ranks must call; one of them (`writes`) changes files. With a checkpoint, settings that may
    not change are compared, and metrics after the step of the checkpoint are dropped: those steps
    are repeated. Without one, the files of an unfinished run move to `aborted_001/`.

    Args:
        run_dir: the run's folder.
        config: settings of the run, for config.yaml.
        writes: whether this rank changes files.
        overrides: differences from the base, for overrides.yaml; "" writes no such file.
        sources: returns what shapes the run beside its settings; None compares nothing.

    Raises:
        ConfigError: a setting, rows, tokenizer, template or a model changed that may not, the
            checkpoint is beyond train.steps, another run writes to the folder, or nobody can.
        ResumeError: launchers restart the run again and again without progress, or
            metrics.jsonl is damaged before its last line.
    """
    lock = hold(run_dir.path) if writes else None
    with ExitStack() as on_failure:
        if lock is not None:
            on_failure.callback(lock.release)
        try:
            start = _open(run_dir, config, sources, writes=writes, overrides=overrides)
        except OSError as error:  # a full disk
            raise unusable(run_dir.path, error) from None
        on_failure.pop_all()
    return replace(start, lock=lock)


def _open(
    run_dir: RunDir,
    config: Config,
    sources: Callable[[], Sources] | None,
    *,
    writes: bool,
    overrides: str,
) -> Start:
    rows = _rows(run_dir)
    identity, registered = None, list[str]()
    if writes:
        _clear(run_dir)
        reached = int(rows[-1]["step"]) if rows else 0
        identity, registered = register_start(run_dir, reached=reached)
    found = find_latest(run_dir.checkpoints)
    if found is not None:
        problems = _beyond(config, run_dir, found)
        if run_dir.config.exists():
            changes = fixed_changes(from_yaml(run_dir.config.read_text()), config)
            problems += [other_run(run_dir.path, changes)] if changes else []
        if problems:
            raise ConfigError(problems)
        notes = [resume_note(found), *registered]
        if sources is not None:
            now = sources()
            notes += require_same_sources(run_dir, now, config, refuse=not config.eval.only)
        if writes:
            notes += drop_after(run_dir, found.step)
            _write_settings(run_dir, config, overrides)
            if sources is not None:
                write_sources(run_dir, now)
        return Start(found=found, notes=tuple(notes), identity=identity)
    notes = []
    if writes:
        exports = run_dir.exports
        left = [run_dir.path / name for name in _ASIDE if (run_dir.path / name).exists()]
        if exports in left and not any(exports.iterdir()):  # it may be a disk of its own
            left.remove(exports)
        if rows or exports in left:
            number = 1 + len(list(run_dir.path.glob("aborted_*")))
            aside = run_dir.path / f"aborted_{number:03d}"
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
            notes.append(
                f"{run_dir.path} has an unfinished run without a checkpoint: moved to {aside}, "
                "starting a new run"
            )
        _write_settings(run_dir, config, overrides)
        if sources is not None:
            write_sources(run_dir, sources())
    return Start(found=None, notes=tuple(notes), identity=identity)


def _clear(run_dir: RunDir) -> None:
    """Remove what a kill in the middle of a write has left; the folder has no other writer."""
    for folder in (".", "errors", "heartbeats", "rollouts", "eval"):
        for file in (run_dir.path / folder).glob(".*.tmp"):
            if ".scores." not in file.name:  # `r3.rescore` writes them beside a run
                file.unlink(missing_ok=True)
    for pattern in (".step_*.partial", ".*.old"):
        for left in run_dir.checkpoints.glob(pattern):
            shutil.rmtree(left)


def _beyond(config: Config, run_dir: RunDir, found: Found) -> list[Problem]:
    """A run that should end before its newest checkpoint: its result would be another step's."""
    steps = config.train.steps
    if steps >= found.step or config.eval.only:
        return []
    return [
        Problem(
            "train.steps",
            steps,
            f"the newest checkpoint is of step {found.step}, so the run would end with its weights",
            f"set at least {found.step}; an earlier checkpoint that is kept becomes a model folder "
            f"with: python -m r3.export {run_dir.path} --step {steps}",
        )
    ]


def drop_after(run_dir: RunDir, step: int) -> list[str]:
    """Drop what an attempt wrote after `step`, whose steps are made again; return notes.

    Rows of metrics and samples are dropped: another layout may sample others, and fewer of these
    steps may be made again. Exported models get another name.
    """
    notes = truncate_metrics(run_dir, step + 1)
    for file in samples_after(run_dir, step):
        file.unlink()
    for later, folder in step_folders(run_dir.exports):
        if later > step:
            aside = folder.with_name(f"abandoned_{folder.name}")
            replace_folder(folder, aside)
            notes.append(f"{folder} is of the attempt that is given up: renamed to {aside.name}")
    return notes


def _write_settings(run_dir: RunDir, config: Config, overrides: str) -> None:
    config = with_values(config, {"checkpoint.allow_changed": ()})  # it holds for one start
    write_text(run_dir.config, to_yaml(config))
    if overrides:
        write_text(run_dir.path / OVERRIDES, overrides)
