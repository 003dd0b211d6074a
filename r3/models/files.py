"""The weights in a checkpoint's folder: which files, which tensors, and whether they fit the model.

Reads headers alone, without torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from r3 import extras
from r3.models.hf_config import ShapeError
from r3.models.hub import INDEX, folder_of
from r3.models.shape import ModelShape
from r3.models.sizes import Quantised

# Data types in safetensors files that weights may have. Packed and integer types are quantised.
WEIGHT_TYPES = ("F64", "F32", "F16", "BF16")
_WHOLE = "model.safetensors"
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
_SHOWN_SHARDS = 3
_BLOCK = 1 << 22


class AbsentWeightsError(ShapeError):
    """Files with weights are not there, or not all of them."""


def checkpoint_tensors(
    folder: str | Path, *, only_weights: bool = True, quantised: Quantised | None = None
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a folder, from the headers of its `weight_files`.

    Args:
        only_weights: refuse tensors that are not floating-point numbers of 16 bits or more.
        quantised: what tensors may be beside that.

    Raises:
        ShapeError: as `weight_files`; or a file is truncated (or a git-lfs pointer), two files have
            the same tensor, or a tensor has a data type that cannot be loaded.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    file_of: dict[str, str] = {}
    type_of: dict[str, str] = {}
    formats = extras.quantised() if quantised else None
    for file in weight_files(folder):
        for name, entry in header_of(file)[0].items():
            if name in shapes:
                raise ShapeError(f"tensor {name} is in {file_of[name]} and in {file.name}")
            dtype = entry["dtype"]
            is_weight = dtype in WEIGHT_TYPES or (
                formats is not None and formats.may_have(quantised, name, dtype)
            )
            if only_weights and not is_weight:
                more = formats.stored_types(quantised) if formats else ()
                raise ShapeError(
                    f"tensor {name} in {file.name} has data type {dtype}; "
                    f"weights must have one of {', '.join((*WEIGHT_TYPES, *more))}"
                )
            shapes[name], file_of[name] = tuple(entry["shape"]), file.name
            type_of[name] = dtype
    if only_weights and formats:
        formats.refuse_unpaired(type_of)
    return shapes


def weight_files(folder: str | Path) -> list[Path]:
    """Return the files that hold a model's weights, as transformers and vLLM choose them.

    The index decides, where there is one. Without it, `model.safetensors` is the model; without
    that, every safetensors file is a part of it.

    Raises:
        ShapeError: there is no such file, a shard is missing, or readers would choose differently.
    """
    folder = Path(folder_of(folder))
    names = {file.name for file in folder.glob("*.safetensors")}
    index = folder / INDEX
    if index.is_file():
        try:
            wanted = set(json.loads(index.read_bytes())["weight_map"].values())
            absent = sorted(wanted - names)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ShapeError(f"{index.name} has no readable weight_map") from None
        _require_all(absent, len(wanted))
        if _WHOLE in names - wanted:
            raise ShapeError(
                f"{_WHOLE} is not in {index.name}: transformers reads the one, vLLM the other. "
                "Remove one of them"
            )
        return [folder / name for name in sorted(wanted)]
    if not names:
        raise AbsentWeightsError("there are no *.safetensors files")
    if _WHOLE in names:
        return [folder / _WHOLE]
    for name in names:
        if match := _SHARD.fullmatch(name):
            stem, count = match[1], int(match[2])
            shards = [f"{stem}-{i:05}-of-{match[2]}.safetensors" for i in range(1, count + 1)]
            _require_all([shard for shard in shards if shard not in names], count)
    return [folder / name for name in sorted(names)]


def _require_all(absent: Sequence[str], count: int) -> None:
    if absent:
        shown = ", ".join(absent[:_SHOWN_SHARDS])
        more = f" and {len(absent) - _SHOWN_SHARDS} more" if len(absent) > _SHOWN_SHARDS else ""
        raise AbsentWeightsError(f"{len(absent)} of {count} shards are missing: {shown}{more}")


def checkpoint_faults(folder: str | Path, shape: ModelShape) -> list[str]:
    """Compare a folder's tensors with the model's: one line per fault, empty if they match.

    Headers are read, and of the weights only an output head that should be the embedding. While
    files are missing, the names in an index are compared.

    Raises:
        ShapeError: as `checkpoint_tensors`.
    """
    try:
        tensors = checkpoint_tensors(folder, quantised=shape.quantised)
    except AbsentWeightsError:
        index = Path(folder_of(folder)) / INDEX
        names = json.loads(index.read_bytes())["weight_map"] if index.is_file() else ()
        if names and (faults := shape.faults(dict.fromkeys(map(text_name, names)))):
            return faults
        raise
    faults = shape.faults(tensors)
    if not faults and shape.tied and "lm_head.weight" in tensors and _has_own_head(folder):
        faults.append(
            "tie_word_embeddings is true and lm_head.weight differs from "
            "model.embed_tokens.weight; set it to false, or remove lm_head.weight from the files"
        )
    return faults


def _has_own_head(folder: str | Path) -> bool:
    """Whether `lm_head.weight` differs from the embedding. Reads up to the first difference."""
    import numpy as np

    matrices: list[tuple[str, np.memmap[Any, Any]]] = []
    for file in weight_files(folder):
        entries, start = header_of(file)
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            if entry := entries.get(name):
                first, end = entry["data_offsets"]
                data = np.memmap(file, mode="r", offset=start + first, shape=(end - first,))
                matrices.append((entry["dtype"], data))
    if len(matrices) < 2:
        return False
    (dtype, one), (other_dtype, other) = matrices
    return (dtype, len(one)) != (other_dtype, len(other)) or any(
        (one[at : at + _BLOCK] != other[at : at + _BLOCK]).any()
        for at in range(0, len(one), _BLOCK)
    )


def header_of(file: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors file, and the offset of its first tensor.

    An entry has data type, shape and place of a tensor. Names are those of a text model alone.

    Raises:
        ShapeError: it is no safetensors file, or not a whole one.
    """
    if not file.is_file():
        raise ShapeError(f"{file.name} is a folder, a device or a broken link, not a file")
    try:
        with safe_open(str(file), framework="np"), file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
    except OSError as error:
        raise ShapeError(f"{file.name} cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise ShapeError(
            f"{file.name} is not a whole safetensors file (an unfinished download, a git-lfs "
            f"pointer?): {error}"
        ) from None
    header.pop("__metadata__", None)
    return {text_name(name): entry for name, entry in header.items()}, 8 + size


def text_name(name: str) -> str:
    """Return a tensor's name in a text model alone, given that in one that has others beside it."""
    return re.sub(r"^(model\.)language_model\.|^language_model\.", r"\1", name)
