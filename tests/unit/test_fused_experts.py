"""Both ways of fused experts compute what one expert after the other computes, backward too."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from r3 import extras

N, K, E, D, WIDTH = 37, 3, 6, 16, 24
dispatch = extras.dispatch()
fused_experts_cpu, fused_experts_cuda = (
    sys.modules[extras.experts(is_cuda=is_cuda).__module__] for is_cuda in (False, True)
)


_in_a_loop = fused_experts_cpu._Experts.apply  # what CPU runs use


def _sorted(
    tokens_ND: torch.Tensor, gates_NK: torch.Tensor, experts_NK: torch.Tensor, *weights: Any
) -> torch.Tensor:
    """What CUDA runs use, here with plain torch in place of the Triton kernels."""
    count = int((experts_NK >= 0).sum()) + 2  # ranks may know only how many there are at most
    deferred = fused_experts_cuda.deferred(*weights)
    return fused_experts_cuda._Experts.apply(tokens_ND, gates_NK, experts_NK, count, *deferred)


BOTH = pytest.mark.parametrize("experts", [_in_a_loop, _sorted], ids=["in a loop", "sorted"])


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


def _plain(*inputs: torch.Tensor) -> torch.Tensor:
    (tokens_ND, gates_NK, experts_NK, w1, w2), rows = inputs, []
    for token, gates, experts in zip(tokens_ND, gates_NK, experts_NK.tolist(), strict=True):
        row = torch.zeros_like(token)
        for gate, expert in zip(gates, experts, strict=True):
            if expert >= 0:
                gate_part, up = (w1[expert] @ token).chunk(2)
                row = row + gate * (w2[expert] @ (F.silu(gate_part) * up))
        rows.append(row)
    return torch.stack(rows)


def _results(function: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of tokens, gates and weights for a fixed upstream gradient."""
    out_ND = function(*inputs)
    upstream = torch.linspace(-1, 1, out_ND.numel()).view_as(out_ND).to(out_ND.dtype)
    leaves = [one for one in inputs if one.requires_grad]
    return [out_ND, *torch.autograd.grad(out_ND, leaves, upstream)]


def test_outputs_and_gradients_equal_the_formula_in_float64() -> None:
    # float64, sums of some tens of terms near 1: rounding stays below 1e-12
    found, expected = (_results(each, _inputs(torch.float64)) for each in (_in_a_loop, _plain))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@BOTH
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_outputs_and_gradients_round_as_their_data_type(
    dtype: torch.dtype, bound: float, experts: Any
) -> None:
    # relative to the whole tensor: a few roundings of 2^-24, or of 2^-9
    exact = [one.detach().double() if one.is_floating_point() else one for one in _inputs(dtype)]
    for one in exact:
        one.requires_grad_(one.is_floating_point())
    pairs = zip(_results(experts, _inputs(dtype)), _results(_plain, exact), strict=True)
    for found, expected in pairs:
        error = (found.double() - expected).norm() / expected.norm()
        assert 0 < error <= bound


@BOTH
def test_a_recomputed_forward_gives_the_same_bits(experts: Any) -> None:
    inputs = _inputs(torch.float32)
    with torch.no_grad():
        once = experts(*inputs)
    assert torch.equal(once, experts(*inputs))


@BOTH
def test_a_token_has_the_same_bits_in_any_batch(experts: Any) -> None:
    *tokens, w1, w2 = inputs = _inputs(torch.float32)
    alone_ND = experts(*(each[5:] for each in tokens), w1, w2)
    # CPU products sum in another order in another batch: rounding of float32 to 2^-24.
    torch.testing.assert_close(alone_ND, experts(*inputs)[5:], rtol=0, atol=1e-6)


@BOTH
@pytest.mark.parametrize("frozen", [(3,), (4,), (3, 4)], ids=["w1", "w2", "both"])
def test_gradients_are_the_same_bits_beside_frozen_weights(
    frozen: tuple[int, ...], experts: Any
) -> None:
    _, *expected = _results(experts, _inputs(torch.float32))  # of tokens, gates, w1 and w2
    inputs = _inputs(torch.float32)
    for number in frozen:
        inputs[number].requires_grad_(False)
        expected[number - 1] = torch.empty(0)
    _, *found = _results(experts, inputs)
    assert len(found) == 4 - len(frozen)
    kept = [gradient for gradient in expected if gradient.numel()]
    assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))


def test_rows_behind_the_last_expert_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_ND, gates_NK, experts_NK, w1, w2 = inputs = _inputs(torch.float32)

    def exactly(*_inputs: torch.Tensor) -> torch.Tensor:
        count, deferred = int((experts_NK >= 0).sum()), fused_experts_cuda.deferred(w1, w2)
        return fused_experts_cuda._Experts.apply(tokens_ND, gates_NK, experts_NK, count, *deferred)

    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN
    try:
        assert torch.empty(1).isnan()
        pairs = zip(_results(_sorted, inputs), _results(exactly, inputs), strict=True)
        assert all(torch.equal(found, expected) for found, expected in pairs)
        in_order = fused_experts_cuda._sorted

        def unmasked(experts_NK: torch.Tensor, num_experts: int, count: int) -> Any:
            order = in_order(experts_NK, num_experts, count)
            return order._replace(places_NK=order.places_NK.clamp(max=count - 1))

        monkeypatch.setattr(fused_experts_cuda, "_sorted", unmasked)
        assert _sorted(*inputs).isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_faulty_order_shows_in_outputs() -> None:
    inputs = _inputs(torch.float32)
    tokens_ND, gates_NK, experts_NK, *weights = inputs
    wrong = _sorted(tokens_ND, gates_NK.roll(1, 0), experts_NK, *weights)
    assert (wrong - _sorted(*inputs)).norm() > 0.1 * wrong.norm()


def test_weight_gradients_add_up_in_the_buffer_of_megatron() -> None:
    inputs = _inputs(torch.float32)
    *_, w1_gradient, w2_gradient = _results(_in_a_loop, inputs)
    *_, w1, w2 = inputs
    for weight in (w1, w2):
        weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    _results(_in_a_loop, inputs)
    for weight, gradient in ((w1, w1_gradient), (w2, w2_gradient)):
        # 1 + gradient is rounded to float32 once more
        torch.testing.assert_close(weight.main_grad, 1 + gradient, rtol=1e-6, atol=1e-6)
        assert weight.grad_added_to_main_grad, "otherwise Megatron adds what backward returned"


@BOTH
@pytest.mark.parametrize("tokens", [0, 2])
def test_without_slots_the_weights_still_have_a_gradient_of_zero(tokens: int, experts: Any) -> None:
    tokens_ND, gates_NK, experts_NK, w1, w2 = _inputs(torch.float32)
    elsewhere_NK = torch.full_like(experts_NK[:tokens], -1)
    out_ND = experts(tokens_ND[:tokens], gates_NK[:tokens], elsewhere_NK, w1, w2)
    assert torch.equal(out_ND, torch.zeros(tokens, D))
    out_ND.sum().backward()
    assert not w1.grad.any() and not w2.grad.any()


def test_chosen_experts_are_those_of_the_map() -> None:
    expected_NK = torch.rand(N, E, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :K]
    routing_map = torch.zeros(N, E, dtype=torch.bool).scatter(1, expected_NK, True)
    expected_NK = expected_NK.sort(-1).values
    assert torch.equal(dispatch.chosen_experts(routing_map, K), expected_NK)
    assert torch.equal(dispatch.first_set(routing_map, K), expected_NK)  # on CUDA


def test_a_token_with_another_number_of_experts_is_an_error() -> None:
    # As many experts in all: only the rows are wrong.
    routing_map = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    with pytest.raises(AssertionError, match=r"\[1, 3\] experts each in the routing map, not 2"):
        dispatch.chosen_experts(routing_map, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_ranks_are_added_in_float32_or_their_own_type(dtype: torch.dtype) -> None:
    # 1 + 2^-40 is no float32; 1 + 3 * 2^-9 rounds differently if each term is rounded to bfloat16.
    small = {torch.float64: 2**-40, torch.float32: 2**-20, torch.bfloat16: 2**-9}[dtype]
    sums_MD = torch.tensor([[1.0], [small], [5.0], [small], [small]], dtype=dtype)
    places_NR = torch.tensor([[0, 1, 3, 4], [5, 5, 5, 5], [5, 2, 5, 5]])
    out_ND = torch.ops.r3.sum_rows(sums_MD, places_NR)
    expected = torch.tensor([[1 + 3 * small], [0.0], [5.0]], dtype=torch.float64).to(dtype)
    assert out_ND.dtype == dtype and torch.equal(out_ND, expected)


def test_sizes_count_the_tokens_and_slots_of_every_rank() -> None:
    experts_NK = torch.tensor([[0, 1], [2, 5], [1, 4], [4, 5]])
    owned_RNK = dispatch.owned_by_rank(experts_NK, ranks=3, local=2)
    every = torch.zeros(4, dtype=torch.bool)
    assert dispatch.needs_of(owned_RNK, every, 2).sizes_R2.tolist() == [[2, 3], [1, 1], [3, 4]]
    # The third token's route is not known: it goes to every rank, with two slots at most.
    unknown = torch.tensor([False, False, True, False])
    needs = dispatch.needs_of(owned_RNK, unknown, 2)
    assert needs.sizes_R2.tolist() == [[2, 4], [2, 3], [3, 5]]
    rows = dispatch.rows_by_rank(needs.needed_RN, 7, 2)
    assert rows.tokens_M.tolist() == [0, 2, 1, 2, 1, 2, 3]
    assert rows.firsts_M.tolist() == [0, 0, 2, 2, 4, 4, 4]
    assert rows.places_NR.tolist() == [[0, 7, 7], [7, 2, 4], [1, 3, 5], [7, 7, 6]]
