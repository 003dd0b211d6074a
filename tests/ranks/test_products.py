"""Policies compute large float32 products on CPU by oneDNN or R3's loops, where that is faster."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from r3.runtime.device import Device
from tests.policies import batches_of, build
from tests.processor import needs_avx512
from tests.tiny import tiny_config
from tests.world import run_world

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What one rank's policy consists of.

    Attributes:
        linear: linear layers of Megatron.
        by_product: of these, those that compute by R3's product.
        products, others: calls of oneDNN's and of torch's product in a forward and backward pass.
    """

    linear: int
    by_product: int
    products: int
    others: int


def layers(device: Device, dtype: str, tp: int, way: str) -> Layers:
    """Build a policy and run it once, as on a processor where `way` is fastest."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from r3.policy import products

    products._BY_ONEDNN, products._BY_TILES = way == "onednn", way == "tiles"
    config = tiny_config(
        parallel={"tp": tp},
        model={"dtype": dtype},
        train={"micro_batch_tokens": 2048, "steps": 1},
    )
    mesh, policy = build(device, config)
    (batch,) = batches_of(mesh, policy.shape, (250,) * 8, micro_batch_tokens=2048)
    with torch.profiler.profile() as profile:
        policy.forward_backward(batch)
    calls = {event.key: event.count for event in profile.key_averages()}
    found = [
        module
        for chunk in policy.chunks
        for module in chunk.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    ]
    return Layers(
        linear=len(found),
        by_product=sum(vars(module).get("_forward_impl") is products._linear for module in found),
        products=calls.get("mkldnn::_linear_pointwise", 0),
        others=calls.get("aten::mm", 0),
    )


@pytest.mark.parametrize(
    ("dtype", "tp", "way"),
    [
        ("float32", 1, "onednn"),
        ("float32", 1, "torch"),
        pytest.param("float32", 1, "tiles", marks=needs_avx512),
        ("bfloat16", 1, "onednn"),
        pytest.param("bfloat16", 1, "tiles", marks=needs_avx512),
        ("float32", 2, "onednn"),
    ],
)
def test_large_float32_products_are_by_what_is_fastest(dtype: str, tp: int, way: str) -> None:
    for found in run_world(layers, tp, dtype=dtype, tp=tp, way=way):
        assert found.linear > 4, found
        replaced = way != "torch" and dtype == "float32" and tp == 1
        assert found.by_product == (found.linear if replaced else 0), found
        # The output layer does so with tensor parallelism, too.
        assert (found.products > 0) == (way == "onednn" and dtype == "float32"), found
        assert found.others > 0, found  # routers, and all that is small
