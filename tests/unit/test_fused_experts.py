"""The fused experts compute what one expert after the other computes, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from r3.policy.fused_experts import _Experts, chosen_experts, sum_by_token

N, K, E, D, WIDTH = 37, 3, 6, 16, 24


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tokens, gates, experts (some on another rank, expert 4 without tokens), w1 and w2."""
    generator = torch.Generator().manual_seed(0)
    experts_NK = torch.rand(N, E, generator=generator).argsort(-1)[:, :K]
    experts_NK = experts_NK.masked_fill(experts_NK == 4, -1)
    tokens_ND = torch.randn(N, D, generator=generator)
    gates_NK = torch.rand(N, K, generator=generator)
    w1, w2 = (
        torch.randn(E, *size, generator=generator) / 4 for size in ((2 * WIDTH, D), (D, WIDTH))
    )
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [tokens_ND.to(dtype), gates_NK.to(wide), w1.to(dtype), w2.to(dtype)]
    tokens_ND, gates_NK, w1, w2 = (leaf.requires_grad_() for leaf in leaves)
    return [tokens_ND, gates_NK, experts_NK, w1, w2]


def _plain(
    tokens_ND: torch.Tensor,
    gates_NK: torch.Tensor,
    experts_NK: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    rows = []
    for token, gates, experts in zip(tokens_ND, gates_NK, experts_NK.tolist(), strict=True):
        row = torch.zeros_like(token)
        for gate, expert in zip(gates, experts, strict=True):
            if expert >= 0:
                gate_part, up = (w1[expert] @ token).chunk(2)
                row = row + gate * (w2[expert] @ (F.silu(gate_part) * up))
        rows.append(row)
    return torch.stack(rows)


def _results(function: object, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of tokens, gates and weights for a fixed upstream gradient."""
    assert callable(function)
    out_ND = function(*inputs)
    upstream = torch.linspace(-1, 1, out_ND.numel()).view_as(out_ND).to(out_ND.dtype)
    leaves = [one for one in inputs if one.requires_grad]
    return [out_ND, *torch.autograd.grad(out_ND, leaves, upstream)]


def test_outputs_and_gradients_equal_the_formula_in_float64() -> None:
    # float64, sums of some tens of terms near 1: rounding stays below 1e-12
    for found, expected in zip(
        _results(_Experts.apply, _inputs(torch.float64)),
        _results(_plain, _inputs(torch.float64)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_outputs_and_gradients_round_as_their_data_type(dtype: torch.dtype, bound: float) -> None:
    # relative to the whole tensor: a few roundings of 2^-24, or of 2^-9
    exact = [one.detach().double() if one.is_floating_point() else one for one in _inputs(dtype)]
    for one in exact:
        one.requires_grad_(one.is_floating_point())
    for found, expected in zip(
        _results(_Experts.apply, _inputs(dtype)), _results(_plain, exact), strict=True
    ):
        error = (found.double() - expected).norm() / expected.norm()
        assert 0 < error <= bound


def test_a_recomputed_forward_gives_the_same_bits() -> None:
    inputs = _inputs(torch.float32)
    with torch.no_grad():
        once = _Experts.apply(*inputs)
    assert torch.equal(once, _Experts.apply(*inputs))


def test_weight_gradients_add_up_in_the_buffer_of_megatron() -> None:
    inputs = _inputs(torch.float32)
    *_, w1_gradient, w2_gradient = _results(_Experts.apply, inputs)
    *_, w1, w2 = inputs
    for weight in (w1, w2):
        weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    _results(_Experts.apply, inputs)
    for weight, gradient in ((w1, w1_gradient), (w2, w2_gradient)):
        # 1 + gradient is rounded to float32 once more
        torch.testing.assert_close(weight.main_grad, 1 + gradient, rtol=1e-6, atol=1e-6)
        assert weight.grad_added_to_main_grad, "otherwise Megatron adds what backward returned"


def test_without_tokens_the_weights_still_have_a_gradient_of_zero() -> None:
    tokens_ND, gates_NK, experts_NK, w1, w2 = _inputs(torch.float32)
    empty = [tokens_ND[:0], gates_NK[:0], experts_NK[:0], w1, w2]
    out_ND = _Experts.apply(*empty)
    assert out_ND.shape == (0, D)
    out_ND.sum().backward()
    assert not w1.grad.any() and not w2.grad.any()


def test_chosen_experts_are_those_of_the_map() -> None:
    expected_NK = torch.rand(N, E, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :K]
    routing_map = torch.zeros(N, E, dtype=torch.bool).scatter(1, expected_NK, True)
    assert torch.equal(chosen_experts(routing_map, K), expected_NK.sort(-1).values)


def test_a_token_with_another_number_of_experts_is_an_error() -> None:
    # As many experts in all: only the rows are wrong.
    routing_map = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    with pytest.raises(AssertionError, match=r"\[1, 3\] experts each in the routing map, not 2"):
        chosen_experts(routing_map, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_ranks_are_added_in_float32_or_their_own_type(dtype: torch.dtype) -> None:
    # 1 + 2^-40 is no float32; 1 + 3 * 2^-9 rounds differently if each term is rounded to bfloat16.
    small = {torch.float64: 2**-40, torch.float32: 2**-20, torch.bfloat16: 2**-9}[dtype]
    sums_MD = torch.tensor([[1.0], [small], [5.0], [small], [small]], dtype=dtype)
    out_ND = sum_by_token(sums_MD, torch.tensor([0, 0, 2, 0, 0]), 3)
    expected = torch.tensor([[1 + 3 * small], [0.0], [5.0]], dtype=torch.float64).to(dtype)
    assert out_ND.dtype == dtype and torch.equal(out_ND, expected)
