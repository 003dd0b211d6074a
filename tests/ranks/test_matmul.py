"""A policy in bfloat16 computes its products in float32 on a processor that has no others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from r3.runtime.device import Device
from tests.policies import Watched, batches_of, build
from tests.tiny import tiny_config
from tests.world import run_rows

pytestmark = pytest.mark.ranks


def products_by_type(device: Device, dtype: str, tp: int, has_bfloat16: bool) -> dict[str, int]:
    """Count the products of a forward and backward pass by the type of their last operand."""
    from r3.layers import kernels as matmul

    matmul._HAS_BFLOAT16 = has_bfloat16
    config = tiny_config(
        parallel={"tp": tp},
        model={"dtype": dtype},
        train={"micro_batch_tokens": 2048, "steps": 1},
    )
    mesh, policy = build(device, config)
    (batch,) = batches_of(mesh, policy.shape, (250,) * 8, micro_batch_tokens=2048)
    counts: Counter[str] = Counter()

    def count(func: Any, args: Any, _result: Any) -> None:
        if func.overloadpacket.__name__ in ("mm", "addmm_"):
            counts[str(args[-1].dtype)] += 1

    with Watched(count):
        policy.forward_backward(batch)
    return counts


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
