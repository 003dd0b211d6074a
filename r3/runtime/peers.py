"""Ranks of one machine that read each other's memory instead of sending messages, on CPU.

gloo wakes a thread in each rank and sends everything through sockets. A barrier takes 0.15 ms, and
sometimes a few milliseconds more on a virtual machine whose host takes idle processors away. Here a
rank counts its arrivals in memory that the other ranks see, and does not sleep in the first 10 ms
of waiting. Ranks copy data directly from the memory of the rank that has it.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from r3.runtime.limits import host_processors
from r3.runtime.process import let_siblings_read, read_memory

_SPIN_S = 0.01
"""How long a rank waits without sleeping, if there are enough processors."""
_NAP_S = 0.0002
_LOOK_S = 0.1
"""How often a rank that sleeps looks whether the others still exist."""
_GONE = -1  # instead of a number of arrivals
_WORDS = 3  # of each rank: its arrivals, and two numbers that it tells the others


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Ranks of a process group that read each other's memory.

    Attributes:
        rank: this rank in the group.
        pids: process of each rank of the group.
        barrier: waits for all ranks of the group, and returns a number of each.
    """

    rank: int
    pids: tuple[int, ...]
    barrier: Callable[[int], list[int]]

    @classmethod
    def of(cls, group: dist.ProcessGroup, host: str) -> Peers | None:
        """Try whether every rank can read every other one. All ranks of the group must call.

        Args:
            group: the ranks, with gloo. Its time limit is that of every barrier.
            host: identifies this rank's machine.

        Returns:
            None on all ranks, if it fails on any: ranks are on several machines, or the system
            forbids it.
        """
        let_siblings_read()
        secret = torch.tensor([secrets.randbits(62)])
        own = (host, os.getpid(), secret.data_ptr(), secret.item())
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, own, group=group)
        readable = torch.tensor([int(all(_can_read(own, other) for other in found))])
        # Also keeps every secret where it is until all have read it.
        dist.all_reduce(readable, op=dist.ReduceOp.MIN, group=group)
        if not readable.item():
            return None
        pids = tuple(pid for _, pid, *_ in found)
        shared = SharedBarrier.of(group, pids)
        barrier = shared.wait if shared else partial(_wait_by_gloo, group)
        return cls(rank=group.rank(), pids=pids, barrier=barrier)

    @contextmanager
    def window(self, numbers: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Inside, the memory that ranks tell each other addresses of may be read.

        All ranks of the group must enter. It begins when all ranks have entered, and ends when all
        are done with reading: a rank that is missing raises an error after the group's time limit,
        as in every collective.

        Args:
            numbers: what this rank tells the others, such as addresses: int64, on all ranks of the
                same shape.

        Yields:
            The numbers of each rank.
        """
        found = []
        for rank, address in enumerate(self.barrier(numbers.data_ptr())):
            theirs = torch.empty_like(numbers)
            self.read(rank, address, theirs)
            found.append(theirs)
        yield found
        self.barrier(0)

    def read(self, rank: int, address: int, into: torch.Tensor) -> None:
        """Fill a contiguous tensor from the memory of a rank of the group.

        Raises:
            OSError: the rank's process has ended.
        """
        read_memory(self.pids[rank], address, into.data_ptr(), into.nbytes)

    def all_to_all_bytes(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """Give `outgoing[r]` to rank r; returns one message per rank. All ranks must call."""
        views = [np.frombuffer(message, np.uint8) for message in outgoing]
        own = torch.tensor([[view.ctypes.data, view.nbytes] for view in views])
        received = []
        with self.window(own) as places:
            for rank, places_R2 in enumerate(places):
                address, size = places_R2[self.rank].tolist()
                message = torch.empty(size, dtype=torch.uint8)
                self.read(rank, address, message)
                received.append(message.numpy().tobytes())
        return received

    def all_to_all_rows(
        self, tensors: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int]
    ) -> list[torch.Tensor]:
        """Give each rank some rows of tensors, which are ordered by rank. All ranks must call.

        Args:
            tensors: contiguous, with `sum(sent)` rows each; on all ranks of the same types and
                shapes, but for the rows.
            sent, received: number of rows to and from each rank.

        Returns:
            The rows that this rank got of each tensor, ordered by rank.
        """
        starts = [sum(sent[:rank]) for rank in range(len(sent))]
        widths = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
        own = torch.tensor(
            [
                [tensor.data_ptr() + start * width for start in starts]
                for tensor, width in zip(tensors, widths, strict=True)
            ]
        )
        results = [tensor.new_empty(sum(received), *tensor.shape[1:]) for tensor in tensors]
        with self.window(own) as addresses:
            for rank, addresses_TR in enumerate(addresses):
                start = sum(received[:rank])
                for address, result in zip(
                    addresses_TR[:, self.rank].tolist(), results, strict=True
                ):
                    self.read(rank, address, result[start : start + received[rank]])
        return results


def _can_read(own: tuple[str, int, int, int], other: tuple[str, int, int, int]) -> bool:
    """Whether this rank reads the other one's secret, both as (host, process, address, secret)."""
    host, pid, address, secret = other
    copy = torch.zeros(1, dtype=torch.int64)
    if host == own[0] and pid != own[1]:
        try:
            read_memory(pid, address, copy.data_ptr(), copy.nbytes)
        except OSError:
            return False
    return own == other or copy.item() == secret


def _wait_by_gloo(group: dist.ProcessGroup, number: int) -> list[int]:
    own = torch.tensor([number])
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    return [int(each) for each in found]


class SharedBarrier:
    """A barrier of the ranks of a process group, in memory that all of them see.

    Only on processors that show each other their writes in order (x86-64): what a rank wrote before
    it came can be read by all that leave.

    Args:
        words: of each rank.
        rank: this one.
        pids: process of each rank.
        limit_s: seconds that a rank waits for another one.
    """

    def __init__(
        self, words: Sequence[memoryview], rank: int, pids: Sequence[int], limit_s: float
    ) -> None:
        self._words, self._own, self._pids, self._limit_s = words, words[rank], pids, limit_s
        self._count = 0
        # With more ranks than processors, one that waits must let another one compute.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(words)))
        self._spin_s = _SPIN_S if ranks <= host_processors() else 0.0

    @classmethod
    def of(cls, group: dist.ProcessGroup, pids: Sequence[int]) -> SharedBarrier | None:
        """Create the barrier of ranks on one machine. All of them must call.

        Returns:
            None on all ranks, if the processor is not x86-64 or the system forbids it.
        """
        descriptor = -1
        if sys.platform == "linux" and platform.machine() == "x86_64":
            with suppress(OSError):
                descriptor = os.memfd_create("r3-barrier")
                os.ftruncate(descriptor, 8 * _WORDS)
        descriptors: list[Any] = [None] * group.size()
        dist.all_gather_object(descriptors, descriptor, group=group)
        words: list[memoryview] = []
        if min(descriptors) >= 0:
            with suppress(OSError):
                words = [_mapped(*where) for where in zip(pids, descriptors, strict=True)]
        all_mapped = torch.tensor([int(len(words) == len(pids))])
        # Also keeps every descriptor open until all have opened it.
        dist.all_reduce(all_mapped, op=dist.ReduceOp.MIN, group=group)
        if descriptor >= 0:
            os.close(descriptor)
        if not all_mapped.item():
            return None
        limit = group._get_backend(torch.device("cpu")).options._timeout
        return cls(words, group.rank(), pids, limit.total_seconds())

    def wait(self, number: int) -> list[int]:
        """Wait for all ranks, and return the number of each. All of them must call.

        Raises:
            RuntimeError: a rank has ended, stopped waiting, or did not come within the time limit.
        """
        self._count += 1
        # In turns: a rank that is at the next barrier already leaves what others have yet to read.
        place = 1 + self._count % 2
        self._own[place] = number
        self._own[0] = self._count
        until = time.monotonic() + self._spin_s
        for rank, words in enumerate(self._words):
            while words[0] < self._count:
                if time.monotonic() > until:
                    self._sleep_until(rank)
        return [words[place] for words in self._words]

    def _sleep_until(self, rank: int) -> None:
        """Wait for a rank that takes longer."""
        words = self._words[rank]
        began = looked = time.monotonic()
        while words[0] < self._count:
            time.sleep(_NAP_S)
            now = time.monotonic()
            problem = ""
            if words[0] == _GONE:
                problem = "stopped waiting for others"
            elif now - began > self._limit_s:
                problem = f"did not reach the barrier within {self._limit_s:g} s"
            elif now - looked > _LOOK_S:
                looked = now
                problem = "" if is_running(self._pids[rank]) else "has ended"
            # It may have come meanwhile: before it ended, or while this rank was suspended.
            if problem and words[0] < self._count:
                self._own[0] = _GONE  # a rank that arrives now must not continue alone
                raise RuntimeError(
                    f"waiting for rank {rank} of a group of {len(self._pids)} (process "
                    f"{self._pids[rank]}): it {problem}"
                )


def _mapped(pid: int, descriptor: int) -> memoryview:
    """The words of a rank."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return memoryview(mmap.mmap(opened, 8 * _WORDS)).cast("q")
    finally:
        os.close(opened)


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended, on Linux."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
