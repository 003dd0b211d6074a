"""The loop that computes an engine's experts; tests/e2e compares it with vLLM's kernel."""

from __future__ import annotations

import pytest
import torch

from r3.kernels.sampled_experts import experts
from r3.kernels.tiles import TILE
from tests.processor import needs_tiles

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread"), needs_tiles]

N, K, E, D, F = 21, 3, 5, 64, 32
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """Experts' [outputs, inputs] as [outputs / 16, inputs, 16], in the shape they had."""
    return weight.unflatten(1, (-1, 16)).transpose(2, 3).contiguous().view(weight.shape)


def _layer(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens, w13, w2, gates and experts, of which the fourth gets all tokens and the last none."""
    random = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(E - 2, generator=random) for _ in range(N)])
    chosen[:, 1] = E - 2
    return (
        torch.randn(N, D, generator=random).to(dtype),
        (torch.randn(E, 2 * F, D, generator=random) / 4).to(dtype),
        (torch.randn(E, D, F, generator=random) / 4).to(dtype),
        torch.rand(N, K, generator=random),
        chosen.int(),
    )


def _run(layer: tuple[torch.Tensor, ...]) -> torch.Tensor:
    tokens, w13, w2, gates, chosen = layer
    return experts(tokens, _packed(w13), _packed(w2), gates, chosen)


@BOTH
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, N])
def test_sums_over_experts_equal_the_formula_in_float64(dtype: torch.dtype, tokens: int) -> None:
    """Float32 sums of 64 terms: 64 roundings at worst. In bfloat16 the activation and the result
    are rounded, each by 2^-9 of itself. A wrong expert, or a column for another, changes all."""
    rows, w13, w2, gates, chosen = _layer(dtype)
    layer = rows[:tokens], w13, w2, gates[:tokens], chosen[:tokens]
    x, w13, w2, gates = (each.double() for each in layer[:4])
    exact = torch.zeros(tokens, D, dtype=torch.float64)
    for k in range(K):
        of_slot = layer[4][:, k].long()
        both = torch.einsum("nd,nfd->nf", x, w13[of_slot])
        inner = torch.nn.functional.silu(both[:, :F]) * both[:, F:]
        exact += gates[:, k : k + 1] * torch.einsum("nf,ndf->nd", inner, w2[of_slot])
    found = _run(layer)
    assert found.dtype == dtype and found.shape == exact.shape
    bound = 64 * 2**-24 if dtype == torch.float32 else 3 * 2**-9
    if tokens:
        assert (found.double() - exact).abs().max() <= bound * exact.abs().max()


@BOTH
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    tokens, w13, w2, gates, chosen = _layer(dtype)
    whole = _run((tokens, w13, w2, gates, chosen))
    for rows in (slice(3, 4), slice(2, 12)):
        assert torch.equal(_run((tokens[rows], w13, w2, gates[rows], chosen[rows])), whole[rows])


def test_a_number_that_is_not_one_stays_visible() -> None:
    tokens, *layer = _layer(torch.float32)
    tokens[4, 7] = torch.nan
    found = _run((tokens, *layer))
    assert found[4].isnan().all() and not found[:4].isnan().any()


def test_a_token_may_have_an_expert_twice() -> None:
    """An expert then has more slots than there are tokens."""
    tokens, w13, w2, gates, chosen = _layer(torch.float32)
    twice = chosen[:, 1:2].expand(N, K).contiguous()
    found = _run((tokens, w13, w2, gates, twice))
    once = _run((tokens, w13, w2, gates.sum(1, keepdim=True), twice[:, :1].contiguous()))
    torch.testing.assert_close(found, once, rtol=1e-5, atol=1e-5)  # sums of three float32 numbers


@pytest.mark.parametrize("expert", [-1, E])
def test_an_expert_that_the_layer_does_not_have_is_refused(expert: int) -> None:
    """Its weights would be the memory of something else."""
    layer = _layer(torch.float32)
    layer[4][5, 2] = expert
    with pytest.raises(IndexError, match="does not have"):
        _run(layer)


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    tokens, w13, w2, gates, chosen = _layer(torch.float32)
    gaps = torch.randn(N, 2 * D)[:, ::2]
    for wrong, message in (
        ((tokens[1:], w13, w2, gates, chosen), "sizes"),
        ((tokens, w13, w2[1:], gates, chosen), "sizes"),
        ((tokens, w13[:, : 2 * F - 2], w2, gates, chosen), "sizes"),
        ((tokens, w13, w2, gates[:, 1:], chosen), "sizes"),
        ((tokens[:, :-8], w13[..., :-8], w2[:, :-8], gates, chosen), f"multiple of {TILE}"),
        ((tokens.bfloat16(), w13, w2, gates, chosen), "types"),
        ((tokens, w13, w2, gates.double(), chosen), "types"),
        ((tokens, w13, w2, gates, chosen.long()), "int64"),
        ((gaps, w13, w2, gates, chosen), "gaps"),
    ):
        with pytest.raises(AssertionError, match=message):
            experts(*wrong)
