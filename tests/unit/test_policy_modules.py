"""Parts of the policy that need no ranks: attention with grouped heads, norm, router logits."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from r3.layers import CausalAttention, RMSNorm, Rotation, packed_params
from r3.models.shape import ModelShape
from r3.policy.build import megatron_settings, rounded_gating
from tests.families import FAMILIES, HYBRID, family
from tests.tiny import tiny_config


def test_router_logits_can_be_rounded_like_the_engine() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator).requires_grad_()
    weight = torch.randn(8, 4, generator=generator)
    logits = rounded_gating(lambda x: x @ weight, torch.bfloat16)(hidden)
    exact = hidden @ weight
    assert logits.dtype == torch.float32
    assert torch.equal(logits, exact.bfloat16().float()) and not torch.equal(logits, exact)
    (found,), (expected,) = (torch.autograd.grad(one.sum(), hidden) for one in (logits, exact))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_norm_and_its_gradients_equal_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    """Tolerance: relative to the largest value, some last bits of sums of 40 numbers.

    The weight's share in the mean of the gradient, if forgotten, would move it by 0.1.
    """
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(5, 8, 32, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(32, generator=generator)).to(dtype)

    def results(
        norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], kind: torch.dtype
    ) -> list[torch.Tensor]:
        inputs = [one.detach().to(kind).requires_grad_() for one in (x, weight)]
        out = norm(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, gradient.to(kind))]

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm: Any = SimpleNamespace(weight=weight, eps=1e-2)
        return RMSNorm.forward(norm, x)

    found = results(ours, dtype)
    expected = results(lambda x, weight: F.rms_norm(x, (32,), weight, 1e-2), torch.float64)
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rotation_and_its_gradient_turn_pairs(
    dtype: torch.dtype, tolerance: float, interleaved: bool
) -> None:
    """Tolerance: sums of two products of numbers below 4, of 2^-24 or 2^-9 each.

    Another pairing, or turning the gradient the same way as the values, would move them by 1.
    """
    generator = torch.Generator().manual_seed(0)
    positions_N, inverse = torch.tensor([0, 1, 2, 3, 0, 1, 2]), torch.tensor([1.0, 0.3, 0.01, 0.0])
    x, gradient = (torch.randn(7, 3, 8, generator=generator).to(dtype) for _ in range(2))
    turns = torch.polar(
        torch.ones(7, 1, 4).double(), torch.outer(positions_N, inverse).double()[:, None]
    )

    def turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        first, second = heads.double().chunk(2, -1)
        both = torch.complex(first, second) * turns
        return torch.cat([both.real, both.imag], -1)

    # Pairs of neighbours come out half a head apart, and the rest of a head as it was.
    order = [0, 4, 1, 5, 2, 6, 3, 7] if interleaved else list(range(8))
    given = torch.cat([x[..., order], x], -1) if interleaved else x
    given.requires_grad_()
    out = Rotation(positions_N, inverse, dtype, interleaved=interleaved)(given)
    if interleaved:
        assert torch.equal(out[..., 8:], x)
    (found,) = torch.autograd.grad(out[..., :8], given, gradient)
    out, found = out[..., :8], found[..., [order.index(i) for i in range(8)]]
    for one, exact in ((out, turned(x, turns)), (found, turned(gradient, turns.conj()))):
        assert one.dtype == dtype
        assert (one.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_of_equal_length_attend_in_one_call_with_the_same_bits(
    dtype: torch.dtype,
) -> None:
    from megatron.core.transformer import TransformerConfig

    sizes: dict[str, Any] = dict(num_layers=1, hidden_size=32, num_attention_heads=4)
    attention = CausalAttention(TransformerConfig(**sizes, attention_dropout=0.0))
    lengths = [5, 70, 70, 70, 3, 70]
    borders = [0, *itertools.accumulate(lengths)]
    generator = torch.Generator().manual_seed(0)
    gradient, *qkv = (
        torch.randn(borders[-1], heads, 8, generator=generator).to(dtype) for heads in (4, 4, 2, 2)
    )
    leaves = [one.requires_grad_() for one in qkv]

    def results(rows: slice, borders: list[int]) -> list[torch.Tensor]:
        inputs = [leaf[rows] for leaf in leaves]
        out = attention(*inputs, None, packed_params(borders, torch.device("cpu")))
        return [out, *torch.autograd.grad(out, inputs, gradient[rows].flatten(1)[:, None])]

    with torch.profiler.profile() as profile:
        packed = results(slice(None), borders)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::scaled_dot_product_attention"] == 4  # 5; 70, 70, 70; 3; 70
    for first, last in itertools.pairwise(borders):
        alone = results(slice(first, last), [0, last - first])
        assert all(torch.equal(x[first:last], y) for x, y in zip(packed, alone, strict=True))
    # A sequence that saw its neighbour would differ.
    together = results(slice(5, 145), [0, 140])
    assert not torch.equal(together[0][70:], packed[0][75:145])


# GLM-4.5's config.json needs keys that transformers adds.
@pytest.mark.parametrize("name", [each for each in FAMILIES if not each.startswith("glm-4.5")])
def test_checkpoints_keep_their_layout_where_layers_are_alike(name: str) -> None:
    """Megatron keeps layers apart if told so, or if a list names the MoE layers."""
    shape = ModelShape.from_hf(family(name))
    settings = megatron_settings(tiny_config(), shape)
    apart = settings.get("hetereogenous_dist_checkpoint", False)
    assert apart == (name in HYBRID or isinstance(settings.get("moe_layer_freq"), list))
