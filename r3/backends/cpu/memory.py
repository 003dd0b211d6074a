"""Memory of the host: freed memory stays for later tensors, unused pages go back to the system."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import torch

from r3.runtime.limits import host_gib

KEPT_SHARE = 1 / 4
"""Of the machine's memory: what its processes keep of the memory they free."""


def trim() -> None:
    """Return freed memory to the system if it is more than this rank's part of `KEPT_SHARE`.

    Taking a page from the system again takes 2 to 10 us, which was up to a fifth of a training
    step.
    """
    if sys.platform == "linux":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if _free_heap_bytes() >= KEPT_SHARE * host_gib() * 2**30 / ranks:
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for later tensors, until `trim`.

    By default it takes each large tensor from the system and returns it at once. The system fills
    every new page with zeros, which takes a tenth of the time of a training step on CPU.
    """
    if sys.platform == "linux":
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8  # of malloc.h
        libc = ctypes.CDLL("libc.so.6")
        # Larger ones still come from the system: a hole in the heap as large as one is costly.
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, -1)  # -1: never
        # One heap for all threads: those of other threads cannot keep more than 64 MiB.
        libc.mallopt(arena_max, 1)


def discard(storage: torch.UntypedStorage) -> bool:
    """Return the pages of host memory to the system; the memory reads as zeros afterwards.

    Its addresses stay valid. The system provides a page of zeros where one is touched again, so
    memory that is not used costs nothing.

    Returns:
        False if the memory stays: it has no whole page, is shared with other processes, mapped from
        a file or locked, or the system is not Linux. The contents are not needed either way.
    """
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    # Whole pages only: the C library and other tensors use the rest of the first and the last one.
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform != "linux" or last <= first or not _is_private(first, last):
        return False
    madvise = ctypes.CDLL("libc.so.6").madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(first, last - first, mmap.MADV_DONTNEED) != 0:
        return False
    all_bytes = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (end - begin,))
    all_bytes[: first - begin].zero_()
    all_bytes[last - begin :].zero_()
    return True


def _is_private(begin: int, end: int) -> bool:
    """Whether all addresses from `begin` to before `end` are private memory without a file.

    In shared memory and in files, discarded pages would come back with their old contents.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:  # sorted by address
            addresses, permissions, _offset, _device, inode, *_path = line.split()
            start, stop = (int(address, 16) for address in addresses.split("-"))
            if start <= begin < stop:
                if permissions[3] != "p" or inode != "0":
                    return False
                if end <= stop:
                    return True
                begin = stop
    return False


class _HeapState(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _free_heap_bytes() -> float:
    """Bytes that the C library keeps for later tensors, some of which may have been returned to the
    system already. Unlimited if the library does not say.
    """
    mallinfo2 = getattr(ctypes.CDLL("libc.so.6"), "mallinfo2", None)  # since glibc 2.33
    if mallinfo2 is None:
        return float("inf")
    mallinfo2.restype = _HeapState
    return float(mallinfo2().fordblks)
