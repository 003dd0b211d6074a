"""Loops compiled by Numba, which vLLM installs, over the memory of tensors on CPU.

Numba compiles a loop at its first call, in less than a second, and keeps the machine code on disk
for the next process. NumPy has no bfloat16: its bits are uint16 in a loop, which reads them by
`wide` and writes them by `like`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loop as machine code, kept on disk if any folder for it can be written."""
    options = dict(nogil=True, error_model="numpy")
    # Machine code contains functions of other files too, but Numba compares only the loop's own
    # file with what is on disk. It finds that by this name.
    loop.__qualname__ += f"_{_version(loop.__globals__)}"
    try:
        return njit(cache=True, **options)(loop)
    except RuntimeError:  # neither beside this file nor in the user's cache folder
        return njit(**options)(loop)


def _version(names: Mapping[str, Any]) -> str:
    """Return a digest of this file and of the files of R3 that the names come from."""
    files = sorted(Path(sys.modules[name].__file__ or "") for name in _modules(names))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _modules(names: Mapping[str, Any]) -> set[str]:
    """Return this module and those of R3 that the names come from, directly or through others."""
    found, left = {__name__}, [names]
    while left:
        for value in list(left.pop().values()):
            is_module = isinstance(value, ModuleType)
            name = value.__name__ if is_module else getattr(value, "__module__", None) or ""
            if name.startswith("r3.") and name not in found:
                found.add(name)
                left.append(vars(sys.modules[name]))
    return found


# --- tensors as NumPy arrays; NumPy has no bfloat16, whose bits are uint16 here -----------------


_FORMS = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.bfloat16: "<u2",
    torch.int64: "<i8",
    torch.int32: "<i4",
}


class _Memory:
    """A tensor's memory, as NumPy asks for it.

    `Tensor.numpy` would forbid resizing that memory for ever, and Megatron resizes what it will
    recompute.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()}"
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": _FORMS[tensor.dtype],
        }


def array(tensor: torch.Tensor) -> np.ndarray:
    """View a tensor, which must outlive the array."""
    if not tensor.numel():  # has no address
        return np.empty(tensor.shape, _FORMS[tensor.dtype])
    return np.asarray(_Memory(tensor))


def wide(value: Any) -> Any:
    """Return the number as float32 or float64."""


def like(value: Any, stored: Any) -> Any:
    """Return the number in the form of `stored`, rounded to nearest even."""


@overload(wide, strict=False)
def _wide_compiled(value: Any) -> Any:
    if value != types.uint16:
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


@overload(like, strict=False)
def _like_compiled(value: Any, stored: Any) -> Any:
    if stored != types.uint16:
        return lambda value, stored: value

    def rounded(value: Any, stored: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        is_odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        half = np.uint32(np.uint32(0x7FFF) + is_odd)
        # Rounding would carry the bits of a NaN over into the sign.
        quiet = np.uint32(bits | np.uint32(0x400000))
        kept = np.uint32(bits + half) if value == value else quiet
        return np.uint16(np.uint32(kept) >> np.uint32(16))

    return rounded
