"""A policy in bfloat16 computes its products in float32 on a processor that has no others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from r3.runtime.device import Device
from tests.policies import batches_of, build
from tests.tiny import tiny_config
from tests.world import run_rows

pytestmark = pytest.mark.ranks


class Products(TorchDispatchMode):
    """Count products by the dtype of their last operand."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm_"):
            self.calls[str(args[-1].dtype)] += 1
        return func(*args, **(kwargs or {}))


def products_by_type(device: Device, dtype: str, tp: int, has_bfloat16: bool) -> dict[str, int]:
    """Count the products of a forward and backward pass."""
    from r3.layers import kernels as matmul

    matmul._HAS_BFLOAT16 = has_bfloat16
    config = tiny_config(
        parallel={"tp": tp},
        model={"dtype": dtype},
        train={"micro_batch_tokens": 2048, "steps": 1},
    )
    mesh, policy = build(device, config)
    (batch,) = batches_of(mesh, policy.shape, (250,) * 8, micro_batch_tokens=2048)
    with Products() as counted:
        policy.forward_backward(batch)
    return dict(counted.calls)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.large), 2])
def test_products_have_a_type_that_the_processor_has(tp: int) -> None:
    rows: list[dict[str, Any]] = [
        {"dtype": "float32", "has_bfloat16": False},
        {"dtype": "bfloat16", "has_bfloat16": True},
        {"dtype": "bfloat16", "has_bfloat16": False},
    ]
    for row, ranks in zip(rows, run_rows(products_by_type, tp, rows, tp=tp), strict=True):
        expected = row["dtype"] == "bfloat16" and row["has_bfloat16"]
        for found in ranks:
            assert found["torch.float32"] > 0, found  # routers
            assert ("torch.bfloat16" in found) == expected, (row, found)
