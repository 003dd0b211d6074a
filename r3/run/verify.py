"""Verify a checkpoint before it is loaded, and fall back to the newest intact one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from r3.config import Config
from r3.models.hf_checkpoint import replace_folder
from r3.rollout.partial import FILE_PREFIX
from r3.run.folder import RunDir
from r3.run.manifest import DamageError, Manifest, faults, read_manifest
from r3.run.plain import require_plain
from r3.run.resume import Found, ResumeError, Start, drop_after, resume_note, step_folders
from r3.run.run_json import read_identity
from r3.runtime.mesh import Axis

_SHOWN = 3


def newest_whole(
    start: Start, run_dir: RunDir, config: Config, world: Axis, *, writes: bool
) -> Start:
    """The start from the newest checkpoint that is as it was written. All ranks must call.

    The ranks share the work of hashing. A damaged checkpoint is moved aside and metrics after the
    older one are dropped, to be made again.

    Args:
        writes: whether this process may change the run's folder; rank 0 alone does.

    Raises:
        ResumeError: on all ranks: no checkpoint is whole, or the newest is not and
            checkpoint.on_damage is "stop".
    """
    if start.found is None:
        return start
    notes: list[str] = []
    for step, folder in reversed(step_folders(run_dir.checkpoints)):
        damage = damage_of(folder, step, world, run_dir=None if config.eval.only else run_dir)
        if not damage:
            found = Found(folder=folder, step=step)
            if not notes:
                return start
            if writes and world.rank == 0:
                notes += drop_after(run_dir, step)
            where = resume_note(found)
            if config.eval.only:
                where = f"evaluating checkpoint {folder}, after step {step}; no training"
            return replace(start, found=found, notes=(*notes, where))
        text = _summary(folder, damage)
        if config.checkpoint.on_damage == "stop":
            raise ResumeError(
                f"{text}. checkpoint.on_damage is stop. Fix: restore the folder, remove it, or set "
                "checkpoint.on_damage to fall_back"
            )
        notes.append(f"{text}; falling back to an older checkpoint")
        if writes and world.rank == 0:
            replace_folder(folder, folder.with_name(f"damaged_{folder.name}"))
    raise ResumeError(
        "\n".join([*notes, "no checkpoint of the run is whole. Fix: give another --log.dir"])
    )


def require_whole(folder: Path, step: int, world: Axis) -> None:
    """Raise ResumeError on all ranks unless a checkpoint is as it was written. All must call."""
    if damage := damage_of(folder, step, world):
        raise ResumeError(_summary(folder, damage))


def damage_of(folder: Path, step: int, world: Axis, *, run_dir: RunDir | None = None) -> list[str]:
    """Return one line per fault of a checkpoint, the same on all ranks. All ranks must call.

    Args:
        run_dir: the run that must have written it; None if any run may.
    """
    mine: list[str] = []
    try:
        manifest = read_manifest(folder)
        if world.rank == 0:
            mine += _strangers(manifest, step, run_dir)
        names = sorted(manifest.files)[world.rank :: world.size]
        mine += faults(folder, manifest, names)
        if not mine:
            require_plain(folder, names)
    except DamageError as error:
        mine.append(str(error))
    everything = [fault for part in world.all_gather_object(mine) for fault in part]
    return list(dict.fromkeys(everything))  # every rank misses the same manifest


def _strangers(manifest: Manifest, step: int, run_dir: RunDir | None) -> list[str]:
    """Why this is not a checkpoint of that step of that run."""
    found = []
    if manifest.step != step:
        found.append(f"it is of step {manifest.step}, not {step}")
    identity = read_identity(run_dir.path) if run_dir else None
    if identity is None:
        return found
    if manifest.run_id != identity.run_id:
        found.append(f"it is of run {manifest.run_id}, not {identity.run_id}")
    elif any(name.startswith(FILE_PREFIX) for name in manifest.files):
        if not manifest.is_signed_with(identity.key_bytes):
            found.append(
                "it holds suspended conversations, whose environments are pickles, and is not "
                "signed with the key in run.json; R3 does not unpickle what others may have written"
            )
    return found


def _summary(folder: Path, damage: list[str]) -> str:
    more = f"; and {len(damage) - _SHOWN} more" if len(damage) > _SHOWN else ""
    return f"{folder} is damaged: {'; '.join(damage[:_SHOWN])}{more}"
