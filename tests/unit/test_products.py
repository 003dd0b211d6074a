"""Products by oneDNN and by R3's loops are those of torch's operator, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from r3.policy import cpu_products, products
from r3.policy.products import SMALLEST, is_by_float32, is_by_onednn, product
from r3.runtime.device import processor
from tests.processor import HAS_AVX512, needs_tiles

pytestmark = pytest.mark.unit

LARGE, SMALL = (200, 96, 128), (20, 16, 24)  # M, K, N on both sides of SMALLEST

WAYS = ["onednn", "torch", pytest.param("tiles", marks=needs_tiles)]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> str:
    """What is fastest on this processor."""
    monkeypatch.setattr(products, "_BY_ONEDNN", request.param == "onednn")
    monkeypatch.setattr(products, "_BY_TILES", request.param == "tiles")
    monkeypatch.setattr(products, "_HAS_BFLOAT16", True)
    return request.param


class Called(TorchDispatchMode):
    """Names of the operators that are called in the block, and dtypes of products' operands."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names.add(name)
        if name in ("mm", "addmm", "addmm_"):
            self.dtypes |= {value.dtype for value in args if isinstance(value, torch.Tensor)}
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
@pytest.mark.usefixtures("way")
def test_a_product_is_that_of_float64(sizes: tuple[int, int, int], layout: str) -> None:
    left, right = _operands(sizes, layout)
    exact = left.double() @ right.double()
    # sums of about 100 products, each rounded by 2^-24
    error = (product(left, right).double() - exact).norm() / exact.norm()
    assert 0 < error <= 1e-6


def test_large_float32_products_are_by_what_is_fastest_and_no_others(way: str) -> None:
    assert LARGE[0] * LARGE[1] * LARGE[2] >= SMALLEST > SMALL[0] * SMALL[1] * SMALL[2]
    for sizes, dtype, expected in (
        (LARGE, torch.float32, way),
        (SMALL, torch.float32, "torch"),
        (LARGE, torch.bfloat16, "torch"),
        (LARGE, torch.float64, "torch"),
    ):
        left, right = (side.to(dtype) for side in _operands(sizes, "rows"))
        with Called() as called:
            product(left, right)
        assert ("_linear_pointwise" in called.names) == (expected == "onednn"), called.names
        assert ("mm" in called.names) == (expected == "torch"), (sizes, dtype, called.names)


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_bfloat16_is_multiplied_in_float32_where_the_processor_cannot(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], has_bfloat16: bool
) -> None:
    monkeypatch.setattr(products, "_HAS_BFLOAT16", has_bfloat16)
    left, right = (side.bfloat16() for side in _operands(sizes, "right transposed"))
    with Called() as called:
        found = product(left, right)
    assert called.dtypes == {torch.bfloat16 if has_bfloat16 else torch.float32}
    assert found.dtype == torch.bfloat16
    # rounded once to 8 bits, after sums that are exact beside that
    assert torch.allclose(found.double(), left.double() @ right.double(), rtol=2**-8, atol=1e-4)
    assert not is_by_float32(left.to("meta"))
    assert not is_by_float32(left.float())


@needs_tiles
@pytest.mark.usefixtures("one_thread")
def test_loops_are_for_one_thread_whole_tiles_and_rows_in_their_order() -> None:
    left, right = _operands(LARGE, "rows")
    assert cpu_products.can_compute(left, right)
    assert not cpu_products.can_compute(left, right[:, :31])
    assert not cpu_products.can_compute(left.t(), right)
    assert not cpu_products.can_compute(left.double(), right.double())
    assert not cpu_products.can_compute(left.to("meta"), right)
    torch.set_num_threads(2)
    assert not cpu_products.can_compute(left, right)


@needs_tiles
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, cpu_products.BLOCK + 1])
@pytest.mark.parametrize("terms", [1, cpu_products.DEEP, 2 * cpu_products.DEEP + 3])
def test_loops_multiply_any_number_of_rows_and_terms(
    terms: int, rows: int, transposed: bool
) -> None:
    left, right = _operands((rows, terms, 64), "right transposed" if transposed else "rows")
    found = cpu_products.product(left, right)
    exact = left.double() @ right.double()
    # sums of 515 products at most, each rounded by 2^-24
    assert (found.double() - exact).norm() <= 1e-6 * exact.norm()
    assert torch.equal(found[-1:], cpu_products.product(left[-1:], right))
    with pytest.raises(AssertionError):
        cpu_products.product(left, right[1:])


@pytest.mark.parametrize(
    ("vendor", "family", "by_onednn", "by_tiles"),
    [
        ("AuthenticAMD", 26, True, False),
        ("AuthenticAMD", 27, True, False),
        ("AuthenticAMD", 25, False, True),
        ("AuthenticAMD", 23, False, False),
        ("GenuineIntel", 6, False, False),
        ("", 0, False, False),
    ],
)
def test_mkl_is_replaced_where_something_is_faster(
    vendor: str, family: int, by_onednn: bool, by_tiles: bool
) -> None:
    assert products._is_onednn_faster(vendor, family) == (by_onednn and HAS_AVX512)
    assert products._are_tiles_faster(vendor, family) == by_tiles


def test_vendor_and_family_are_read(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert processor(info) == ("", 0)
    info.write_text("processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd0c\n")  # another kind
    assert processor(info) == ("", 0)
    each = "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\n"
    info.write_text(each.format(0) + each.format(1))
    assert processor(info) == ("AuthenticAMD", 26)


def test_tensors_of_other_devices_are_not_by_onednn(way: str) -> None:
    assert is_by_onednn(torch.ones(1)) == (way == "onednn")
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


@pytest.mark.usefixtures("way")
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
