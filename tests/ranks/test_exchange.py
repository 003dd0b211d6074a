"""Gradients and parameters exchanged without copies are those of Megatron's own collectives."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from r3.policy.exchange import exchange_without_copies
from r3.runtime.device import Device
from r3.runtime.peers import Peers
from tests.policies import build
from tests.tiny import tiny_config
from tests.world import ranks_read_each_other, run_world

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one rank has of a bucket group after an exchange.

    Attributes:
        way: how ranks were set up: on one host, rank 0 elsewhere, or rank 0 not allowed to read.
        size: ranks that share the group.
        with_first: rank 0 is one of them.
        reads: ranks read each other's memory.
        gradients: its part of the summed gradients equals Megatron's, bit for bit.
        error: largest difference of the two, in units of the rounding of `size` - 1 additions.
        forced: with `force_all_reduce`, all gradients equal Megatron's, bit for bit.
        summed: its part differs from what it had before.
        parameters: all parameters equal those of Megatron's gather, bit for bit.
        gathered: those of other ranks had other values before.
    """

    way: str
    size: int
    with_first: bool
    reads: bool
    gradients: bool
    error: float
    forced: bool
    summed: bool
    parameters: bool
    gathered: bool


def exchanged(device: Device, dtype: str, ep: int) -> list[Exchanged]:
    """Exchange random gradients and parameters of every bucket group, in every way."""
    config = tiny_config(model={"dtype": dtype}, parallel={"ep": ep})
    _, policy = build(device, config)
    generator = torch.Generator().manual_seed(device.rank)
    found = []
    for way in ("one host", "other host", "not allowed"):
        if way == "not allowed" and device.rank == 0:
            forbid_reading()
        apart = way == "other host" and device.rank == 0
        exchange_without_copies(policy.wrapped, f"{device.host} {apart}")
        for chunk in policy.wrapped:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                found.append(_exchange(way, group, generator))
    return found


def _exchange(way: str, group: Any, generator: torch.Generator) -> Exchanged:
    own, ranks = type(group), group.intra_distributed_optimizer_instance_group
    for bucket in group.buckets:
        for data in (bucket.grad_data, bucket.param_data):
            data.copy_(torch.randn(data.shape, generator=generator))
    before = _contents(group)
    group.start_grad_sync()
    gradients = _parts(group, "grad_data")
    group.start_param_sync()
    parameters = _contents(group)[1]
    _restore(group, before)
    group.start_grad_sync(force_all_reduce=True)
    forced = _contents(group)[0]
    _restore(group, before)
    own.start_grad_sync(group, force_all_reduce=True)
    all_expected = _contents(group)[0]
    _restore(group, before)
    own.start_grad_sync(group)
    expected = _parts(group, "grad_data")
    own.start_param_sync(group)
    sizes = [gradient.abs() for gradient in before[0]]
    for size in sizes:
        dist.all_reduce(size, group=ranks)
    return Exchanged(
        way=way,
        size=ranks.size(),
        with_first=0 in dist.get_process_group_ranks(ranks),
        reads=any(isinstance(each, Peers) for each in getattr(group.start_grad_sync, "args", ())),
        gradients=_equal(gradients, expected),
        error=max(
            float(((left - right).abs() / size.clamp(min=1e-30)).max())
            for left, right, size in zip(gradients, expected, _own(group, sizes), strict=True)
        )
        / (max(1, ranks.size() - 1) * 2.0**-24),
        forced=_equal(forced, all_expected),
        summed=not _equal(gradients, _own(group, before[0])),
        parameters=_equal(parameters, _contents(group)[1]),
        gathered=not _equal(parameters, before[1]),
    )


def forbid_reading() -> None:
    """Let the kernel refuse this process the memory of others from now on, as containers may."""
    number = {"x86_64": 310, "aarch64": 270}[platform.machine()]  # of process_vm_readv
    filter_ = (
        (0x20, 0, 0, 0),  # load the number of a call
        (0x15, 0, 1, number),  # skip the next line if it is another one
        (0x06, 0, 0, 0x50000 | errno.EPERM),  # fail
        (0x06, 0, 0, 0x7FFF0000),  # allow
    )
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in filter_))
    program = struct.pack("HP", len(filter_), ctypes.addressof(lines))
    libc = ctypes.CDLL(None)
    no_new_privileges, set_filter, mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_filter, mode, program, 0, 0) == 0


def _contents(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return (
        [bucket.grad_data.clone() for bucket in group.buckets],
        [bucket.param_data.clone() for bucket in group.buckets],
    )


def _restore(group: Any, contents: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    for bucket, gradient, parameter in zip(group.buckets, *contents, strict=True):
        bucket.grad_data.copy_(gradient)
        bucket.param_data.copy_(parameter)


def _own(group: Any, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    rank = group.intra_distributed_optimizer_instance_rank
    size = group.intra_distributed_optimizer_instance_size
    return [buffer.chunk(size)[rank].clone() for buffer in buffers]


def _parts(group: Any, name: str) -> list[torch.Tensor]:
    return _own(group, [getattr(bucket, name) for bucket in group.buckets])


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (2, 2), (3, 1), (4, 2)])
def test_exchange_is_megatrons(ranks: int, ep: int, dtype: str) -> None:
    groups = run_world(exchanged, ranks, dtype=dtype, ep=ep)
    assert all(len(found) == len(groups[0]) >= 3 for found in groups)
    for found in (each for rank in groups for each in rank):
        assert found.parameters and found.forced, found
        # Two additions of three and more gradients in another order may round differently. Each
        # makes an error of at most 1 in this unit; a gradient that is missing makes one of 10^6.
        assert found.error <= 2 if found.reads and found.size > 2 else found.gradients, found
        # Alone, a rank has nothing to exchange; otherwise values must have moved.
        assert found.summed == found.gathered == (found.size > 1), found
        # All ranks of a group make the same choice. One that cannot read decides for all.
        possible = found.size > 1 and not (found.with_first and found.way != "one host")
        assert found.reads == (possible and ranks_read_each_other()), found
    assert any(found.size > 1 for found in groups[0])
