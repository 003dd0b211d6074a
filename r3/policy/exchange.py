"""Exchange of gradients and parameters between data-parallel ranks, without Megatron's copies.

On CPU, ranks of one machine read each other's memory. Other ranks use gloo, which sends everything
over TCP. On CUDA, Megatron's own collectives stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from r3.runtime.peers import Peers

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


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


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
    with peers.window(_addresses([bucket.grad_data for bucket in group.buckets])) as addresses:
        for number, bucket in enumerate(group.buckets):
            for piece in bucket.grad_data.chunk(len(peers.pids))[rank].split(_PIECE):
                offset = piece.data_ptr() - bucket.grad_data.data_ptr()
                for other in range(len(peers.pids)):
                    if other != rank:
                        theirs = read[: piece.numel()]
                        peers.read(other, int(addresses[other][number]) + offset, theirs)
                        piece += theirs


def _take_parts(group: Any, peers: Peers, force_sync: bool = False) -> None:
    """Take the other ranks' parts of the parameters of a bucket group. All its ranks must call.

    Megatron's `start_param_sync` (param_and_grad_buffer.py) without overlap, where nothing is left
    to force.
    """
    rank = group.intra_distributed_optimizer_instance_rank
    with peers.window(_addresses([bucket.param_data for bucket in group.buckets])) as addresses:
        for number, bucket in enumerate(group.buckets):
            for other, part in enumerate(bucket.param_data.chunk(len(peers.pids))):
                if other != rank:
                    offset = part.data_ptr() - bucket.param_data.data_ptr()
                    peers.read(other, int(addresses[other][number]) + offset, part)


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
