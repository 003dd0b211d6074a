"""Gradients and parameters exchanged without copies are those of Megatron's own collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from r3.extras import dispatch
from r3.runtime.device import Device
from tests.errors import message_of
from tests.policies import build
from tests.tiny import tiny_config
from tests.world import run_world

pytestmark = pytest.mark.ranks


def exchanged(device: Device, dtype: str, ep: int) -> int:
    """Exchange random gradients and parameters of every bucket group; how many ranks share one."""
    config = tiny_config(model={"dtype": dtype}, parallel={"ep": ep})
    _, policy = build(device, config)
    generator = torch.Generator().manual_seed(device.rank)
    dispatch().exchange_without_copies(policy.wrapped)
    groups = [
        group
        for chunk in policy.wrapped
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    return max(_as_megatron(group, generator) for group in groups)


def _as_megatron(group: Any, generator: torch.Generator) -> int:
    """Require the bits of Megatron's exchange; returns the ranks of the group."""
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
    assert _equal(forced, _contents(group)[0]), "all gradients"
    _restore(group, before)
    own.start_grad_sync(group)
    assert _equal(gradients, _parts(group, "grad_data")), "the rank's part of the summed gradients"
    own.start_param_sync(group)
    assert _equal(parameters, _contents(group)[1]), "all parameters"
    # Alone, a rank has nothing to exchange; otherwise values must have moved.
    has_others = ranks.size() > 1
    assert _equal(gradients, _own(group, before[0])) != has_others
    assert _equal(parameters, before[1]) != has_others
    return ranks.size()


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
    return message_of(lambda: dispatch().exchange_without_copies(policy.wrapped), AssertionError)


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
    assert min(run_world(exchanged, ranks, dtype=dtype, ep=ep)) > 1
