"""Policies compute products on CPU by what is fastest on the processor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from r3.runtime.device import Device
from tests.policies import batches_of, build
from tests.processor import needs_tiles
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
        bfloat16: how many of torch's had bfloat16 operands.
    """

    linear: int
    by_product: int
    products: int
    others: int
    bfloat16: int


class Products(TorchDispatchMode):
    """Count products by their operator and the dtype of their first operand."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm_", "_linear_pointwise"):
            self.calls[name, args[-1].dtype if name == "addmm_" else args[0].dtype] += 1
        return func(*args, **(kwargs or {}))


def layers(device: Device, dtype: str, tp: int, way: str) -> Layers:
    """Build a policy and run it once, as on a processor where `way` is fastest."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from r3.policy import products

    products._BY_ONEDNN, products._BY_TILES = way == "onednn", way == "tiles"
    products._HAS_BFLOAT16 = way != "float32"
    config = tiny_config(
        parallel={"tp": tp},
        model={"dtype": dtype},
        train={"micro_batch_tokens": 2048, "steps": 1},
    )
    mesh, policy = build(device, config)
    (batch,) = batches_of(mesh, policy.shape, (250,) * 8, micro_batch_tokens=2048)
    with Products() as counted:
        policy.forward_backward(batch)
    calls = counted.calls
    found = [
        module
        for chunk in policy.chunks
        for module in chunk.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    ]
    return Layers(
        linear=len(found),
        by_product=sum(vars(module).get("_forward_impl") is products._linear for module in found),
        products=sum(n for (name, _), n in calls.items() if name == "_linear_pointwise"),
        others=sum(n for (name, _), n in calls.items() if name == "mm"),
        bfloat16=sum(n for (_, kind), n in calls.items() if kind == torch.bfloat16),
    )


@pytest.mark.parametrize(
    ("dtype", "tp", "way"),
    [
        ("float32", 1, "onednn"),
        ("float32", 1, "torch"),
        pytest.param("float32", 1, "tiles", marks=needs_tiles),
        ("bfloat16", 1, "onednn"),
        pytest.param("bfloat16", 1, "tiles", marks=needs_tiles),
        ("bfloat16", 1, "float32"),
        ("bfloat16", 2, "float32"),
        ("float32", 1, "float32"),
        ("float32", 2, "onednn"),
    ],
)
def test_products_are_by_what_is_fastest(dtype: str, tp: int, way: str) -> None:
    for found in run_world(layers, tp, dtype=dtype, tp=tp, way=way):
        assert found.linear > 4, found
        replaced = tp == 1 and dtype == ("bfloat16" if way == "float32" else "float32")
        replaced = replaced and way != "torch"
        assert found.by_product == (found.linear if replaced else 0), found
        # The output layer does so with tensor parallelism, too.
        assert (found.products > 0) == (way == "onednn" and dtype == "float32"), found
        assert found.others > 0, found  # routers, and all that is small
        assert (found.bfloat16 > 0) == (dtype == "bfloat16" and way != "float32"), found
