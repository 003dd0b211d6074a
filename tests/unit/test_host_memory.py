"""Host memory for copies from CUDA: touched and registered by threads, released with its tensor."""

import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from r3 import extras
from tests.errors import Patch
from tests.memory import bytes_in_memory

PART = 1 << 16
host_memory = extras.host_memory()


@dataclass
class Calls:
    """Notes what a registrar is asked for, in order, and by which thread.

    Attributes:
        meanwhile: runs in the middle of each registration.
    """

    meanwhile: Callable[[], object] = lambda: None
    began: list[str] = field(default_factory=list)
    registered: list[tuple[int, int]] = field(default_factory=list)
    resident: list[bool] = field(default_factory=list)
    by: list[str] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def registrar(self) -> Any:
        return host_memory.Registrar(
            begin=lambda: self.began.append(threading.current_thread().name),
            register=self.register,
            unregister=self.unregister,
        )

    def unregister(self, address: int) -> None:
        assert is_resident(address, 1), "the driver must let go of it before it is unmapped"
        self.released.append(address)

    def register(self, address: int, size: int) -> None:
        self.meanwhile()
        self.registered.append((address, size))
        self.resident.append(is_resident(address, size))
        self.by.append(threading.current_thread().name)


def is_resident(address: int, size: int) -> bool:
    """Whether the system has given all pages of this memory."""
    return bytes_in_memory(address, size) >= size


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host_memory, "_PART", PART)


def test_every_byte_is_touched_then_registered_once_and_then_released() -> None:
    calls = Calls()
    sizes = [5 * PART + 4, 12, 2 * PART]
    blocks = [one.result(60) for one in host_memory.page_locked(sizes, calls.registrar())]
    assert sorted(size for _, size in calls.registered) == sorted(sizes)
    ends = sorted((address, address + size) for address, size in calls.registered)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert all(calls.resident)
    # A thread that has registered is one that has begun, on this rank's GPU.
    assert set(calls.by) <= set(calls.began) and len(set(calls.began)) == len(calls.began)

    tensor = host_memory.tensor_on(blocks[0], torch.empty(3, 4, dtype=torch.bfloat16))
    view = tensor[1].fill_(2.0)
    of_tensor = tensor.data_ptr()
    del blocks, tensor
    assert sorted(calls.released) == sorted({at for at, _ in calls.registered} - {of_tensor})
    assert view.tolist() == [2.0] * 4
    del view
    assert sorted(calls.released) == sorted(at for at, _ in calls.registered)


def test_residency_is_seen() -> None:
    untouched = mmap.mmap(-1, 2 * PART, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pointer = ctypes.c_char.from_buffer(untouched)
    assert not is_resident(ctypes.addressof(pointer), 2 * PART)


def test_two_threads_register_at_a_time(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host_memory, "host_processors", lambda: 2.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # One thread alone would wait here for the other.
    calls = Calls(meanwhile=threading.Barrier(2, timeout=60).wait)
    for block in host_memory.page_locked([3 * PART] * 4, calls.registrar()):
        block.result(60)
    assert len(set(calls.by)) == 2


def test_ranks_of_a_machine_share_its_processors(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host_memory, "host_processors", lambda: 4.0)
    for ranks, threads in ((1, 4), (2, 2), (8, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        calls = Calls()
        for block in host_memory.page_locked([2 * PART] * 8, calls.registrar()):
            block.result(60)
        # A pool starts a thread where none is idle.
        assert len(calls.began) <= threads


def test_nothing_waits_for_memory_that_is_on_its_way() -> None:
    may_go_on = threading.Event()
    calls = Calls(meanwhile=lambda: may_go_on.wait(60))
    blocks = host_memory.page_locked([PART, PART], calls.registrar())
    assert not any(block.done() for block in blocks)
    may_go_on.set()
    assert [len(block.result(60)) for block in blocks] == [PART, PART]


def test_memory_that_the_driver_refuses_is_an_error_and_not_unregistered() -> None:
    def refuse() -> None:
        raise RuntimeError("out of memory")

    calls = Calls(meanwhile=refuse)
    (block,) = host_memory.page_locked([PART], calls.registrar())
    with pytest.raises(RuntimeError, match="out of memory"):
        block.result(60)
    del block
    assert calls.registered == calls.released == []


def test_a_system_without_huge_pages_gives_others(monkeypatch: Patch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 1 << 20)  # no system knows this advice
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, PART).madvise(mmap.MADV_HUGEPAGE)
    calls = Calls()
    (block,) = host_memory.page_locked([3 * PART], calls.registrar())
    assert len(block.result(60)) == 3 * PART and calls.resident == [True]
