"""Products by oneDNN are those of torch's operator, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from r3.policy import products
from r3.policy.products import SMALLEST, is_by_onednn, product

pytestmark = pytest.mark.unit

LARGE, SMALL = (200, 96, 128), (20, 16, 24)  # M, K, N on both sides of SMALLEST
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


class Called(TorchDispatchMode):
    """Names of the operators that are called in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _operands(sizes: tuple[int, int, int], layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, inner, columns = sizes
    left = torch.randn(inner, rows, generator=generator).t()
    right = torch.randn(columns, inner, generator=generator).t()
    return (
        left if "left transposed" in layout else left.contiguous(),
        right if "right transposed" in layout else right.contiguous(),
    )


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
@pytest.mark.parametrize("layout", ["rows", "left transposed", "right transposed"])
def test_a_product_is_that_of_float64(sizes: tuple[int, int, int], layout: str) -> None:
    left, right = _operands(sizes, layout)
    exact = left.double() @ right.double()
    # sums of about 100 products, each rounded by 2^-24
    error = (product(left, right).double() - exact).norm() / exact.norm()
    assert 0 < error <= 1e-6


def test_large_float32_products_are_by_onednn_and_no_others() -> None:
    assert LARGE[0] * LARGE[1] * LARGE[2] >= SMALLEST > SMALL[0] * SMALL[1] * SMALL[2]
    for sizes, dtype, expected in (
        (LARGE, torch.float32, HAS_AVX512),
        (SMALL, torch.float32, False),
        (LARGE, torch.bfloat16, False),
        (LARGE, torch.float64, False),
    ):
        left, right = (side.to(dtype) for side in _operands(sizes, "rows"))
        with Called() as called:
            product(left, right)
        assert ("_linear_pointwise" in called.names) == expected, (sizes, dtype, called.names)
        assert ("mm" in called.names) != expected


def test_tensors_of_other_devices_are_not_by_onednn() -> None:
    assert is_by_onednn(torch.ones(1)) == HAS_AVX512
    assert not is_by_onednn(torch.ones(1, device="meta"))


def _gradients(linear: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    leaves = [
        torch.randn(*size, generator=generator).to(dtype).requires_grad_()
        for size in ((100, 2, 96), (128, 96), (128,))
    ]
    out = linear(*leaves)
    whole_numbers = torch.arange(out.numel()).remainder(7) - 3
    out.backward(whole_numbers.view_as(out).to(dtype))
    return [out, *(leaf.grad for leaf in leaves)]


def _by_product(*operands: torch.Tensor) -> torch.Tensor:
    return products._linear(*operands, allreduce_dgrad=False, sequence_parallel=False)


def test_a_linear_layer_has_torchs_output_and_gradients() -> None:
    exact = _gradients(F.linear, torch.float64)
    for found, expected in zip(_gradients(_by_product, torch.float32), exact, strict=True):
        assert found.shape == expected.shape
        # sums of at most 200 products
        assert (found.double() - expected).norm() / expected.norm() <= 1e-6
    for found, expected in zip(_gradients(_by_product, torch.float64), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_gets_no_gradient() -> None:
    input, weight = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3)
    _by_product(input, weight, None).sum().backward()
    assert input.grad is not None and weight.grad is None


@pytest.mark.parametrize("name", ["allreduce_dgrad", "sequence_parallel"])
def test_a_layer_with_tensor_parallelism_is_refused(name: str) -> None:
    options = {"allreduce_dgrad": False, "sequence_parallel": False} | {name: True}
    with pytest.raises(AssertionError, match="without tensor parallelism"):
        products._linear(torch.ones(2, 3), torch.ones(2, 3), None, **options)
