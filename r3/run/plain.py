"""Look at the pickles of a checkpoint without running code that may be in them.

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
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

import torch

from r3.run.manifest import DamageError

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
_OTHER_REFERENCES = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}


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
        except (BadZipFile, OSError, RuntimeError, ValueError) as error:
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
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        raise DamageError(f"{path}: not a checkpoint's metadata ({error})") from None
    others = entries - {"TensorStorageMetadata"}
    outside = sorted(str(place) for place in places if place.name != str(place))
    if others or outside or has_planner_data:
        what = sorted(others) or outside or ["planner data"]
        raise DamageError(f"{path}: describes {', '.join(what)} beside tensors; it was not read")
    return metadata
