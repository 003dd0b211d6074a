"""Gradients and parameters exchanged without copies are those of Megatron's own collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from r3.extras import exchange_without_copies
from r3.runtime.device import Device
from tests.errors import message_of
from tests.policies import build
from tests.tiny import tiny_config
from tests.world import run_world

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one rank has of a bucket group after an exchange.

    Attributes:
        size: ranks that share the group.
        gradients: its part of the summed gradients equals Megatron's, bit for bit.
        forced: with `force_all_reduce`, all gradients equal Megatron's, bit for bit.
        summed: its part differs from what it had before.
        parameters: all parameters equal those of Megatron's gather, bit for bit.
        gathered: those of other ranks had other values before.
    """

    size: int
    gradients: bool
    forced: bool
    summed: bool
    parameters: bool
    gathered: bool


def exchanged(device: Device, dtype: str, ep: int) -> list[Exchanged]:
    """Exchange random gradients and parameters of every bucket group."""
    config = tiny_config(model={"dtype": dtype}, parallel={"ep": ep})
    _, policy = build(device, config)
    generator = torch.Generator().manual_seed(device.rank)
    exchange_without_copies(policy.wrapped)
    return [
        _exchange(group, generator)
        for chunk in policy.wrapped
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]


def _exchange(group: Any, generator: torch.Generator) -> Exchanged:
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
    return Exchanged(
        size=ranks.size(),
        gradients=_equal(gradients, expected),
        forced=_equal(forced, all_expected),
        summed=not _equal(gradients, _own(group, before[0])),
        parameters=_equal(parameters, _contents(group)[1]),
        gathered=not _equal(parameters, before[1]),
    )


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


def scaled(device: Device) -> str:
    """What is said about a bucket whose gradients Megatron would scale."""
    _, policy = build(device, tiny_config())
    policy.wrapped[0].bucket_groups[0].buckets[0].gradient_scaling_factor = 0.5
    return message_of(lambda: exchange_without_copies(policy.wrapped), AssertionError)


def test_gradients_that_megatron_would_scale_are_refused() -> None:
    (said,) = run_world(scaled, 1)
    assert said == "AssertionError: rank 0: gradients to be scaled by {0.5}"


@pytest.mark.parametrize(
    ("ranks", "ep", "dtype"),
    [
        (2, 2, "bfloat16"),
        (3, 1, "float32"),
        pytest.param(2, 1, "float32", marks=pytest.mark.large),
        pytest.param(4, 2, "bfloat16", marks=pytest.mark.large),
    ],
)
def test_exchange_is_megatrons(ranks: int, ep: int, dtype: str) -> None:
    groups = run_world(exchanged, ranks, dtype=dtype, ep=ep)
    assert all(len(found) == len(groups[0]) >= 1 for found in groups)
    for found in (each for rank in groups for each in rank):
        assert found.parameters and found.forced and found.gradients, found
        # Alone, a rank has nothing to exchange; otherwise values must have moved.
        assert found.summed == found.gathered == (found.size > 1), found
    assert any(found.size > 1 for found in groups[0])
