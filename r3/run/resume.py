"""Decide, before anything heavy is imported, whether a run starts or resumes, and say so."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from r3.cli.base import OVERRIDES
from r3.config import Config, ConfigError, from_yaml, resume_problems, to_yaml
from r3.run.folder import RunDir, read_metrics, truncate_metrics, write_text
from r3.run.identity import is_automatic, new_identity, read_identity, write_identity
from r3.run.lock import RunLock, hold
from r3.run.manifest import DamageError, read_manifest

_STEP = re.compile(r"step_(\d{6,})")
_FRUITLESS_RESTARTS = 1  # the same failure twice is no accident
_ASIDE = ("metrics.jsonl", "tensorboard", "rollouts", "eval", "config.yaml", OVERRIDES, "hf")


class ResumeError(ValueError):
    """A checkpoint that cannot be resumed from. R3 does not start a new run in its place."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest complete checkpoint of a run: its folder and the steps done when it was saved."""

    folder: Path
    step: int


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a run begins: from a checkpoint or not, and what the console says about it."""

    found: Found | None = None
    said: tuple[str, ...] = ()
    lock: RunLock | None = None  # of the process that writes, until the run ends


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first. A checkpoint gets its final name when it is complete."""
    return sorted(
        (int(match[1]), path)
        for path in checkpoints.glob("step_*")
        if (match := _STEP.fullmatch(path.name))
    )


def find_latest(checkpoints: Path) -> Found | None:
    """The newest checkpoint by its name, or None. Its contents are verified later, by all ranks."""
    folders = step_folders(checkpoints)
    return Found(step=folders[-1][0], folder=folders[-1][1]) if folders else None


def said_of(found: Found) -> str:
    """The line that tells where a run resumes."""
    return f"resuming from {found.folder} after step {found.step}"


def register_start(run_dir: RunDir) -> None:
    """Note this start in `run.json`, which the first start makes.

    Raises:
        ResumeError: launchers have restarted the run again and again without a new checkpoint.
    """
    found = find_latest(run_dir.checkpoints)
    identity = read_identity(run_dir.path)
    if identity is None:
        run_id = ""
        if found is not None:  # checkpoints that were copied here keep the id of their run
            with suppress(DamageError):
                run_id = read_manifest(found.folder).run_id
        identity = new_identity(run_id)
    step = found.step if found is not None else 0
    identity = identity.started(step, automatic=is_automatic())
    write_identity(run_dir.path, identity)
    if identity.fruitless > _FRUITLESS_RESTARTS:
        raise ResumeError(
            f"{run_dir.path}: {identity.fruitless} automatic restarts in a row ended before a "
            f"checkpoint newer than step {step}. The run stops here. Fix: look for its error above "
            "or in the log of the last attempt, or set a smaller checkpoint.every; then start it "
            "by hand"
        )


def open_run(run_dir: RunDir, config: Config, *, writes: bool, overrides: str = "") -> Start:
    """Look at the run's folder and make it ready to start or to resume.

    All ranks must call; one of them (`writes`) changes files. With a checkpoint, settings that may
    not change are compared, and metrics after the step of the checkpoint are dropped: those steps
    are repeated. Without one, the files of an unfinished run move to `aborted_001/`.

    Args:
        run_dir: the run's folder.
        config: settings of the run, for config.yaml.
        writes: whether this rank changes files.
        overrides: differences from the base, for overrides.yaml; "" writes no such file.

    Raises:
        ConfigError: a setting changed that may not, or another run writes to the folder.
        ResumeError: launchers restart the run again and again without progress.
    """
    lock = hold(run_dir.path) if writes else None
    if writes:
        register_start(run_dir)
    found = find_latest(run_dir.checkpoints)
    if found is not None:
        if run_dir.config.exists() and (
            problems := resume_problems(from_yaml(run_dir.config.read_text()), config)
        ):
            raise ConfigError(problems)
        said = [said_of(found)]
        if writes:
            said += truncate_metrics(run_dir, found.step + 1)
            _write_settings(run_dir, config, overrides)
        return Start(found=found, said=tuple(said), lock=lock)
    said = []
    if writes:
        left = [run_dir.path / name for name in _ASIDE if (run_dir.path / name).exists()]
        if run_dir.metrics.exists() and read_metrics(run_dir.metrics):
            number = 1 + len(list(run_dir.path.glob("aborted_*")))
            aside = run_dir.path / f"aborted_{number:03d}"
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
            said.append(
                f"{run_dir.path} has an unfinished run without a checkpoint: moved to {aside}, "
                "starting a new run"
            )
        _write_settings(run_dir, config, overrides)
    return Start(found=None, said=tuple(said), lock=lock)


def _write_settings(run_dir: RunDir, config: Config, overrides: str) -> None:
    write_text(run_dir.config, to_yaml(config))
    if overrides:
        write_text(run_dir.path / OVERRIDES, overrides)
