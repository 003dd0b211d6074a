"""benchmarks/gradient_oracle.py: on a model so small that every response can be listed."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gradient_oracle import (
    ARMS,
    WHOLE,
    Group,
    Oracle,
    figures,
    gradients,
    products,
    stale,
)
from r3.models.shape import ModelShape
from tests.families import family

VOCABULARY, RESPONSE, EXPERTS, TOP_K, LAYERS = 3, 2, 3, 2, 2
PROMPT = [1, 0]


def tiny() -> Oracle:
    """Two layers of three experts on four channels, with random weights."""
    keys = dict(hidden_size=4, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
    keys |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=2)
    keys |= dict(num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=4)
    shapes = ModelShape.from_hf(family("qwen3_moe", **keys)).tensor_shapes
    kind: dict[str, Any] = dict(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = {name: torch.randn(*size, **kind).requires_grad_() for name, size in shapes.items()}
    return Oracle(weights, heads=2, kv_heads=1, top_k=TOP_K)


def all_responses(oracle: Oracle, *, flip: bool, bits: int | None) -> tuple[Group, Tensor, Tensor]:
    """All responses, weighted as an engine samples them: then a mean is an expectation.

    Args:
        flip: the engine sends the last token of the prompt to other experts in layer 0.

    Returns:
        The group, the engine's routes, and the rewards.
    """
    responses = itertools.product(range(VOCABULARY), repeat=RESPONSE)
    tokens_BT = torch.tensor([[*PROMPT, *response] for response in responses])
    rewards_B = torch.randn(len(tokens_BT), generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        _, routes = oracle(tokens_BT, None, bits)
        if flip:
            routes[:, 1, 0] = (routes[:, 1, 0] + 1) % EXPERTS
        mu_BT, _ = oracle(tokens_BT, routes, bits)
    sampled_BT = torch.zeros_like(mu_BT)
    sampled_BT[:, len(PROMPT) - 1 :] = 1
    probability_B = (mu_BT * sampled_BT).sum(1).exp()
    assert float(probability_B.sum()) == pytest.approx(1, abs=1e-12)
    advantages_B = len(tokens_BT) * probability_B * rewards_B
    return Group(tokens_BT, sampled_BT, mu_BT, routes, advantages_B), routes, rewards_B


def of_objective(
    oracle: Oracle, group: Group, routes: Tensor | None, bits: int | None, rewards_B: Tensor
) -> Tensor:
    """The gradient of the expected reward itself, sum over all responses of p(y) R(y)."""
    logprobs_BT, _ = oracle(group.tokens_BT, routes, bits)
    expected = ((logprobs_BT * group.sampled_BT).sum(1).exp() * rewards_B).sum()
    return joined(torch.autograd.grad(-expected, [*oracle.weights.values()]))


def joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def compared(
    *, flip: bool = False, bits: int | None = None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Gradients by arm, that of the objective with the engine's routes, and with live ones."""
    oracle = tiny()
    group, routes, rewards_B = all_responses(oracle, flip=flip, bits=bits)
    made = gradients(oracle, group, ARMS, bits).items()
    exact, own = (of_objective(oracle, group, each, bits, rewards_B) for each in (routes, None))
    return {name: joined(each) for name, each in made}, exact, own


def test_equal_engines_have_no_bias_in_any_arm() -> None:
    made, exact, _ = compared()
    for name, each in made.items():
        # Importance weights are float32, so exp(0) of a difference of 1e-8 may be 1 + 6e-8.
        assert distance(each, exact) < 1e-6, name


def test_a_planted_flip_biases_live_routing_and_replay_has_none() -> None:
    made, exact, own = compared(flip=True)
    # float64: sums of a few hundred terms.
    assert distance(made["engine"], exact) < 1e-12
    assert distance(made["replayed"], exact) < 1e-12
    assert distance(made["live"], exact) > 0.05
    # Weights of whole responses make live routing exact for the live policy, which is another aim.
    assert distance(made[WHOLE], own) < 1e-6
    assert distance(own, exact) > 0.05


def test_rounding_is_part_of_the_target_and_replay_keeps_its_bias() -> None:
    made, exact, _ = compared(bits=3)
    assert distance(made["engine"], exact) < 1e-12
    assert 1e-3 < distance(made["replayed"], exact) < 1


def test_a_second_update_changes_live_experts_only() -> None:
    oracle = tiny()
    group, _, _ = all_responses(oracle, flip=False, bits=None)
    still = stale(oracle, [group], 0.0)
    assert {facts["changed"] for facts in still.values()} == {0.0}
    assert all(facts["largest_ratio"] == 1 for facts in still.values())
    # A rate at which the routers of this model change their choice.
    moved = stale(oracle, [group], 0.3)
    assert moved["live"]["changed"] > 0
    assert moved["r2"]["changed"] == moved["r3"]["changed"] == 0
    assert moved["r2"] == moved["r3"]  # the engine chose what the policy chooses


def test_figures_estimate_bias_and_cosine_of_known_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    groups, size = 400, 50
    noise = torch.randn(groups, size, generator=generator).double()
    more = torch.randn(groups, size, generator=generator).double()
    target = torch.zeros(size).double()
    target[0] = 1.0
    bias = torch.zeros(size).double()
    bias[1] = 0.5
    # The same noise in both, as for arms on the same samples: the bias is seen through it.
    vectors = torch.stack([target + noise, target + bias + noise, target + noise + more])
    found = figures(products(vectors))
    assert float(found["bias2"][0]) == 0
    # Means of 400 have errors of about 0.1 per unit of noise: |mean noise|^2 is 0.125 of the norm.
    assert math.isclose(float(found["bias2"][1]), 0.25, abs_tol=0.1)
    assert abs(float(found["bias2"][2])) < 0.1  # a second noise is variance, not bias
    # |bias|^2 and |more|^2 over |target|^2 + |noise|^2
    assert float(found["apart"][1]) == pytest.approx(0.25 / 51, rel=0.1)
    assert float(found["apart"][2]) == pytest.approx(50 / 51, rel=0.1)
    assert float(found["variance"][1]) == pytest.approx(1)
    assert float(found["variance"][2]) == pytest.approx(2, abs=0.1)
    assert float(found["cosine"][1]) == pytest.approx(1 / 1.25**0.5, abs=0.1)
