"""A processor without bfloat16 products multiplies in float32 and rounds."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from r3.layers import kernels as matmul
from r3.layers.kernels import is_by_float32, product


class Called(TorchDispatchMode):
    """Dtypes of the operands of the products in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.dtypes |= {value.dtype for value in args if isinstance(value, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_bfloat16_is_multiplied_in_float32_where_the_processor_cannot(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool
) -> None:
    monkeypatch.setattr(matmul, "_HAS_BFLOAT16", has_bfloat16)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(200, 96, generator=generator).bfloat16()
    right = torch.randn(128, 96, generator=generator).bfloat16().t()
    with Called() as called:
        found = product(left, right)
    assert called.dtypes == {torch.bfloat16 if has_bfloat16 else torch.float32}
    assert found.dtype == torch.bfloat16
    # rounded once to 8 bits, after sums that are exact beside that
    assert torch.allclose(found.double(), left.double() @ right.double(), rtol=2**-8, atol=1e-4)
    assert not is_by_float32(left.to("meta"))
    assert not is_by_float32(left.float())
