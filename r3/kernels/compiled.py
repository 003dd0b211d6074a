"""Compile CPU kernels with Numba, which vLLM installs. They work on the memory of tensors.

Numba compiles a loop at its first call, which takes a second or more, and keeps the machine code on
disk for the next process (`r3.kernels.cache`). NumPy has no bfloat16: its bits are uint16 in a
loop, which reads them by `wide` and writes them by `like`. Loops have no annotations: Numba finds
the types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numba import njit, types
from numba.core.caching import Cache, CompileResultCacheImpl
from numba.core.caching import _CacheLocator as CacheLocator
from numba.extending import overload

from r3.kernels.cache import folder


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loop as machine code, kept in the folder of `r3.kernels.cache` if there is one."""
    dispatcher = njit(nogil=True, error_model="numpy")(loop)
    if folder() is not None:
        dispatcher._cache = _Cache(loop)
    return dispatcher


inlined = njit(inline="always")
"""A part of loops that is compiled with each of them, and not on its own."""


class _Place(CacheLocator):
    """Where Numba keeps a loop's machine code. The folder's name says of what sources it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_cache_path(self) -> str:
        return str(folder())

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Place:
        return cls(py_func.__module__)


class _Files(CompileResultCacheImpl):
    _locator_classes: ClassVar = [_Place]


class _Cache(Cache):
    _impl_class = _Files


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
