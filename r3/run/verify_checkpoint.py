"""Verify a checkpoint before it is loaded, and fall back to the newest intact one.

Its pickles are looked at without running code that may be in them:
torch's reader unpickles `.metadata` without limits, so a prepared checkpoint could run any program.
Here the file is unpickled first with the few classes that torch's writer uses. A pickle that passes
names nothing else, so torch's own reader is then safe. Metadata that asks for pickled objects
beside tensors is refused.

Tensors and `common.pt` are read with `weights_only`, which runs nothing either. Their pickles are
looked at here all the same: a checkpoint that cannot be loaded is found before the policy is built,
and the run falls back to an older one.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

import torch

from r3.config import Config
from r3.models.hf_checkpoint import replace_folder
from r3.rollout.partial import FILE_PREFIX
from r3.run.folder import RunDir, step_folders
from r3.run.manifest import DamageError, Manifest, faults, read_manifest
from r3.run.resume import Found, ResumeError, Start, drop_after, resume_note
from r3.run.run_json import Identity
from r3.runtime.mesh import Axis

_SHOWN = 3
_ALLOWED = {
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
# What a pickled tensor refers to. `common.pt` of R3 refers to nothing.
_OF_TENSORS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    *(f"torch {kind}Storage" for kind in ("Float", "BFloat16", "Half", "Double", "Long", "Int")),
    *(f"torch {kind}Storage" for kind in ("Short", "Char", "Byte", "Bool")),
}
# What unpickling bytes that are no pickle raises; sizes among them may be of any number.
_UNREADABLE = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError),
    *(LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError),
)
_OTHER_REFERENCES = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}


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
        damage = damage_of(folder, step, world, identity=start.identity)
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


def damage_of(
    folder: Path, step: int, world: Axis, *, identity: Identity | None = None
) -> list[str]:
    """Return one line per fault of a checkpoint, the same on all ranks. All ranks must call.

    No pickle is looked at before all ranks know that every file is as it was written.

    Args:
        identity: of the run that must have written it, on rank 0; None if any run may.
    """
    names: list[str] = []

    def files() -> list[str]:
        manifest = read_manifest(folder)
        names.extend(sorted(manifest.files)[world.rank :: world.size])
        strange = [] if world.rank else _strangers(manifest, step, identity)
        return strange + faults(folder, manifest, names)

    def pickles() -> list[str]:
        require_plain(folder, names)
        return []

    for look in (files, pickles):
        try:
            mine = look()
        except DamageError as error:
            mine = [str(error)]
        if found := [fault for part in world.all_gather_object(mine) for fault in part]:
            return list(dict.fromkeys(found))  # every rank misses the same manifest
    return []


def _strangers(manifest: Manifest, step: int, identity: Identity | None) -> list[str]:
    """Why this is not a checkpoint of that step of that run."""
    found = []
    if manifest.step != step:
        found.append(f"it is of step {manifest.step}, not {step}")
    if identity is None:
        return found
    # A checkpoint without an id was written after run.json had been removed in mid-run.
    if manifest.run_id and manifest.run_id != identity.run_id:
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


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise DamageError(f"asks for {module}.{name}, which no checkpoint of R3 needs")


def require_plain(folder: Path, names: Collection[str]) -> None:
    """Raise DamageError unless these files of a checkpoint hold tensors and nothing else.

    Files that are not torch's are passed over.
    """
    places = require_plain_metadata(folder / ".metadata").storage_data.values()
    parts = [(each.relative_path, each.offset, each.length) for each in places]
    if "common.pt" in names:
        parts.append(("common.pt", 0, (folder / "common.pt").stat().st_size))
    for name, offset, length in parts:
        if name not in names:
            continue
        try:
            with (folder / name).open("rb") as file, ZipFile(_Slice(file, offset, length)) as saved:
                (pickled,) = [each for each in saved.namelist() if each.endswith("/data.pkl")]
                named = _names(saved.read(pickled))
        except (BadZipFile, zlib.error, *_UNREADABLE) as error:
            raise DamageError(f"{name} is not as torch writes it ({error})") from None
        if strangers := sorted(named - _OF_TENSORS):
            raise DamageError(
                f"{name} asks for {strangers[0]}, which no tensor needs; it was not read"
            )


def _names(content: bytes) -> set[str]:
    """What a pickle of torch's writers refers to, as "module name"; nothing of it is run."""
    found = set()
    for operation, argument, _ in pickletools.genops(content):
        if operation.name == "GLOBAL":
            found.add(str(argument))
        elif operation.name in _OTHER_REFERENCES:
            found.add(operation.name)
    return found


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if begin + to < 0:
            raise ValueError("before the beginning of the file")
        self._at = begin + to
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        content = self._file.read(rest if size < 0 else min(size, rest))
        self._at += len(content)
        return content


def require_plain_metadata(path: Path) -> Any:
    """Return a checkpoint's `.metadata`.

    Raises:
        DamageError: it describes anything but tensors.
    """
    try:
        metadata = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        entries = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
        places = {Path(place.relative_path) for place in metadata.storage_data.values()}
        has_planner_data = metadata.planner_data is not None
    except DamageError as error:
        raise DamageError(f"{path}: {error}; it was not read") from None
    except _UNREADABLE as error:
        raise DamageError(f"{path}: not a checkpoint's metadata ({error})") from None
    others = entries - {"TensorStorageMetadata"}
    outside = sorted(str(place) for place in places if place.name != str(place))
    if others or outside or has_planner_data:
        what = sorted(others) or outside or ["planner data"]
        raise DamageError(f"{path}: describes {', '.join(what)} beside tensors; it was not read")
    return metadata
