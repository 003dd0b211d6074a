"""Page-locked (pinned) host memory for copies from and to CUDA, allocated by several threads.

Copies to other memory block, and are several times slower. The driver registers memory page by
page, and takes pages from the system by one thread, at 2.4 GiB/s on the machine of
`benchmarks/gpu.md`. Here threads take the pages before, in huge pages where the system has them.
torch's own pinned memory is rounded up to a power of two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from r3.runtime.limits import host_processors

_PART = 1 << 28
"""Bytes that a thread touches at a time."""

_MOST_THREADS = 8
"""More did not help others: the rest of the time is the driver's, which registers one by one."""


@dataclass(frozen=True, kw_only=True)
class Registrar:
    """How memory becomes page-locked.

    Attributes:
        begin: called once by each thread.
        register: called with address and bytes.
        unregister: called with the address.
    """

    begin: Callable[[], None]
    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


class Pages(mmap.mmap):
    """Anonymous memory, unregistered before it is unmapped: with the last tensor that uses it."""

    release: Callable[[], None] | None = None  # None: it is not registered

    def __del__(self) -> None:
        if self.release is not None:
            self.release()


def page_locked(sizes: Sequence[int], registrar: Registrar) -> list[Future[Pages]]:
    """Start to make blocks of memory, in this order, and return at once.

    Args:
        sizes: bytes of each block.
        registrar: makes them page-locked. An error of it is raised by the block's result.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(_MOST_THREADS, int(host_processors()) // ranks))
    pool = ThreadPoolExecutor(threads, "r3-host-memory", registrar.begin)
    blocks = []
    for size in sizes:
        pages = Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        touched = [pool.submit(_touch, pages, start) for start in range(0, size, _PART)]
        blocks.append(pool.submit(_register, pages, touched, registrar))
    pool.shutdown(wait=False)
    return blocks


def tensor_on(pages: Pages, like: torch.Tensor) -> torch.Tensor:
    """A tensor of this dtype and shape in the memory."""
    flat = torch.frombuffer(pages, dtype=like.dtype, count=like.numel())
    return flat.view(like.shape)


def _touch(pages: Pages, start: int) -> None:
    """Take the pages of a part from the system. numpy lets other threads run meanwhile."""
    size = min(_PART, len(pages) - start)
    np.frombuffer(pages, np.uint8, size, start)[:: mmap.PAGESIZE] = 0


def _register(pages: Pages, touched: list[Future[None]], registrar: Registrar) -> Pages:
    for part in touched:  # other threads have them, or this one had them before
        part.result()
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    registrar.register(address, len(pages))
    pages.release = lambda: registrar.unregister(address)
    return pages
