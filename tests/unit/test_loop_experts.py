"""The loops for the policy's experts on CPU, products included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from r3.kernels import loop_experts
from r3.kernels.loop_experts import BLOCK
from r3.kernels.products import DEEP
from r3.policy import fused_experts
from tests.processor import needs_tiles

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread"), needs_tiles]

Inputs = list[torch.Tensor]
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _inputs(
    N: int = 2 * BLOCK + 9,
    E: int = 3,
    D: int = 64,
    F: int = 32,
    dead: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Tokens, gates, experts, w1 and w2. Expert 0 has every token, `dead` none, others some."""
    random = torch.Generator().manual_seed(0)
    experts_NK = torch.zeros(N, 2, dtype=torch.int64)
    experts_NK[:, 1] = torch.randint(1, E, (N,), generator=random)
    experts_NK[experts_NK == dead] = -1  # on another rank
    tokens_ND, gates_NK = torch.randn(N, D, generator=random), torch.rand(N, 2, generator=random)
    w1, w2 = torch.randn(E, 2 * F, D, generator=random), torch.randn(E, D, F, generator=random)
    weights = (nn.Parameter(w.to(dtype)) for w in (w1 / D**0.5, w2 / F**0.5))
    return [tokens_ND.to(dtype).requires_grad_(), gates_NK.requires_grad_(), experts_NK, *weights]


def _in_cache(
    tokens_ND: torch.Tensor,
    gates_NK: torch.Tensor,
    experts_NK: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """What `FusedExperts` does."""
    slots_S, rows_S, sizes = fused_experts._parts(experts_NK, len(w1), multiple=1)
    gates_S = gates_NK.flatten().index_select(0, slots_S)
    return fused_experts._InCache.apply(tokens_ND, gates_S, rows_S, sizes, w1, w2)


def _results(function: object, inputs: Inputs) -> Inputs:
    """The output, and gradients of all that has them for a fixed upstream gradient."""
    assert callable(function)
    out_ND = function(*inputs)
    upstream = torch.linspace(-1, 1, out_ND.numel()).view_as(out_ND).to(out_ND.dtype)
    leaves = [one for one in inputs if one.requires_grad]
    return [out_ND.detach(), *torch.autograd.grad(out_ND, leaves, upstream)]


def _doubles(inputs: Inputs) -> Inputs:
    doubles = [one.detach().double() if one.is_floating_point() else one for one in inputs]
    return [two.requires_grad_(one.requires_grad) for one, two in zip(inputs, doubles, strict=True)]


@pytest.mark.parametrize(
    ("D", "F"), [(64, 32), (32, 96), (DEEP + 32, 32), (32, DEEP + 32)], ids=str
)
@pytest.mark.parametrize("N", [1, BLOCK, 2 * BLOCK + 9])
@BOTH
def test_outputs_and_gradients_equal_those_in_float64(
    N: int, D: int, F: int, dtype: torch.dtype
) -> None:
    inputs = _inputs(N, D=D, F=F, dtype=dtype)
    expected = _results(fused_experts._Experts.apply, _doubles(inputs))
    # Of the whole tensor: sums of 600 terms at most in float32, 2^-24 each; or three roundings to
    # bfloat16, 2^-9 each, of numbers ten times as large as the sum of a single token.
    bound = 1e-6 if dtype == torch.float32 else 5e-2
    for found, exact in zip(_results(_in_cache, inputs), expected, strict=True):
        assert (found.double() - exact).norm() <= bound * exact.norm()


def test_bfloat16_rounds_no_more_than_torchs_products_between() -> None:
    inputs = _inputs(dtype=torch.bfloat16)
    exact = _results(fused_experts._Experts.apply, _doubles(inputs))
    ways = _results(_in_cache, inputs), _results(fused_experts._Experts.apply, inputs)
    for one, other, expected in zip(*ways, exact, strict=True):
        errors = [(found.double() - expected).norm() for found in (one, other)]
        # Both round the same numbers to bfloat16, torch's way some more.
        assert errors[0] <= 1.05 * errors[1]


@BOTH
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    tokens_ND, gates_NK, experts_NK, *weights = inputs = _inputs(dtype=dtype)
    part = _in_cache(tokens_ND[7:], gates_NK[7:], experts_NK[7:], *weights)
    assert torch.equal(part, _in_cache(*inputs)[7:])


@BOTH
def test_weight_gradients_add_up_in_the_buffer_of_megatron(dtype: torch.dtype) -> None:
    inputs = _inputs(dtype=dtype)
    *_, w1_gradient, w2_gradient = _results(_in_cache, inputs)
    for weight in inputs[3:]:
        weight.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
    _results(_in_cache, inputs)
    for weight, gradient in zip(inputs[3:], (w1_gradient, w2_gradient), strict=True):
        assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        # Float32 sums of 265 terms that begin with 1 instead of 0, which bfloat16 rounds.
        bound = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(
            weight.main_grad,
            1 + gradient.float(),
            rtol=bound,
            atol=bound,  # type: ignore[attr-defined]
        )


@pytest.mark.parametrize("frozen", [(3,), (4,), (3, 4)])
@BOTH
def test_frozen_weights_get_no_gradient_and_change_no_other(
    frozen: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs = _inputs(dtype=dtype)
    whole = _results(_in_cache, inputs)[1:]
    for which in frozen:
        inputs[which].requires_grad_(False)
    rest = [one for i, one in zip((0, 1, 3, 4), whole, strict=True) if i not in frozen]
    for found, expected in zip(_results(_in_cache, inputs)[1:], rest, strict=True):
        assert torch.equal(found, expected)


def test_without_any_slot_the_sum_is_zero() -> None:
    inputs = _inputs(5)
    inputs[2].fill_(-1)
    for found in _results(_in_cache, inputs):
        assert not found.any()


def test_a_nan_of_one_token_reaches_its_own_sum_only() -> None:
    inputs = _inputs()
    inputs[0].data[3, 5] = torch.nan
    out_ND = _in_cache(*inputs)
    assert out_ND[3].isnan().all() and not out_ND[:3].isnan().any() and not out_ND[4:].isnan().any()


def test_loops_are_for_what_they_can_compute() -> None:
    tokens_ND, _, _, w1, w2 = _inputs(1)
    assert loop_experts.is_faster(tokens_ND, w1, w2)
    halves = tokens_ND.bfloat16(), w1.bfloat16(), w2.bfloat16()
    assert loop_experts.is_faster(*halves)
    assert not loop_experts.is_faster(tokens_ND.bfloat16(), w1, w2)
    assert not loop_experts.is_faster(tokens_ND.double(), w1.double(), w2.double())
    assert not loop_experts.is_faster(tokens_ND, w1, w2[:, :, :31])
    assert not loop_experts.is_faster(tokens_ND, w1, w2[:, :31])
    assert not loop_experts.is_faster(tokens_ND.to("meta"), w1, w2)
    torch.set_num_threads(2)
    assert not loop_experts.is_faster(tokens_ND, w1, w2)


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_are_not_among_the_tokens_are_refused(row: int) -> None:
    tokens_ND, _, _, w1, w2 = (one.detach() for one in _inputs(4))
    gates_S, rows_S, sizes = torch.ones(2), torch.tensor([0, row]), [0, 2, 0]
    both_SF, out_ND = torch.zeros(2, 64), torch.zeros_like(tokens_ND)
    with pytest.raises(IndexError):
        loop_experts.forward(tokens_ND, gates_S, rows_S, sizes, w1, w2)
    with pytest.raises(IndexError):
        loop_experts.backward(
            tokens_ND, gates_S, rows_S, sizes, w1, w2, both_SF, out_ND, None, None
        )


def test_shapes_and_types_that_do_not_belong_together_are_refused() -> None:
    tokens_ND, _, _, w1, w2 = (one.detach() for one in _inputs(4))
    gates_S, rows_S, sizes = torch.ones(2), torch.tensor([0, 1]), [0, 2, 0]
    right = (tokens_ND, gates_S, rows_S, sizes, w1, w2)
    loop_experts.forward(*right)
    wrong = {
        0: [tokens_ND[:, :32], tokens_ND.double()],
        1: [gates_S[1:], gates_S.double()],
        2: [rows_S[1:]],
        3: [[0, 2], [0, 3, 0], [3, -1, 0]],
        4: [w1[:, :32], w1[:2], w1.bfloat16()],
        5: [w2[:, :, :16], w2.bfloat16()],
    }
    for place, values in wrong.items():
        for value in values:
            with pytest.raises(AssertionError):
                loop_experts.forward(*right[:place], value, *right[place + 1 :])  # type: ignore[arg-type]
    both_SF, upstream_ND = torch.zeros(2, 64), torch.zeros_like(tokens_ND)
    with pytest.raises(AssertionError):
        loop_experts.backward(*right, both_SF[1:], upstream_ND, None, None)
    for upstream in (upstream_ND[1:], upstream_ND.bfloat16()):
        with pytest.raises(AssertionError):
            loop_experts.backward(*right, both_SF, upstream, None, None)
    with pytest.raises(AssertionError):
        loop_experts.backward(*right, both_SF.bfloat16(), upstream_ND, None, None)
    for total in (w2, w1[1:], w1.bfloat16()):
        with pytest.raises(AssertionError):
            loop_experts.backward(*right, both_SF, upstream_ND, total, None)
