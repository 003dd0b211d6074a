"""Hugging Face checkpoint folders: read slice by slice, written completely or not at all."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from r3 import extras
from r3.models.families import implied_keys, text_model
from r3.models.files import WEIGHT_TYPES, text_name, weight_files
from r3.models.hub import SMALL_FILES, folder_of
from r3.models.shape import ModelShape, ShapeError

# Every key that counts multi-token-prediction layers in some family (r3/models/families.py).
_MTP_KEYS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
)
# Faults of a checkpoint that an error lists; the others are counted.
_SHOWN_FAULTS = 12


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a slice of a tensor lies in the files.

    Attributes:
        stored: the tensor there; it may join several.
        begin: number of the first row in it, those of all experts counted.
        size: of the tensor that is read, not of its slice.
        rows: those that are read.
        others: what is read of the other dimensions.
    """

    stored: str
    begin: int
    size: tuple[int, ...]
    rows: slice
    others: tuple[slice, ...]


class CheckpointReader:
    """Reads tensors by name from a folder of safetensors files, and copies only what is asked for.

    Attributes:
        shapes: shape of every tensor, from the files' headers.
        bytes_read: bytes read so far.
        largest_read: bytes of the largest single read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder_of(folder))
        try:
            files = weight_files(self.folder)
        except ShapeError as error:
            fix = "Set model.path to the folder of a Hugging Face checkpoint"
            raise ShapeError(f"{self.folder}: {error}. {fix}") from None
        self._slice_of: dict[str, Callable[[], Any]] = {}
        self._place_of: dict[str, tuple[str, int]] = {}
        self._joins: set[str] = set()  # tensors of the files that join several
        self._alternates = False
        self._group = 0  # of `Quantised`
        self._is_plain = True  # no tensor is quantised
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.bytes_read = self.largest_read = 0
        self._open = [safe_open(str(file), framework="pt") for file in files]
        for file, handle in zip(files, self._open, strict=True):
            for stored in handle.keys():  # noqa: SIM118 (a safetensors handle is no dict)
                name = text_name(stored)
                if name in self._slice_of:
                    raise ShapeError(
                        f"{file}: tensor {name} is in another file of the folder as well"
                    )
                self._slice_of[name] = functools.partial(handle.get_slice, stored)
                tensor = self._slice_of[name]()
                self.shapes[name] = tuple(tensor.get_shape())
                is_plain = tensor.get_dtype() in WEIGHT_TYPES and not name.endswith("_scale_inv")
                self._is_plain &= is_plain

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._slice_of.clear()
        self._open.clear()

    def require(self, shape: ModelShape) -> None:
        """Check that the folder has exactly the tensors of the model, with their shapes.

        From then on, tensors that are joined in the files can be read by their own names.

        Raises:
            ShapeError: it does not; the message names the tensors.
        """
        if faults := shape.faults(self.shapes):
            shown = [*faults[:_SHOWN_FAULTS]]
            if len(faults) > _SHOWN_FAULTS:
                shown.append(f"... and {len(faults) - _SHOWN_FAULTS} more")
            raise ShapeError(
                "\n".join(
                    [
                        f"{self.folder}: the tensors are not those of config.json; none was loaded",
                        *(f"  - {fault}" for fault in shown),
                    ]
                )
            )

        for stored, (_, parts) in shape.as_stored(self.shapes).stored.items():
            self._alternates = shape.moe_names.alternates
            self._joins.add(stored)
            row = 0
            for part in parts:
                self._place_of[part] = stored, row
                row += shape.tensor_shapes[part][0]
            self.shapes |= {part: shape.tensor_shapes[part] for part in parts}
        if shape.quantised:
            self._group = shape.quantised.group
        for name, size in shape.tensor_shapes.items():
            self.shapes.setdefault(name, size)

    def read(self, name: str, dim: int = 0, index: int = 0, count: int = 1) -> torch.Tensor:
        """Read slice `index` of `count` along the first (0) or the last (-1) dimension to the host.

        Quantised values come as bfloat16.

        Only the slice is copied from the file. The last slice may be shorter than the others.
        """
        size = self.shapes[name][dim]
        length = -(-size // count)
        part = slice(min(index * length, size), min((index + 1) * length, size))
        where = [slice(0, whole) for whole in self.shapes[name]]
        where[dim] = part
        stored, begin = self._place_of.get(name, (name, 0))
        rows, *others = where
        place = Place(
            stored=stored, begin=begin, size=self.shapes[name], rows=rows, others=tuple(others)
        )
        if self._is_plain:
            return self.plain(place)[0]
        return extras.dequantised(self, place, self._group)

    def part(self, stored: str) -> Any:
        """Return safetensors' slice of a tensor of the files; None if there is none."""
        return self._slice_of[stored]() if stored in self._slice_of else None

    def plain(self, place: Place) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """Return the values in the files, and their place in the stored tensor."""
        source, rows = self.part(place.stored), place.rows
        sizes = source.get_shape()
        if self._alternates and place.stored in self._joins:
            count = sizes[-1] // place.size[0]
            expert, number = divmod(place.begin // place.size[0], count)
            at = (expert, *place.others, slice(count * rows.start, count * rows.stop))
            return self.counted(source[at][..., number::count].t().contiguous()), at
        *experts, joined = sizes[: len(sizes) - len(place.others)]
        expert, first = divmod(place.begin, joined)
        at = (slice(first + rows.start, first + rows.stop), *place.others)
        at = (expert, *at) if experts else at
        return self.counted(source[at]), at

    def counted(self, piece: torch.Tensor) -> torch.Tensor:
        """Count the bytes of what was read."""
        self.bytes_read += piece.nbytes
        self.largest_read = max(self.largest_read, piece.nbytes)
        return piece


def read_small_files(folder: str | Path) -> dict[str, bytes]:
    """Return what a loader needs besides the weights: config, tokenizer, chat templates, code.

    Names are relative to the folder.
    """
    folder = Path(folder_of(folder))
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted({path for pattern in SMALL_FILES for path in folder.glob(pattern)})
        if path.is_file()
    }


def with_end_tokens(small_files: Mapping[str, bytes], ends: Sequence[int]) -> dict[str, bytes]:
    """Return the small files of a model whose turns end with any of these tokens.

    The chat template of a base model may end turns with a token that its files do not name, and
    those who load an export stop where generation_config.json says so.
    """
    generation = json.loads(small_files.get("generation_config.json", b"{}"))
    config = text_model(json.loads(small_files["config.json"]))
    named = generation.get("eos_token_id", config.get("eos_token_id"))
    named = named if isinstance(named, list) else [] if named is None else [named]
    if not (missing := [token for token in ends if token not in named]):
        return dict(small_files)
    generation["eos_token_id"] = [*named, *missing]
    return {**small_files, "generation_config.json": json.dumps(generation, indent=2).encode()}


def _for_export(small_files: Mapping[str, bytes], dtype: torch.dtype) -> dict[str, bytes]:
    """The small files as they belong to the trained weights."""
    files = dict(small_files)
    for name in ("config.json", "tokenizer_config.json"):
        if name not in files:
            continue
        values = dict(text_model(json.loads(files[name])))
        if not _has_code(values.get("auto_map"), files):
            values.pop("auto_map", None)
        if name == "config.json":
            values["dtype"] = str(dtype).removeprefix("torch.")
            values.pop("torch_dtype", None)
            values.pop("quantization_config", None)
            values |= implied_keys(next(iter(values.get("architectures") or ()), ""))
            for key in _MTP_KEYS:
                if values.get(key):  # Multi-token-prediction layers are not exported.
                    values[key] = 0
        elif values == json.loads(files[name]):
            continue  # byte for byte as it was
        files[name] = json.dumps(values, indent=2).encode()
    return files


def _has_code(auto_map: Any, files: Collection[str]) -> bool:
    """Whether every class that `auto_map` names is in a file that is there, or in a repository."""
    classes = auto_map.values() if isinstance(auto_map, dict) else ()
    names = [name for each in classes for name in (each if isinstance(each, list) else [each])]
    return all(
        "--" in name or f"{name.partition('.')[0]}.py" in files
        for name in names
        if name is not None
    )


def joined(
    weights: Iterable[tuple[str, torch.Tensor]], shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors as checkpoints of this family have them, see `ModelShape.stored`.

    The parts of a joined tensor are kept until it is complete: those of one layer, in the order of
    a weight stream.
    """
    stored_of = {part: name for name, (_, parts) in shape.stored.items() for part in parts}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        if name not in stored_of:
            yield name, tensor
            continue
        stored = stored_of[name]
        size, parts = shape.stored[stored]
        present = waiting.setdefault(stored, {})
        present[name] = tensor
        if len(present) == len(parts):
            tensors = [present[part] for part in parts]
            if shape.moe_names.alternates:
                per_expert = len(parts) // shape.num_experts
                pairs = [
                    torch.stack([part.t() for part in tensors[i : i + per_expert]], -1)
                    for i in range(0, len(parts), per_expert)
                ]
                yield stored, torch.stack(pairs).view(size)
            else:
                yield stored, torch.cat(tensors).view(size)
            del waiting[stored]
    assert not waiting, f"parts of {sorted(waiting)} are missing"


def kept(shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the starting model that belong into exports as they are."""
    if not shape.index_topk:
        return
    with CheckpointReader(shape.source) as reader:
        for name in reader.shapes:
            if (
                shape.is_kept(name)
                and not shape.is_ignored(name)
                and not name.endswith("_scale_inv")
            ):
                yield name, reader.read(name)


def write_checkpoint(
    folder: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    small_files: Mapping[str, bytes],
    dtype: torch.dtype,
    metadata: Mapping[str, Any],
    bytes_per_file: int = 4 << 30,
) -> None:
    """Write full tensors as a Hugging Face checkpoint folder, completely or not at all.

    Args:
        folder: replaced if it exists.
        weights: names and full tensors. Tensors keep their types.
        small_files: of the starting model, from `read_small_files`.
        dtype: type for config.json, that of nearly all tensors (expert biases are float32).
        metadata: written to `r3.json`: where the weights come from.
        bytes_per_file: largest file, and the host memory that is needed.
    """
    file_of: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    total = pending_bytes = files = 0

    with whole_folder(folder) as partial:

        def flush() -> None:
            nonlocal pending, pending_bytes, files
            if pending:
                files += 1
                name = f"model-{files:05d}.safetensors"
                save(pending, partial / name)
                file_of.update(dict.fromkeys(pending, name))
                pending, pending_bytes = {}, 0

        for name, tensor in weights:
            host = tensor.detach().to(device="cpu", copy=True).contiguous()
            if pending_bytes + host.nbytes > bytes_per_file:
                flush()
            pending[name] = host
            pending_bytes += host.nbytes
            total += host.nbytes
        flush()
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for name, content in _for_export(small_files, dtype).items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        (partial / "r3.json").write_text(json.dumps(dict(metadata), indent=2))


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` after the block, if all went well."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    replace_folder(partial, folder)


def save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file with the mode that the umask says; the library's own is 0600."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, str(file), metadata={"format": "pt"})
    file.chmod(mode)


def replace_folder(partial: Path, final: Path) -> None:
    """Move a finished folder to its final name in one rename, in place of an older folder."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(partial, final)
    shutil.rmtree(old, ignore_errors=True)
