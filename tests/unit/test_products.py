"""Products by oneDNN are those of torch's operator, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from r3.policy import products
from r3.policy.products import SMALLEST, is_by_onednn, product
from r3.runtime.device import processor

pytestmark = pytest.mark.unit

LARGE, SMALL = (200, 96, 128), (20, 16, 24)  # M, K, N on both sides of SMALLEST


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def by_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether this processor is one on which oneDNN is faster."""
    monkeypatch.setattr(products, "_BY_ONEDNN", request.param)
    return request.param


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
@pytest.mark.usefixtures("by_onednn")
def test_a_product_is_that_of_float64(sizes: tuple[int, int, int], layout: str) -> None:
    left, right = _operands(sizes, layout)
    exact = left.double() @ right.double()
    # sums of about 100 products, each rounded by 2^-24
    error = (product(left, right).double() - exact).norm() / exact.norm()
    assert 0 < error <= 1e-6


def test_large_float32_products_are_by_onednn_and_no_others(by_onednn: bool) -> None:
    assert LARGE[0] * LARGE[1] * LARGE[2] >= SMALLEST > SMALL[0] * SMALL[1] * SMALL[2]
    for sizes, dtype, expected in (
        (LARGE, torch.float32, by_onednn),
        (SMALL, torch.float32, False),
        (LARGE, torch.bfloat16, False),
        (LARGE, torch.float64, False),
    ):
        left, right = (side.to(dtype) for side in _operands(sizes, "rows"))
        with Called() as called:
            product(left, right)
        assert ("_linear_pointwise" in called.names) == expected, (sizes, dtype, called.names)
        assert ("mm" in called.names) != expected


@pytest.mark.parametrize(
    ("vendor", "family", "expected"),
    [
        ("AuthenticAMD", 26, True),
        ("AuthenticAMD", 27, True),
        ("AuthenticAMD", 25, False),
        ("GenuineIntel", 6, False),
        ("", 0, False),
    ],
)
def test_onednn_is_for_processors_where_mkl_uses_half_of_a_register(
    vendor: str, family: int, expected: bool
) -> None:
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert products._is_onednn_faster(vendor, family) == (expected and has_avx512)


def test_vendor_and_family_are_read(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert processor(info) == ("", 0)
    info.write_text("processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd0c\n")  # another kind
    assert processor(info) == ("", 0)
    each = "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\n"
    info.write_text(each.format(0) + each.format(1))
    assert processor(info) == ("AuthenticAMD", 26)


def test_tensors_of_other_devices_are_not_by_onednn(by_onednn: bool) -> None:
    assert is_by_onednn(torch.ones(1)) == by_onednn
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


@pytest.mark.usefixtures("by_onednn")
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
