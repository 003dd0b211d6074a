"""Exchange of gradients and parameters between data-parallel ranks, without Megatron's copies.

On CPU, ranks of one machine read each other's memory. Other ranks use gloo, which sends everything
over TCP. On CUDA, Megatron's own collectives stay.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from r3.runtime.process import let_siblings_read, read_memory

_PIECE = 1 << 18
"""Gradients that are read at a time: 1 MiB, which stays in a core's cache until it is added."""


def exchange_without_copies(wrapped: list[Any], host: str) -> None:
    """Replace Megatron's collectives of gradients and parameters where they copy for nothing.

    Where one data-parallel rank has all of a buffer, Megatron still reduces and gathers it, onto
    itself: nothing is left to do. On CPU, gloo's reduce-scatter is an all-reduce of a copy, and its
    all-gather collects into a second tensor. Ranks that can read each other's memory (`Peers`) sum
    and take what they need from there. Otherwise gloo sums in the gradients, of which a rank reads
    its own part only, and each rank sends its parameters to where they belong.

    All ranks must call.

    Args:
        wrapped: this rank's model chunks.
        host: identifies this rank's machine.
    """
    for chunk in wrapped:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            on_cuda = group.buckets[0].grad_data.is_cuda
            if group.intra_distributed_optimizer_instance_size == 1:
                if all(bucket.gradient_scaling_factor == 1.0 for bucket in group.buckets):
                    group.start_grad_sync = _skip
                elif not on_cuda:
                    group.start_grad_sync = partial(_sum_in_place, group)
                group.start_param_sync = _skip
            elif not on_cuda:
                peers = Peers.of(group.intra_distributed_optimizer_instance_group, host)
                if peers:
                    group.start_grad_sync = partial(_sum_own_part, group, peers)
                    group.start_param_sync = partial(_take_parts, group, peers)
                else:
                    group.start_grad_sync = partial(_sum_in_place, group)
                    group.start_param_sync = partial(_send_own_part, group)


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Ranks of a process group that read each other's memory.

    Attributes:
        group: the process group, with gloo.
        pids: process of each rank of the group.
    """

    group: dist.ProcessGroup
    pids: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup, host: str) -> Peers | None:
        """Try whether every rank can read every other one. All ranks of the group must call.

        Args:
            group: the ranks.
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
        pids = tuple(pid for _, pid, *_ in found)
        return cls(group=group, pids=pids) if readable.item() else None

    @contextmanager
    def meeting(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[list[int]]]:
        """Inside, tensors of all ranks may be read. All ranks of the group must enter.

        It begins when all ranks have entered, and ends when all are done with reading: a rank that
        is missing raises an error after the group's time limit, as in every collective.

        Yields:
            Addresses of the tensors, by rank.
        """
        own = torch.tensor([tensor.data_ptr() for tensor in tensors])
        addresses = [torch.empty_like(own) for _ in self.pids]
        dist.all_gather(addresses, own, group=self.group)
        yield [of_rank.tolist() for of_rank in addresses]
        dist.barrier(group=self.group)

    def read(self, rank: int, address: int, into: torch.Tensor) -> None:
        """Fill a contiguous tensor from the memory of a rank of the group.

        Raises:
            OSError: the rank's process has ended.
        """
        read_memory(self.pids[rank], address, into.data_ptr(), into.nbytes)


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


def _skip(*_args: Any, **_kwargs: Any) -> None: ...


def _scale(group: Any) -> None:
    for bucket in group.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor


def _sum_own_part(group: Any, peers: Peers, force_all_reduce: bool | None = False) -> None:
    """Sum this rank's part of the gradients over a bucket group. All its ranks must call.

    Megatron's `start_grad_sync` (param_and_grad_buffer.py) without overlap. Other parts stay what
    they are on this rank; Megatron leaves them undefined. A rank adds the others to its own
    gradients in the order of ranks, so three and more may round differently from gloo.
    """
    if force_all_reduce:
        _sum_in_place(group)
        return
    _scale(group)
    rank = group.intra_distributed_optimizer_instance_rank
    read = torch.empty(_PIECE)
    with peers.meeting([bucket.grad_data for bucket in group.buckets]) as addresses:
        for number, bucket in enumerate(group.buckets):
            for piece in bucket.grad_data.chunk(len(peers.pids))[rank].split(_PIECE):
                offset = piece.data_ptr() - bucket.grad_data.data_ptr()
                for other in range(len(peers.pids)):
                    if other != rank:
                        theirs = read[: piece.numel()]
                        peers.read(other, addresses[other][number] + offset, theirs)
                        piece += theirs


def _take_parts(group: Any, peers: Peers, force_sync: bool = False) -> None:
    """Take the other ranks' parts of the parameters of a bucket group. All its ranks must call.

    Megatron's `start_param_sync` (param_and_grad_buffer.py) without overlap, where nothing is left
    to force.
    """
    rank = group.intra_distributed_optimizer_instance_rank
    with peers.meeting([bucket.param_data for bucket in group.buckets]) as addresses:
        for number, bucket in enumerate(group.buckets):
            for other, part in enumerate(bucket.param_data.chunk(len(peers.pids))):
                if other != rank:
                    offset = part.data_ptr() - bucket.param_data.data_ptr()
                    peers.read(other, addresses[other][number] + offset, part)


def _sum_in_place(group: Any, force_all_reduce: bool | None = False) -> None:
    """Sum the gradients of a bucket group over its ranks. All of them must call.

    Megatron's `start_grad_sync` without overlap. It is an all-reduce with either value of the
    argument.
    """
    _scale(group)
    for bucket in group.buckets:
        dist.all_reduce(bucket.grad_data, group=group.intra_distributed_optimizer_instance_group)


def _send_own_part(group: Any, force_sync: bool = False) -> None:
    """Give every rank of a bucket group all parameters. All of them must call.

    Megatron's `start_param_sync` without overlap, where nothing is left to force.
    """
    size = group.intra_distributed_optimizer_instance_size
    for bucket in group.buckets:
        for rank, part in enumerate(bucket.param_data.chunk(size)):
            dist.broadcast(
                part, group=group.intra_distributed_optimizer_instance_group, group_src=rank
            )
