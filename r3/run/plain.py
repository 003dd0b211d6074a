"""Read the pickle in torch's checkpoint metadata without running code that may be in it.

torch's reader unpickles `.metadata` without limits, so a prepared checkpoint could run any program.
Here the file is unpickled first with the few classes that torch's writer uses. A pickle that passes
names nothing else, so torch's own reader is then safe. The other files need no such check: tensors
and `common.pt` are read with `weights_only`, and metadata that asks for pickled objects beside
tensors is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

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


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise DamageError(f"asks for {module}.{name}, which no checkpoint of R3 needs")


def require_plain_metadata(path: Path) -> None:
    """Raise DamageError unless a checkpoint's `.metadata` describes tensors and nothing else."""
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
