"""Exchange of gradients and parameters between data-parallel ranks, without Megatron's copies."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist


def exchange_without_copies(wrapped: list[Any]) -> None:
    """Replace Megatron's collectives of gradients and parameters where they copy for nothing.

    Where one data-parallel rank has all of a buffer, Megatron still reduces and gathers it, onto
    itself: nothing is left to do. On CPU, gloo's reduce-scatter is an all-reduce of a copy, and its
    all-gather collects into a second tensor. Here gloo sums in the gradients, of which a rank reads
    its own part only, and each rank sends its parameters to where they belong. On CUDA, Megatron's
    own collectives stay. Gradients are not scaled, because of `calculate_per_token_loss`.

    Args:
        wrapped: this rank's model chunks.
    """
    for chunk in wrapped:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            factors = {bucket.gradient_scaling_factor for bucket in group.buckets}
            assert factors == {1.0}, f"rank {dist.get_rank()}: gradients to be scaled by {factors}"
            if group.intra_distributed_optimizer_instance_size == 1:
                group.start_grad_sync = group.start_param_sync = _skip
            elif not group.buckets[0].grad_data.is_cuda:
                group.start_grad_sync = partial(_sum_in_place, group)
                group.start_param_sync = partial(_send_own_part, group)


def _skip(*_args: Any, **_kwargs: Any) -> None: ...


def _sum_in_place(group: Any, force_all_reduce: bool | None = False) -> None:
    """Sum the gradients of a bucket group over its ranks. All of them must call.

    Megatron's `start_grad_sync` (param_and_grad_buffer.py) without overlap. It is an all-reduce
    with either value of the argument.
    """
    for bucket in group.buckets:
        dist.all_reduce(bucket.grad_data, group=group.intra_distributed_optimizer_instance_group)


def _send_own_part(group: Any, force_sync: bool = False) -> None:
    """Give every rank of a bucket group all parameters. All of them must call.

    Megatron's `start_param_sync` (param_and_grad_buffer.py) without overlap, where nothing is left
    to force.
    """
    size = group.intra_distributed_optimizer_instance_size
    for bucket in group.buckets:
        for rank, part in enumerate(bucket.param_data.chunk(size)):
            dist.broadcast(
                part, group=group.intra_distributed_optimizer_instance_group, group_src=rank
            )
