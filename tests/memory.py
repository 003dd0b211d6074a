"""Counts what some work allocates, and which memory is really there."""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from r3.runtime.device import Device

CPU = Device(
    torch=torch.device("cpu"), is_cuda=False, rank=0, local_rank=0, world_size=1, host="here"
)
"""A run's only rank."""


def peak_bytes(work: Callable[[], Any]) -> int:
    """Most bytes that `work` had allocated at one time, beyond what was there before: torch's own
    record of allocations.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    assert profile.profiler is not None
    events: Sequence[Any] = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))


def resident_bytes(storage: torch.UntypedStorage) -> int:
    """Bytes of the pages of a storage that are in memory."""
    return bytes_in_memory(storage.data_ptr(), storage.nbytes())


def bytes_in_memory(address: int, size: int) -> int:
    """Bytes of the pages of some memory that are there."""
    first, last = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first)), dtype=np.uint64)
    assert len(entries) == last - first
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE  # bit 63: present


def lock_page(storage: torch.UntypedStorage) -> None:
    """Lock a page in the middle of a storage, which the system then keeps in memory."""
    middle = storage.data_ptr() + storage.nbytes() // 2
    assert ctypes.CDLL("libc.so.6").mlock(ctypes.c_void_p(middle), ctypes.c_size_t(1)) == 0
