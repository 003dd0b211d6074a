"""Losses against values worked out by hand, slow loops, and the identities they must obey."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from r3.algo.loss import (
    CORRECTIONS,
    LOSSES,
    Bounds,
    Correction,
    LossInputs,
    Sequences,
    aggregate,
    cispo,
    correct,
    gspo,
    kl_penalty,
    minirl,
    ppo_clip,
)
from r3.metrics import mismatch
from r3.tools.contract import loss_fault

pytestmark = pytest.mark.unit

BOUNDS = Bounds(0.2, 0.28, cap=5.0)
WIDE = Bounds(1.0, 1e9)
# float32 rounds at 6e-8 relative; exp, log and a product of order 1 lose a few of those.
CLOSE: dict[str, float] = {"rtol": 1e-6, "atol": 1e-7}


def random_batch(seed: int, num_tokens: int = 60) -> dict[str, Any]:
    """Three sequences with prompts (mask 0) of 5 tokens."""
    generator = torch.Generator().manual_seed(seed)
    old_N = -torch.rand(num_tokens, generator=generator) * 4
    mask_N = torch.ones(num_tokens)
    cu_seqlens = (0, 17, 41, num_tokens)
    weights_N = torch.zeros(num_tokens)
    for start, end in itertools.pairwise(cu_seqlens):
        mask_N[start : start + 5] = 0.0
        mask_N[end - 1] = 0.0
        weights_N[start + 5 : end - 1] = 1.0 / (end - start - 6)
    return {
        "old_N": old_N,
        "logprobs_N": old_N + 0.3 * torch.randn(num_tokens, generator=generator),
        "advantages_N": torch.randn(num_tokens, generator=generator) * mask_N,
        "mask_N": mask_N,
        "cu_seqlens": cu_seqlens,
        "weights_N": weights_N,
    }


def inputs_of(batch: dict[str, Any], **changes: Any) -> LossInputs:
    """The batch as inputs of a loss; the engine's log-probabilities are those of the old policy."""
    given: dict[str, Any] = {
        "logprobs_N": batch["logprobs_N"],
        "old_logprobs_N": batch["old_N"],
        "rollout_logprobs_N": batch["old_N"],
        "advantages_N": batch["advantages_N"],
        "loss_mask_N": batch["mask_N"],
        "sequences": Sequences(batch["cu_seqlens"]),
    }
    return LossInputs(**(given | changes))


def mismatch_inputs(
    old_N: Tensor, rollout_N: Tensor, mask_N: Tensor, cu_seqlens: tuple[int, ...]
) -> LossInputs:
    """What a correction reads; the rest is 0."""
    return LossInputs(
        logprobs_N=torch.zeros_like(old_N),
        old_logprobs_N=old_N,
        rollout_logprobs_N=rollout_N,
        advantages_N=torch.zeros_like(old_N),
        loss_mask_N=mask_N,
        sequences=Sequences(cu_seqlens),
    )


def by_hand(
    loss: Any,
    log_ratio: list[float],
    advantages: list[float],
    bounds: Bounds,
    *,
    log_w: float = 0.0,
    cu_seqlens: tuple[int, ...] | None = None,
) -> tuple[Tensor, list[bool], Tensor]:
    """Loss, clipped and the gradient of the summed loss, at pi_old = 1/e and mu = pi_old
    e^-log_w.
    """
    logprobs_N = (torch.tensor(log_ratio) - 1.0).requires_grad_()
    old_N = torch.full_like(logprobs_N, -1.0)
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N.detach(),
        rollout_logprobs_N=old_N.detach() - log_w,
        advantages_N=torch.tensor(advantages),
        loss_mask_N=torch.ones(len(log_ratio)),
        sequences=Sequences(cu_seqlens or (0, len(log_ratio))),
    )
    loss_N, clipped_N = loss(inputs, bounds)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    return loss_N.detach(), clipped_N.tolist(), gradient_N


def ppo(log_ratio: list[float], advantages: list[float]) -> tuple[Tensor, list[bool], Tensor]:
    return by_hand(ppo_clip, log_ratio, advantages, BOUNDS)


# --- policy losses ----------------------------------------------------------------------------


def test_ppo_clip_by_hand() -> None:
    up, down = math.log(1.5), math.log(0.5)
    loss_N, clipped_N, gradient_N = ppo(
        [0.0, up, up, down, down, 0.1], [1.0, 2.0, -2.0, 2.0, -2.0, 0.0]
    )
    # r, A:    1, 1    1.5, 2      1.5, -2   0.5, 2    0.5, -2       A = 0
    # -min(    1       1.28 * 2    -3        1         -0.8 * 2  )
    torch.testing.assert_close(loss_N, torch.tensor([-1.0, -2.56, 3.0, -1.0, 1.6, 0.0]), **CLOSE)
    assert clipped_N == [False, True, False, False, True, False]
    # -A r where not clipped: a token that has moved the wrong way is always pulled back.
    torch.testing.assert_close(gradient_N, torch.tensor([-1.0, 0.0, 3.0, -1.0, 0.0, 0.0]), **CLOSE)


def test_ppo_clip_survives_absurd_ratios() -> None:
    """log r is cut at 20: finite loss and gradient where float32's exp would have been infinite."""
    loss_N, _, gradient_N = ppo([500.0, -500.0, 500.0], [-1.0, 1.0, 1.0])
    torch.testing.assert_close(loss_N, torch.tensor([math.exp(20), -math.exp(-20), -1.28]), **CLOSE)
    assert gradient_N.tolist() == [0.0, 0.0, 0.0]


# The contract of every loss is in r3/tools/contract.py; test_contract.py runs it.


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_float32_whatever_comes_in(name: str) -> None:
    batch = random_batch(1)
    low_N = batch["logprobs_N"].bfloat16()
    half = inputs_of(batch, logprobs_N=low_N, old_logprobs_N=batch["old_N"].bfloat16())
    assert loss_fault(LOSSES[name](half, BOUNDS), half) == ""


def test_inputs_that_would_broadcast_are_refused() -> None:
    batch = random_batch(2)
    with pytest.raises(ValueError, match=r"'advantages': \[1\]"):
        inputs_of(batch, advantages_N=torch.ones(1))
    with pytest.raises(ValueError, match=r"'logprobs': \[60, 1\]"):
        inputs_of(batch, logprobs_N=batch["logprobs_N"][:, None])
    with pytest.raises(ValueError, match=r"expected one shape \[N\]"):
        inputs_of(
            {
                key: value[:, None] if torch.is_tensor(value) else value
                for key, value in batch.items()
            }
        )


def test_dual_clip_acts_on_negative_advantages_only() -> None:
    """arXiv 1912.09729, eq. 5, with c = 3: at r = 4 and A = -2 the loss is 6 instead of 8, without
    gradient.
    """
    ratios = [4.0, 2.5, 4.0, 0.5]
    advantages = [-2.0, -2.0, 2.0, -2.0]
    log_ratio = [math.log(ratio) for ratio in ratios]
    plain_N, plain_clipped, plain_gradient_N = by_hand(ppo_clip, log_ratio, advantages, BOUNDS)
    dual_N, clipped, gradient_N = by_hand(
        ppo_clip, log_ratio, advantages, BOUNDS._replace(dual=3.0)
    )
    torch.testing.assert_close(plain_N, torch.tensor([8.0, 5.0, -2.56, 1.6]), **CLOSE)
    torch.testing.assert_close(dual_N, torch.tensor([6.0, 5.0, -2.56, 1.6]), **CLOSE)
    assert plain_clipped == [False, False, True, True] and clipped == [True, False, True, True]
    torch.testing.assert_close(plain_gradient_N, torch.tensor([8.0, 5.0, 0.0, 0.0]), **CLOSE)
    torch.testing.assert_close(gradient_N, torch.tensor([0.0, 5.0, 0.0, 0.0]), **CLOSE)


def test_gspo_by_hand() -> None:
    """Ratios 1.10 .95 1.30 .90 make s = (1.22265)^(1/4) = 1.0515; masked tokens and the other
    answer have no part in it.
    """
    logprobs_N = torch.tensor([9.0, 1.10, 0.95, 1.30, 0.90, 1.0, 2.0]).log().requires_grad_()
    advantages_N = torch.tensor([5.0, 1.0, 1.0, 1.0, 1.0, 5.0, -1.0])
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        old_logprobs_N=torch.zeros(7),
        rollout_logprobs_N=torch.zeros(7),
        advantages_N=advantages_N,
        loss_mask_N=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]),
        sequences=Sequences((0, 5, 7)),
    )
    loss_N, clipped_N = gspo(inputs, WIDE)
    s = (1.10 * 0.95 * 1.30 * 0.90) ** 0.25
    assert s == pytest.approx(1.0515, abs=5e-5)
    torch.testing.assert_close(-loss_N[1:5], torch.full((4,), s), **CLOSE)
    torch.testing.assert_close(loss_N[6], torch.tensor(2.0), **CLOSE)
    assert not clipped_N.any()
    # The sequence form: d s / d log pi_t = s / |y|, so under the mean over the answer's tokens each
    # has -A s / 4.
    (gradient_N,) = torch.autograd.grad(loss_N[1:5].mean(), logprobs_N)
    torch.testing.assert_close(gradient_N[1:5], torch.full((4,), -s / 4), **CLOSE)
    # The whole answer is clipped, the tokens below 1 as well; A < 0 with s = 2 is pulled back.
    loss_N, clipped_N = gspo(inputs, Bounds(3e-4, 4e-4))
    assert clipped_N.tolist() == [False, True, True, True, True, False, False]
    torch.testing.assert_close(-loss_N[1:5], torch.full((4,), 1.0004), **CLOSE)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    assert gradient_N[1:5].tolist() == [0.0] * 4 and gradient_N[6] > 0


def test_sequences_cut_over_ranks_are_added_up() -> None:
    """Two ranks with half of each answer, as context parallelism cuts them: the ratio is the whole
    answer's on both.
    """
    ratios = torch.tensor([1.10, 0.95, 1.30, 0.90, 1.5, 0.5])  # answers of 4 and 2
    halves = (torch.tensor([0, 3, 4]), torch.tensor([1, 2, 5]))
    partial: list[Tensor] = []

    def losses(rows: Tensor, add_up: Any) -> Tensor:
        inputs = LossInputs(
            logprobs_N=ratios[rows].log(),
            old_logprobs_N=torch.zeros(3),
            rollout_logprobs_N=torch.zeros(3),
            advantages_N=-torch.ones(3),
            loss_mask_N=torch.ones(3),
            sequences=Sequences((0, 2, 3), add_up),
        )
        return gspo(inputs, WIDE)[0]

    def collect(sums: Tensor) -> Tensor:
        partial.append(sums)
        return sums

    alone = [losses(rows, collect) for rows in halves]
    together = [losses(rows, lambda _: partial[0] + partial[1]) for rows in halves]
    first, second = (1.10 * 0.95 * 1.30 * 0.90) ** 0.25, 0.75**0.5
    for loss_N in together:
        torch.testing.assert_close(loss_N, torch.tensor([first, first, second]), **CLOSE)
    assert (alone[0] - together[0]).abs().min() > 0.02  # the sums are needed


def test_cispo_by_hand() -> None:
    """The weight is bounded, and every token keeps its gradient: -A min(r, 5), with no lower
    bound.
    """
    log_ratio = [math.log(0.01), math.log(2.0), math.log(9.0), math.log(9.0)]
    loss_N, clipped, gradient_N = by_hand(cispo, log_ratio, [1.0, 1.0, 1.0, -2.0], Bounds(1.0, 4.0))
    torch.testing.assert_close(gradient_N, torch.tensor([-0.01, -2.0, -5.0, 10.0]), **CLOSE)
    assert clipped == [False, False, True, True]
    torch.testing.assert_close(loss_N, gradient_N * (torch.tensor(log_ratio) - 1.0), **CLOSE)


def test_minirl_by_hand() -> None:
    """w = pi_old / mu = 2: weights pi / mu = 2 r up to 5; stale tokens are masked by r = pi /
    pi_old alone.
    """
    log_ratio = [0.0, math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5), math.log(4.0)]
    advantages = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    bounds = Bounds(0.2, 0.27, cap=5.0)
    loss_N, clipped, gradient_N = by_hand(
        minirl, log_ratio, advantages, bounds, log_w=math.log(2.0)
    )
    assert clipped == [False, True, False, False, True, False]
    torch.testing.assert_close(gradient_N, torch.tensor([-2.0, 0.0, 3.0, -1.0, 0.0, 5.0]), **CLOSE)
    torch.testing.assert_close(loss_N, gradient_N * (torch.tensor(log_ratio) - 1.0), **CLOSE)


def test_minirl_below_its_cap_has_the_gradient_of_ppo_with_exact_weights() -> None:
    """sg[pi / mu] = sg[r] w, and r grad log pi = grad r: two ways to write one update."""
    log_ratio = (0.3 * torch.randn(40, generator=torch.Generator().manual_seed(0))).tolist()
    advantages = torch.randn(40, generator=torch.Generator().manual_seed(1)).tolist()
    bounds = Bounds(0.2, 0.28, cap=1e9)
    _, masked, gradient_N = by_hand(minirl, log_ratio, advantages, bounds, log_w=0.4)
    _, clipped, ppo_gradient_N = by_hand(ppo_clip, log_ratio, advantages, bounds)
    assert masked == clipped and any(masked)
    # Exp of sums
    torch.testing.assert_close(gradient_N, math.exp(0.4) * ppo_gradient_N, rtol=1e-5, atol=1e-7)


# --- weights against the engine ---------------------------------------------------------------

# Two answers with masked tokens around them; w = .5 1.5 4 | 1.0005 .9995, products 3 and
# 0.99999975.
W = [9.0, 0.5, 1.5, 4.0, 0.1, 1.0005, 0.9995, 7.0]
W_MASK = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def weights(correction: Correction, w: list[float] = W) -> tuple[list[float], list[bool]]:
    """Weights and cut at the loss tokens."""
    rollout_N = torch.full((len(w),), -2.0)
    mask_N = torch.tensor(W_MASK)
    old_N = rollout_N + torch.tensor(w).log()
    found = correct(correction, mismatch_inputs(old_N, rollout_N, mask_N, (0, 4, 8)))
    assert not found.cut_N[mask_N == 0].any()
    on = mask_N > 0
    return found.weights_N[on].tolist(), found.cut_N[on].tolist()


@pytest.mark.parametrize(
    ("name", "expected", "cut"),
    [
        ("token_tis", [0.5, 1.5, 2.0, 1.0005, 0.9995], [0, 0, 1, 0, 0]),
        ("sequence_tis", [2.0, 2.0, 2.0, 1.0, 1.0], [1, 1, 1, 0, 0]),
        ("token_mis", [0.5, 1.5, 0.0, 1.0005, 0.9995], [0, 0, 1, 0, 0]),
        ("sequence_mis", [0.0, 0.0, 0.0, 1.0, 1.0], [1, 1, 1, 0, 0]),
        ("geometric_mask", [0.0, 0.0, 0.0, 1.0, 1.0], [1, 1, 1, 0, 0]),  # 3^(1/3) = 1.44
        ("icepop", [0.5, 1.5, 4.0, 1.0005, 0.9995], [0, 0, 0, 0, 0]),
    ],
)
def test_corrections_by_hand(name: str, expected: list[float], cut: list[int]) -> None:
    found, found_cut = weights(CORRECTIONS[name])
    assert found == pytest.approx(expected, rel=1e-6)  # float32: exp of a log
    assert found_cut == [bool(value) for value in cut]


def test_a_product_of_ratios_shrinks_with_the_length_and_a_mean_does_not() -> None:
    """Ratios of 0.997: the product over 2,000 tokens leaves 0.25 % of the loss, and cuts nothing.

    `correction/weight_mean` shows it; `correction/cut_frac` and `mismatch/weight` do not.
    """
    old_N = torch.full((2000,), math.log(0.997))
    inputs = mismatch_inputs(old_N, torch.zeros(2000), torch.ones(2000), (0, 2000))
    found = {name: correct(each, inputs) for name, each in CORRECTIONS.items()}
    # float32: 2,000 rounded logarithms are added
    assert found["sequence_tis"].weights_N[0] == pytest.approx(0.997**2000, rel=1e-3)
    assert not found["sequence_tis"].cut_N.any() and found["sequence_mis"].cut_N.all()
    assert found["token_tis"].weights_N.mean() == pytest.approx(0.997, rel=1e-5)


def test_every_correction_is_tested_by_hand() -> None:
    names = {
        mark.args[1][i][0]
        for mark in test_corrections_by_hand.pytestmark
        for i in range(len(mark.args[1]))
    }  # type: ignore[attr-defined]
    assert names == CORRECTIONS.keys()


def test_bounds_of_corrections_are_met_from_both_sides() -> None:
    w = [1.0, 0.49, 0.51, 4.99, 1.0, 5.01, 1.0, 1.0]
    assert weights(CORRECTIONS["icepop"], w)[1] == [True, False, False, True, False]
    # Means of log w: +-0.0009 is inside of 0.999 .. 1.001, and so is a product of 1 made of 4 and
    # 1/4; +0.0011 is not.
    geometric = CORRECTIONS["geometric_mask"]
    inside = [1.0, 4.0, 0.25, 1.0, 1.0, math.exp(0.0009), math.exp(0.0009), 1.0]
    assert weights(geometric, inside)[0] == [1.0] * 5
    outside = [
        1.0,
        math.exp(-0.0011),
        math.exp(-0.0011),
        math.exp(-0.0011),
        1.0,
        math.exp(0.0011),
        math.exp(0.0011),
        1.0,
    ]
    assert weights(geometric, outside)[0] == [0.0] * 5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_without_mismatch_is_a_no_op(name: str) -> None:
    batch = random_batch(3)
    found = correct(CORRECTIONS[name], inputs_of(batch, old_logprobs_N=batch["old_N"].clone()))
    assert (found.weights_N == 1.0).all() and not found.cut_N.any()


def test_truncated_importance_sampling_without_a_cap_is_the_exact_ratio() -> None:
    batch = random_batch(3)
    uncapped = CORRECTIONS["token_tis"]._replace(high=math.inf)
    found = correct(uncapped, inputs_of(batch, old_logprobs_N=batch["logprobs_N"]))
    torch.testing.assert_close(
        found.weights_N, (batch["logprobs_N"] - batch["old_N"]).exp(), **CLOSE
    )
    far = mismatch_inputs(torch.tensor([400.0]), torch.tensor([0.0]), torch.ones(1), (0, 1))
    absurd = correct(uncapped, far)
    assert absurd.weights_N.isfinite().all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_carry_no_gradient_and_masked_tokens_have_no_part(name: str) -> None:
    batch = random_batch(4)
    old_N = batch["logprobs_N"].clone().requires_grad_()
    found = correct(CORRECTIONS[name], inputs_of(batch, old_logprobs_N=old_N))
    assert not found.weights_N.requires_grad and found.weights_N.dtype == torch.float32
    off = batch["mask_N"] == 0
    changed_N = old_N.detach().clone()
    changed_N[off] = -300.0
    again = correct(CORRECTIONS[name], inputs_of(batch, old_logprobs_N=changed_N))
    assert torch.isfinite(again.weights_N).all() and not again.cut_N[off].any()
    assert torch.equal(again.weights_N[~off], found.weights_N[~off])


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (-1.0, 2.0), (2.0, 2.0), (0.0, math.nan)])
def test_corrections_refuse_bounds_that_keep_nothing(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=f"got {low} and {high}"):
        correct(
            CORRECTIONS["icepop"]._replace(low=low, high=high),
            mismatch_inputs(torch.zeros(2), torch.zeros(2), torch.ones(2), (0, 2)),
        )


def test_one_token_at_minus_5_and_minus_15() -> None:
    """The engine gave it e^-5, the policy e^-15: k3 of the panel is e^-10 + 10 - 1 = 9.000, F(2)
    and ESS are 1.
    """
    parts = mismatch(torch.tensor([-15.0]), torch.tensor([-5.0]), torch.ones(1))
    figures = {name: type(part).reduce([part]) for name, part in parts.items()}
    assert figures["k3"] == pytest.approx(9.000045, abs=1e-6)
    assert (figures["f2"], figures["ess"], figures["abs_max"]) == (1.0, pytest.approx(1.0), 10.0)
    # The penalty of the same pair, pi = e^-5 against ref = e^-15, is the same number.
    assert float(
        kl_penalty(torch.tensor([-5.0]), torch.tensor([-15.0]), estimator="k3")
    ) == pytest.approx(9.000045)


# --- KL to the reference ----------------------------------------------------------------------


def test_kl_by_hand() -> None:
    logprobs_N = torch.tensor([-1.0, -1.0, -1.0])
    ref_N = torch.tensor([-1.0, -3.0, -0.5])  # D = 0, 2, -0.5
    expected = {
        "k1": [0.0, 2.0, -0.5],
        "k2": [0.0, 2.0, 0.125],
        "k3": [0.0, math.exp(-2) + 1.0, math.exp(0.5) - 1.5],
    }
    for estimator, values in expected.items():
        kl_N = kl_penalty(logprobs_N, ref_N, estimator=estimator)  # type: ignore[arg-type]
        torch.testing.assert_close(kl_N, torch.tensor(values), **CLOSE)


def test_kl_gradients_by_hand() -> None:
    """k1: 1, whatever D. k2: D. k3: 1 - ref/pi."""
    difference_N = torch.tensor([0.0, 2.0, -0.5])
    expected = {"k1": torch.ones(3), "k2": difference_N, "k3": 1 - torch.exp(-difference_N)}
    for estimator, gradient_N in expected.items():
        logprobs_N = (difference_N - 3.0).requires_grad_()
        ref_N = torch.full((3,), -3.0, requires_grad=True)
        kl_N = kl_penalty(logprobs_N, ref_N, estimator=estimator)  # type: ignore[arg-type]
        kl_N.sum().backward()
        assert ref_N.grad is None
        torch.testing.assert_close(logprobs_N.grad, gradient_N, **CLOSE)


def test_kl_gradients_are_those_of_the_divergences_they_claim() -> None:
    """Expectation over a vocabulary, in full: sum_x pi(x) grad k(x) against autograd of the exact
    divergence.
    """
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(7, generator=generator).requires_grad_()
    ref_V = torch.randn(7, generator=generator).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    reverse = (logprobs_V.exp() * (logprobs_V - ref_V)).sum()
    forward = (ref_V.exp() * (ref_V - logprobs_V)).sum()
    for estimator, divergence in (("k1", 0.0 * reverse), ("k2", reverse), ("k3", forward)):
        penalty_V = kl_penalty(logprobs_V, ref_V, estimator=estimator)  # type: ignore[arg-type]
        sampled = (
            logprobs_V.detach().exp() * penalty_V
        ).sum()  # pi weighs, as sampling would, without gradient
        (gradient_V,) = torch.autograd.grad(sampled, logits_V, retain_graph=True)
        (expected_V,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
        # A softmax more than elsewhere
        torch.testing.assert_close(gradient_V, expected_V, rtol=1e-5, atol=1e-6)


def test_k3_keeps_its_digits_where_policies_are_close() -> None:
    """D = 1e-4: k3 = 5e-9, a twelfth of what float32's exp(-D) - 1 + D can resolve."""
    kl_N = kl_penalty(torch.tensor([1e-4]), torch.tensor([0.0]), estimator="k3")
    # The last bit of D itself is 1.5e-3 of the value.
    torch.testing.assert_close(kl_N, torch.tensor([5e-9]), rtol=5e-3, atol=0.0)


def test_kl_is_finite_for_absurd_inputs_and_refuses_unknown_names() -> None:
    for estimator in ("k1", "k2", "k3"):
        kl_N = kl_penalty(
            torch.tensor([-900.0, 0.0]), torch.tensor([0.0, -900.0]), estimator=estimator
        )
        assert torch.isfinite(kl_N).all()
    with pytest.raises(ValueError, match="'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), estimator="k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'ref': \[1\]"):
        kl_penalty(torch.zeros(2), torch.zeros(1), estimator="k1")


# --- aggregation ------------------------------------------------------------------------------


def test_aggregate_by_hand() -> None:
    """Sequences of 1 and 3 loss tokens. token: (8 + 1 + 2 + 3) / 4; sequence: (8 + 2) / 2;
    constant: 14 / (2 * 10).
    """
    loss_N = torch.tensor([99.0, 8.0, 99.0, 1.0, 2.0, 3.0])
    mask_N = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    weights_N = torch.tensor([0.0, 1.0, 0.0, 1 / 3, 1 / 3, 1 / 3])
    counts: dict[str, int] = {"num_loss_tokens": 4, "num_sequences": 2}
    assert float(aggregate(loss_N, mask_N, weights_N, kind="token", **counts)) == 3.5
    assert float(aggregate(loss_N, mask_N, weights_N, kind="sequence", **counts)) == pytest.approx(
        5.0, rel=1e-6
    )
    constant = aggregate(
        loss_N, mask_N, weights_N, kind="constant", max_response_tokens=10, **counts
    )
    assert float(constant) == pytest.approx(0.7, rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
@pytest.mark.parametrize("correction", ["sequence_tis", "icepop"])
def test_shares_add_up_however_the_sequences_are_split(
    name: str, kind: Any, correction: str
) -> None:
    """Micro-batch and rank permutation: one batch, or each sequence alone in any order, give one
    loss and gradient.
    """
    batch = random_batch(2)
    mu_N = batch["old_N"] + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(9))
    counts: dict[str, Any] = {
        "kind": kind,
        "num_loss_tokens": int(batch["mask_N"].sum()),
        "num_sequences": 3,
        "max_response_tokens": 30,
    }

    def share(pieces: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([torch.arange(a, b) for a, b in pieces])
        logprobs_N = batch["logprobs_N"].clone().requires_grad_()
        sequences = Sequences((0, *torch.tensor([b - a for a, b in pieces]).cumsum(0).tolist()))
        inputs = LossInputs(
            logprobs_N=logprobs_N[rows],
            old_logprobs_N=batch["old_N"][rows],
            rollout_logprobs_N=mu_N[rows],
            advantages_N=batch["advantages_N"][rows],
            loss_mask_N=batch["mask_N"][rows],
            sequences=sequences,
        )
        loss_N, _ = LOSSES[name](inputs, BOUNDS)
        loss_N = loss_N * correct(CORRECTIONS[correction], inputs).weights_N
        loss = aggregate(loss_N, batch["mask_N"][rows], batch["weights_N"][rows], **counts)
        (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
        return loss.detach(), gradient_N

    first, second, third = itertools.pairwise(batch["cu_seqlens"])
    whole = share([first, second, third])
    for split in (
        [[third], [first], [second]],
        [[second, first], [third]],
        [[third, second, first]],
    ):
        shares = [share(pieces) for pieces in split]
        # The sum of 42 float32 terms in another order.
        torch.testing.assert_close(sum(loss for loss, _ in shares), whole[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(sum(gradient_N for _, gradient_N in shares), whole[1], **CLOSE)


def test_a_local_mean_would_have_been_noticed() -> None:
    """Negative control of the test above: with each share divided by its own count the sum is
    another number.
    """
    batch = random_batch(0)
    loss_N, mask_N, weights_N = batch["logprobs_N"], batch["mask_N"], batch["weights_N"]
    whole = aggregate(loss_N, mask_N, weights_N, kind="token", num_loss_tokens=42, num_sequences=3)
    local = [
        aggregate(
            loss_N[a:b],
            mask_N[a:b],
            weights_N[a:b],
            kind="token",
            num_loss_tokens=int(mask_N[a:b].sum()),
            num_sequences=1,
        )
        for a, b in itertools.pairwise(batch["cu_seqlens"])
    ]
    assert abs(float(sum(local)) / 3 - float(whole)) > 1e-3


def test_aggregate_is_float32_and_guards() -> None:
    ones_N = torch.ones(3)
    counts: dict[str, int] = {"num_loss_tokens": 3, "num_sequences": 1}
    assert (
        aggregate(ones_N.bfloat16(), ones_N, ones_N, kind="token", **counts).dtype == torch.float32
    )
    with pytest.raises(ValueError, match="'mean'"):
        aggregate(ones_N, ones_N, ones_N, kind="mean", **counts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 loss tokens"):
        aggregate(ones_N, ones_N, ones_N, kind="token", num_loss_tokens=0, num_sequences=1)
    with pytest.raises(ValueError, match="1 sequences of at most 0"):
        aggregate(ones_N, ones_N, ones_N, kind="constant", **counts)
    with pytest.raises(ValueError, match="0 sequences"):
        aggregate(ones_N, ones_N, ones_N, kind="sequence", num_loss_tokens=3, num_sequences=0)
    with pytest.raises(ValueError, match=r"'loss_mask': \[1\]"):
        aggregate(ones_N, ones_N[:1], ones_N, kind="token", **counts)
