"""Open the folder of a run: lock, newest whole checkpoint, settings, digests, in this order.

`open_run` does so before anything heavy is imported. The contents of the checkpoint are verified
when the ranks have joined, which share the work of hashing: `newest_whole`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from r3 import extras
from r3.cli.base_config import OVERRIDES
from r3.config import ANOTHER_FOLDER, Config, require_same_settings, to_yaml, with_values
from r3.errors import Fault
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
from r3.run.manifest import Digests, RunState, damage_of, run_id_of, summary

if TYPE_CHECKING:
    from r3.runtime.mesh import Axis

_FRUITLESS_RESTARTS = 1
_FAILURES_OF_A_STEP = 1  # the same failure twice is no accident
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_ASIDE = ("metrics.jsonl", "tensorboard", "rollouts", "eval", "config.yaml", OVERRIDES, "hf")


class ResumeError(Fault):
    """A checkpoint that cannot be resumed from. R3 does not start a new run in its place."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A folder that is ready for a run.

    Attributes:
        checkpoint: that the run continues from, if any.
        step: steps that it has behind it.
        notes: for the console.
        lock: of the process that writes, until the run ends.
        state: of the run, in that process. Read once: the file may vanish.
    """

    checkpoint: Path | None = None
    step: int = 0
    notes: tuple[str, ...] = ()
    lock: RunLock | None = None
    state: RunState | None = None


def open_run(
    run_dir: RunDir,
    config: Config,
    *,
    writes: bool,
    overrides: str = "",
    digests: Callable[[], Digests] | None = None,
) -> Opened:
    """Look at the run's folder and make it ready to start or to resume.

    All ranks must call; one of them (`writes`) changes files. With a checkpoint, settings that may
    not change are compared, and metrics after the step of the checkpoint are dropped: those steps
    are repeated. Without one, the files of an unfinished run move to `aborted_001/`.

    Args:
        run_dir: the run's folder.
        config: settings of the run, for config.yaml.
        writes: whether this rank changes files.
        overrides: differences from the base, for overrides.yaml; "" writes no such file.
        digests: returns what shapes the run beside its settings; None compares nothing.

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
            opened = _open(run_dir, config, digests, writes=writes, overrides=overrides)
        except OSError as error:  # a full disk
            raise unusable(run_dir.path, error) from None
        on_failure.pop_all()
    return replace(opened, lock=lock)


def _open(
    run_dir: RunDir,
    config: Config,
    digests: Callable[[], Digests] | None,
    *,
    writes: bool,
    overrides: str,
) -> Opened:
    rows = _rows(run_dir)
    saved = step_folders(run_dir.checkpoints)
    step, checkpoint = saved[-1] if saved else (0, None)
    state, notes = None, list[str]()
    if writes:
        _clear(run_dir)
        reached = int(rows[-1]["step"]) if rows else 0
        state, notes = _register(run_dir, [folder for _, folder in saved], step, reached)
    current = None
    if checkpoint is not None:
        require_same_settings(run_dir.path, config, step)
        notes.insert(0, resume_note(checkpoint, step))
        if digests is not None:
            current = digests()
            compare = extras.digests().require_same_digests
            notes += compare(run_dir, current, config, refuse=config.trains)
    if writes:
        notes += drop_after(run_dir, step) if checkpoint else _set_aside(run_dir, rows)
        once = with_values(config, {"checkpoint.allow_changed": ()})  # it holds for one start
        write_text(run_dir.config, to_yaml(once))
        if overrides:
            write_text(run_dir.path / OVERRIDES, overrides)
        if state is not None and digests is not None:
            state = replace(state, digests=current or digests())
            state.write(run_dir.path)
            (run_dir.path / "sources.json").unlink(missing_ok=True)  # where digests were before
    return Opened(checkpoint=checkpoint, step=step, notes=tuple(notes), state=state)


def newest_whole(
    opened: Opened, run_dir: RunDir, config: Config, world: Axis, *, writes: bool
) -> Opened:
    """The same, from the newest checkpoint that is as it was written. All ranks must call.

    Damaged checkpoints are moved aside and metrics after the older one are dropped, to be made
    again.

    Args:
        writes: whether this process may change the run's folder; rank 0 alone does.

    Raises:
        ResumeError: on all ranks: no checkpoint is whole, or the newest is not and
            checkpoint.on_damage is "stop".
    """
    if opened.checkpoint is None:
        return opened
    notes, damaged = list[str](), list[Path]()
    for step, folder in reversed(step_folders(run_dir.checkpoints)):
        damage = damage_of(folder, step, world, state=opened.state)
        if not damage and not damaged:
            return opened
        if not damage:
            if writes and world.rank == 0:
                for other in damaged:
                    replace_folder(other, other.with_name(f"damaged_{other.name}"))
                notes += drop_after(run_dir, step)
            notes.append(resume_note(folder, step))
            if not config.trains:
                notes[-1] = f"evaluating checkpoint {folder}, after step {step}; no training"
            return replace(opened, checkpoint=folder, step=step, notes=(*opened.notes[1:], *notes))
        text = summary(folder, damage)
        if config.checkpoint.on_damage == "stop":
            raise ResumeError(
                f"{text}. checkpoint.on_damage is stop. Fix: restore the folder, remove it, or set "
                "checkpoint.on_damage to fall_back"
            )
        notes.append(f"{text}; falling back to an older checkpoint")
        damaged.append(folder)  # renamed if an older one is whole, else a restart begins at 0
    notes.append(f"no checkpoint of the run is whole. Fix: restore one, or give {ANOTHER_FOLDER}")
    raise ResumeError("\n".join(notes))


def require_whole(checkpoint: Path, step: int, world: Axis) -> None:
    """Raise ResumeError on all ranks unless a checkpoint is as it was written. All must call."""
    if damage := damage_of(checkpoint, step, world):
        raise ResumeError(summary(checkpoint, damage))


def resume_note(checkpoint: Path, step: int) -> str:
    """The line about where a run resumes."""
    return f"resuming from {checkpoint} after step {step}"


def _register(
    run_dir: RunDir, checkpoints: Sequence[Path], step: int, reached: int
) -> tuple[RunState, list[str]]:
    """Note this start in the state of the run, which the first start makes.

    Returns:
        The state, and a note if the folder is a copy of the run's or lost its key.

    Raises:
        ResumeError: launchers have restarted the run after the same step failed twice, or again
            and again without a new checkpoint.
    """
    before = RunState.read(run_dir.path)
    notes = []
    if before is None:
        # Checkpoints that are here keep the id of their run.
        before = RunState.new(next(filter(None, map(run_id_of, reversed(checkpoints))), ""))
        if checkpoints:
            text = "run.json is missing: checkpoints with suspended conversations do not resume"
            notes.append(f"{text} without the key in it; others do")
    automatic = any(os.environ.get(name, "0") not in ("", "0") for name in _RESTARTS)
    state = before.placed(run_dir.path).started(step, reached=reached, automatic=automatic)
    state.write(run_dir.path)
    if state.failures > _FAILURES_OF_A_STEP:
        times = "twice" if state.failures == 2 else f"{state.failures} times"
        raise ResumeError(
            f"{run_dir.path}: step {state.failed_step} failed {times} in a row. The run stops "
            "here. Fix: correct the cause of its last error, then start the run by hand. The "
            f"error:\n{_last_error(run_dir)}"
        )
    if state.fruitless > _FRUITLESS_RESTARTS:
        raise ResumeError(
            f"{run_dir.path}: {state.fruitless} automatic restarts in a row ended before a "
            f"checkpoint newer than step {step}. The run stops here. Fix: look for its error above "
            "or in the log of the last attempt, or set a smaller checkpoint.every; then start it "
            "by hand"
        )
    if before.place and state.tracker != before.tracker:
        place = f"{run_dir.path} is a copy of {before.place[1]}"
        notes.append(f"{place}: an experiment tracker gets its rows as another run")
    return state, notes


def _rows(run_dir: RunDir) -> list[dict[str, float]]:
    """The rows of the run so far, without an incomplete last line."""
    fix = "Fix: correct that row or remove it; it holds metrics and nothing else"
    try:
        return read_metrics(run_dir.metrics, notes=[])  # `truncate_metrics` returns them
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ResumeError(f"{error}. {fix}") from None


def _last_error(run_dir: RunDir) -> str:
    try:
        return run_dir.first_failure.read_text(errors="replace").strip()
    except OSError:
        return "none was written: a process was killed, or hung"


def _clear(run_dir: RunDir) -> None:
    """Remove what a kill in the middle of a write has left; the folder has no other writer."""
    for folder in (".", "errors", "heartbeats", "rollouts", "eval"):
        for file in (run_dir.path / folder).glob(".*.tmp"):
            if ".scores." not in file.name:  # `r3.rescore` writes them beside a run
                file.unlink(missing_ok=True)
    for pattern in (".step_*.partial", ".*.old"):
        for left in run_dir.checkpoints.glob(pattern):
            shutil.rmtree(left)


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


def _set_aside(run_dir: RunDir, rows: Sequence[object]) -> list[str]:
    """Move the files of a run that has no checkpoint into a folder of their own; return a note."""
    exports = run_dir.exports
    left = [run_dir.path / name for name in _ASIDE if (run_dir.path / name).exists()]
    if exports in left and not any(exports.iterdir()):  # it may be a disk of its own
        left.remove(exports)
    if not (rows or exports in left):
        return []
    aside = run_dir.path / f"aborted_{1 + len(list(run_dir.path.glob('aborted_*'))):03d}"
    aside.mkdir()
    for path in left:
        path.rename(aside / path.name)
    return [
        f"{run_dir.path} has an unfinished run without a checkpoint: moved to {aside}, "
        "starting a new run"
    ]
