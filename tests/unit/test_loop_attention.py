"""The loop for the policy's attention on CPU, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from r3.kernels import loop_attention
from r3.kernels.loop_attention import attend
from tests.processor import needs_tiles

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread"), needs_tiles]

LENGTHS = (1, 31, 32, 33, 1, 100)
SHAPES = pytest.mark.parametrize(
    ("heads", "key_heads", "size", "width"), [(4, 2, 32, 32), (3, 1, 24, 40), (2, 2, 128, 64)]
)


def _inputs(heads: int, key_heads: int, size: int, width: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = (heads, size), (key_heads, size), (key_heads, width)
    return [torch.randn(sum(LENGTHS), *shape, generator=random) for shape in shapes]


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """torch's attention, sequence by sequence."""
    parts = (x.split(list(lengths)) for x in (query, key, value))
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in qkv), is_causal=True, scale=scale, enable_gqa=True
            ).transpose(0, 1)
            for qkv in zip(*parts, strict=True)
        ]
    )


def _results(function: Any, inputs: list[torch.Tensor], scale: float = 0.3) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values, for a fixed upstream gradient."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    out = function(*leaves, LENGTHS, scale)
    upstream = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@SHAPES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_outputs_and_gradients_equal_torchs_in_float64(
    heads: int, key_heads: int, size: int, width: int, dtype: torch.dtype, bound: float
) -> None:
    inputs = [one.to(dtype) for one in _inputs(heads, key_heads, size, width)]
    found = _results(attend, inputs)
    expected = _results(_plain, [one.double() for one in inputs])
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == dtype
        # Of the whole tensor: sums of 100 terms in float32 (2^-24 each), results in the type.
        assert 0 < (one.double() - exact).norm() / exact.norm() < bound


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    query, key, value = _inputs(4, 2, 32, 32)
    whole = attend(query, key, value, LENGTHS, 0.3)
    last = attend(query[-100:], key[-100:], value[-100:], [100], 0.3)
    assert torch.equal(whole[-100:], last)


def test_later_tokens_and_other_sequences_change_no_bit() -> None:
    query, key, value = _inputs(4, 2, 32, 32)
    before = attend(query, key, value, LENGTHS, 0.3)
    key[-50:], value[-50:] = 1e4, -1e4  # the last half of the last sequence
    after = attend(query, key, value, LENGTHS, 0.3)
    assert torch.equal(after[:-50], before[:-50])
    assert (after[-50:] != before[-50:]).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_not_lost(number: float) -> None:
    for which in range(3):
        inputs = _inputs(2, 1, 32, 32)
        inputs[which][-1, 0, 5] = number  # of the last token
        out, *gradients = _results(attend, inputs)
        assert not out[-1, 0].isfinite().all()
        assert out[: -LENGTHS[-1]].isfinite().all()  # of other sequences
        # The output is linear in values; their gradient needs none.
        assert which == 2 or not all(gradient.isfinite().all() for gradient in gradients)


def test_large_scores_do_not_overflow() -> None:
    query, key, value = _inputs(4, 2, 32, 32)
    found = _results(attend, [query * 100, key * 100, value])
    expected = _results(_plain, [query.double() * 100, key.double() * 100, value.double()])
    # Scores of 1e5 have roundings of 0.004, which their exponentials have as relative errors.
    assert (found[0].double() - expected[0]).norm() < 0.02 * expected[0].norm()
    assert all(one.isfinite().all() for one in found)


def test_a_gradient_is_the_slope() -> None:
    inputs = [one.requires_grad_() for one in _inputs(2, 1, 32, 32)]
    direction = [torch.randn_like(one) for one in inputs]
    gradients = torch.autograd.grad(attend(*inputs, LENGTHS, 0.3).sum(), inputs)  # type: ignore[arg-type]
    expected = sum(
        float((one.double() * two.double()).sum())
        for one, two in zip(gradients, direction, strict=True)
    )
    step = 1e-2
    ends = [
        float(
            attend(
                *(
                    one.detach() + sign * step * to
                    for one, to in zip(inputs, direction, strict=True)
                ),
                LENGTHS,
                0.3,
            )
            .double()
            .sum()
        )
        for sign in (1, -1)
    ]
    # The third derivative times step^2, and float32's rounding of 6,000 sums divided by the step.
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=2e-2)


def test_the_loop_is_for_processors_types_and_lengths_that_it_can_compute() -> None:
    query = torch.zeros(1, 1, 32)
    most = loop_attention.MOST_TOKENS
    assert loop_attention.is_faster(query, most)
    assert loop_attention.is_faster(query.bfloat16(), most)
    assert not loop_attention.is_faster(query, most + 1)
    assert not loop_attention.is_faster(query.double(), 1)
    assert not loop_attention.is_faster(query.to("meta"), 1)
    torch.set_num_threads(2)
    assert not loop_attention.is_faster(query, 1)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    query, key, value = _inputs(4, 2, 32, 32)
    for wrong in (
        (query, key[:-1], value, LENGTHS),
        (query, key, value[:, :1], LENGTHS),
        (query[:, :3], key, value, LENGTHS),
        (query, key[..., :16], value, LENGTHS),
        (query, key, value, LENGTHS[:-1]),
        (query, key, value, (*LENGTHS, -1, 1)),
    ):
        with pytest.raises(AssertionError):
            attend(*wrong, 0.3)
