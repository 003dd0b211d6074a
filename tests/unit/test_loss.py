"""Losses against values worked out by hand, slow loops, and the identities they must obey."""

import itertools
import math
from dataclasses import replace
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
from r3.tools import loss_fault
from tests.tiny import loss_inputs as made

BOUNDS = Bounds(0.2, 0.28, cap=5.0)
WIDE = Bounds(1.0, 1e9)
# float32 rounds at 6e-8 relative; exp, log and a product of order 1 lose a few of those.
CLOSE: dict[str, float] = {"rtol": 1e-6, "atol": 1e-7}


def random_batch(seed: int) -> tuple[LossInputs, Tensor]:
    """Three sequences with prompts (mask 0) of 5 tokens, and the weights of their tokens."""
    generator, num_tokens = torch.Generator().manual_seed(seed), 60
    old_N = -torch.rand(num_tokens, generator=generator) * 4
    mask_N, weights_N = torch.ones(num_tokens), torch.zeros(num_tokens)
    borders = (0, 17, 41, num_tokens)
    for start, end in itertools.pairwise(borders):
        mask_N[start : start + 5] = 0.0
        mask_N[end - 1] = 0.0
        weights_N[start + 5 : end - 1] = 1.0 / (end - start - 6)
    inputs = made(
        old_N + 0.3 * torch.randn(num_tokens, generator=generator),
        borders,
        old_logprobs_N=old_N,
        advantages_N=torch.randn(num_tokens, generator=generator) * mask_N,
        loss_mask_N=mask_N,
    )
    return inputs, weights_N


def by_hand(
    loss: Any,
    log_ratio: list[float],
    advantages: list[float],
    bounds: Bounds = BOUNDS,
    *,
    log_w: float = 0.0,
) -> tuple[Tensor, list[bool], Tensor]:
    """Loss, clipped and the gradient of the summed loss, at pi_old = 1/e and mu = pi_old
    e^-log_w.
    """
    logprobs_N = (torch.tensor(log_ratio) - 1.0).requires_grad_()
    old_N = torch.full_like(logprobs_N, -1.0).detach()
    inputs = made(
        logprobs_N,
        old_logprobs_N=old_N,
        rollout_logprobs_N=old_N - log_w,
        advantages_N=torch.tensor(advantages),
    )
    loss_N, clipped_N = loss(inputs, bounds)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    return loss_N.detach(), clipped_N.tolist(), gradient_N


# --- policy losses ----------------------------------------------------------------------------


def test_ppo_clip_by_hand() -> None:
    up, down = math.log(1.5), math.log(0.5)
    advantages = [1.0, 2.0, -2.0, 2.0, -2.0, 0.0]
    ratios = [0.0, up, up, down, down, 0.1]
    loss_N, clipped_N, gradient_N = by_hand(ppo_clip, ratios, advantages)
    # r, A:    1, 1    1.5, 2      1.5, -2   0.5, 2    0.5, -2       A = 0
    # -min(    1       1.28 * 2    -3        1         -0.8 * 2  )
    torch.testing.assert_close(loss_N, torch.tensor([-1.0, -2.56, 3.0, -1.0, 1.6, 0.0]), **CLOSE)
    assert clipped_N == [False, True, False, False, True, False]
    # -A r where not clipped: a token that has moved the wrong way is always pulled back.
    torch.testing.assert_close(gradient_N, torch.tensor([-1.0, 0.0, 3.0, -1.0, 0.0, 0.0]), **CLOSE)


def test_ppo_clip_survives_absurd_ratios() -> None:
    """log r is cut at 20: finite loss and gradient where float32's exp would have been infinite."""
    loss_N, _, gradient_N = by_hand(ppo_clip, [500.0, -500.0, 500.0], [-1.0, 1.0, 1.0])
    torch.testing.assert_close(loss_N, torch.tensor([math.exp(20), -math.exp(-20), -1.28]), **CLOSE)
    assert gradient_N.tolist() == [0.0, 0.0, 0.0]


# The contract of every loss is in r3/tools/contract.py; test_contract.py runs it.


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_float32_whatever_comes_in(name: str) -> None:
    inputs, _ = random_batch(1)
    low_N, old_N = inputs.logprobs_N.bfloat16(), inputs.old_logprobs_N.bfloat16()
    half = replace(inputs, logprobs_N=low_N, old_logprobs_N=old_N)
    assert loss_fault(LOSSES[name](half, BOUNDS), half) == ""


def test_inputs_that_would_broadcast_are_refused() -> None:
    inputs, _ = random_batch(2)
    with pytest.raises(ValueError, match=r"'advantages': \[1\]"):
        replace(inputs, advantages_N=torch.ones(1))
    with pytest.raises(ValueError, match=r"'logprobs': \[60, 1\]"):
        replace(inputs, logprobs_N=inputs.logprobs_N[:, None])
    with pytest.raises(ValueError, match=r"expected one shape \[N\]"):
        made(inputs.logprobs_N[:, None])


def test_dual_clip_acts_on_negative_advantages_only() -> None:
    """arXiv 1912.09729, eq. 5, with c = 3: at r = 4 and A = -2 the loss is 6 instead of 8, without
    gradient.
    """
    given = [math.log(ratio) for ratio in (4.0, 2.5, 4.0, 0.5)], [-2.0, -2.0, 2.0, -2.0]
    plain_N, plain_clipped, plain_gradient_N = by_hand(ppo_clip, *given)
    dual_N, clipped, gradient_N = by_hand(ppo_clip, *given, BOUNDS._replace(dual=3.0))
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
    inputs = made(
        logprobs_N,
        (0, 5, 7),
        advantages_N=torch.tensor([5.0, 1.0, 1.0, 1.0, 1.0, 5.0, -1.0]),
        loss_mask_N=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]),
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
        sequences = Sequences((0, 2, 3), add_up)
        inputs = made(ratios[rows].log(), advantages_N=-torch.ones(3), sequences=sequences)
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
    _, clipped, ppo_gradient_N = by_hand(ppo_clip, log_ratio, advantages)
    assert masked == clipped and any(masked)
    # Exp of sums
    torch.testing.assert_close(gradient_N, math.exp(0.4) * ppo_gradient_N, rtol=1e-5, atol=1e-7)


# --- weights against the engine ---------------------------------------------------------------

# Two answers with masked tokens around them; w = .5 1.5 4 | 1.0005 .9995, products 3 and
# 0.99999975.
W = [9.0, 0.5, 1.5, 4.0, 0.1, 1.0005, 0.9995, 7.0]
W_MASK = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def mismatched(old_N: Tensor, rollout_N: Tensor, mask_N: Tensor, *borders: int) -> LossInputs:
    """What a correction reads; the rest is 0."""
    return made(
        torch.zeros_like(old_N),
        borders,
        old_logprobs_N=old_N,
        rollout_logprobs_N=rollout_N,
        loss_mask_N=mask_N,
    )


def weights(correction: Correction, w: list[float] = W) -> tuple[list[float], list[bool]]:
    """Weights and cut at the loss tokens."""
    rollout_N, mask_N = torch.full((len(w),), -2.0), torch.tensor(W_MASK)
    old_N = rollout_N + torch.tensor(w).log()
    found = correct(correction, mismatched(old_N, rollout_N, mask_N, 0, 4, 8))
    assert not found.cut_N[mask_N == 0].any()
    on = mask_N > 0
    return found.weights_N[on].tolist(), found.cut_N[on].tolist()


CORRECTED: dict[str, tuple[list[float], list[int]]] = {
    "token_tis": ([0.5, 1.5, 2.0, 1.0005, 0.9995], [0, 0, 1, 0, 0]),
    "sequence_tis": ([2.0, 2.0, 2.0, 1.0, 1.0], [1, 1, 1, 0, 0]),
    "token_mis": ([0.5, 1.5, 0.0, 1.0005, 0.9995], [0, 0, 1, 0, 0]),
    "sequence_mis": ([0.0, 0.0, 0.0, 1.0, 1.0], [1, 1, 1, 0, 0]),
    "geometric_mask": ([0.0, 0.0, 0.0, 1.0, 1.0], [1, 1, 1, 0, 0]),  # 3^(1/3) = 1.44
    "icepop": ([0.5, 1.5, 4.0, 1.0005, 0.9995], [0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_by_hand(name: str) -> None:
    (found, found_cut), (expected, cut) = weights(CORRECTIONS[name]), CORRECTED[name]
    assert found == pytest.approx(expected, rel=1e-6)  # float32: exp of a log
    assert found_cut == [bool(value) for value in cut]


def test_a_product_of_ratios_shrinks_with_the_length_and_a_mean_does_not() -> None:
    """Ratios of 0.997: the product over 2,000 tokens leaves 0.25 % of the loss, and cuts nothing.

    `correction/weight_mean` shows it; `correction/cut_frac` and `mismatch/weight` do not.
    """
    old_N = torch.full((2000,), math.log(0.997))
    inputs = mismatched(old_N, torch.zeros(2000), torch.ones(2000))
    found = {name: correct(each, inputs) for name, each in CORRECTIONS.items()}
    # float32: 2,000 rounded logarithms are added
    assert found["sequence_tis"].weights_N[0] == pytest.approx(0.997**2000, rel=1e-3)
    assert not found["sequence_tis"].cut_N.any() and found["sequence_mis"].cut_N.all()
    assert found["token_tis"].weights_N.mean() == pytest.approx(0.997, rel=1e-5)


def test_bounds_of_corrections_are_met_from_both_sides() -> None:
    w = [1.0, 0.49, 0.51, 4.99, 1.0, 5.01, 1.0, 1.0]
    assert weights(CORRECTIONS["icepop"], w)[1] == [True, False, False, True, False]
    # Means of log w: +-0.0009 is inside of 0.999 .. 1.001, and so is a product of 1 made of 4 and
    # 1/4; +0.0011 is not.
    geometric = CORRECTIONS["geometric_mask"]
    inside = [1.0, 4.0, 0.25, 1.0, 1.0, math.exp(0.0009), math.exp(0.0009), 1.0]
    assert weights(geometric, inside)[0] == [1.0] * 5
    below, above = [math.exp(-0.0011)] * 3, [math.exp(0.0011)] * 2
    outside = [1.0, *below, 1.0, *above, 1.0]
    assert weights(geometric, outside)[0] == [0.0] * 5


def test_truncated_importance_sampling_without_a_cap_is_the_exact_ratio() -> None:
    inputs, _ = random_batch(3)
    uncapped = CORRECTIONS["token_tis"]._replace(high=math.inf)
    found = correct(uncapped, replace(inputs, old_logprobs_N=inputs.logprobs_N))
    ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).exp()
    torch.testing.assert_close(found.weights_N, ratio_N, **CLOSE)
    far = mismatched(torch.tensor([400.0]), torch.tensor([0.0]), torch.ones(1))
    assert correct(uncapped, far).weights_N.isfinite().all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_carry_no_gradient_and_masked_tokens_have_no_part(name: str) -> None:
    inputs, _ = random_batch(4)
    equal = correct(CORRECTIONS[name], inputs)  # pi_old is mu
    assert (equal.weights_N == 1.0).all() and not equal.cut_N.any()
    old_N, off = inputs.logprobs_N.clone().requires_grad_(), ~inputs.on_N
    found = correct(CORRECTIONS[name], replace(inputs, old_logprobs_N=old_N))
    assert not found.weights_N.requires_grad and found.weights_N.dtype == torch.float32
    changed_N = old_N.detach().masked_fill(off, -300.0)
    again = correct(CORRECTIONS[name], replace(inputs, old_logprobs_N=changed_N))
    assert torch.isfinite(again.weights_N).all() and not again.cut_N[off].any()
    assert torch.equal(again.weights_N[~off], found.weights_N[~off])


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (-1.0, 2.0), (2.0, 2.0), (0.0, math.nan)])
def test_corrections_refuse_bounds_that_keep_nothing(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=f"got {low} and {high}"):
        correct(CORRECTIONS["icepop"]._replace(low=low, high=high), made(torch.zeros(2)))


# --- KL to the reference ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [0.0, 2.0, -0.5], [1.0, 1.0, 1.0]),
        ("k2", [0.0, 2.0, 0.125], [0.0, 2.0, -0.5]),  # D
        (
            "k3",
            [0.0, math.exp(-2) + 1.0, math.exp(0.5) - 1.5],
            [0.0, 1 - math.exp(-2), 1 - math.exp(0.5)],
        ),
    ],
)
def test_kl_and_its_gradient_by_hand(
    estimator: Any, values: list[float], gradients: list[float]
) -> None:
    """k3's gradient is 1 - ref/pi."""
    logprobs_N = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    ref_N = torch.tensor([-1.0, -3.0, -0.5], requires_grad=True)  # D = 0, 2, -0.5
    kl_N = kl_penalty(logprobs_N, ref_N, estimator=estimator)
    torch.testing.assert_close(kl_N, torch.tensor(values), **CLOSE)
    kl_N.sum().backward()
    assert ref_N.grad is None
    torch.testing.assert_close(logprobs_N.grad, torch.tensor(gradients), **CLOSE)


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
        # pi weighs, as sampling would, without gradient
        sampled = (logprobs_V.detach().exp() * penalty_V).sum()
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
        far_N = torch.tensor([-900.0, 0.0])
        assert torch.isfinite(kl_penalty(far_N, far_N.flip(0), estimator=estimator)).all()
    with pytest.raises(ValueError, match="'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), estimator="k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'ref': \[1\]"):
        kl_penalty(torch.zeros(2), torch.zeros(1), estimator="k1")


# --- aggregation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("token", (8 + 1 + 2 + 3) / 4), ("sequence", (8 + 2) / 2), ("constant", 14 / (2 * 10))],
)
def test_aggregate_by_hand(kind: Any, expected: float) -> None:
    """Sequences of 1 and 3 loss tokens, of at most 10; float32 whatever comes in."""
    loss_N = torch.tensor([99.0, 8.0, 99.0, 1.0, 2.0, 3.0])
    mask_N = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    weights_N = torch.tensor([0.0, 1.0, 0.0, 1 / 3, 1 / 3, 1 / 3])
    counts = {"num_loss_tokens": 4, "num_sequences": 2, "max_response_tokens": 10}
    for given_N in (loss_N, loss_N.bfloat16()):
        found = aggregate(given_N, mask_N, weights_N, kind=kind, **counts)
        assert found.dtype == torch.float32 and float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
@pytest.mark.parametrize("correction", ["sequence_tis", "icepop"])
def test_shares_add_up_however_the_sequences_are_split(
    name: str, kind: Any, correction: str
) -> None:
    """Micro-batch and rank permutation: one batch, or each sequence alone in any order, give one
    loss and gradient.
    """
    batch, weights_N = random_batch(2)
    noise_N = torch.randn(60, generator=torch.Generator().manual_seed(9))
    mu_N = batch.old_logprobs_N + 0.1 * noise_N
    counts: dict[str, Any] = {"num_loss_tokens": int(batch.loss_mask_N.sum()), "num_sequences": 3}

    def share(pieces: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([torch.arange(a, b) for a, b in pieces])
        logprobs_N = batch.logprobs_N.clone().requires_grad_()
        inputs = made(
            logprobs_N[rows],
            (0, *itertools.accumulate(b - a for a, b in pieces)),
            old_logprobs_N=batch.old_logprobs_N[rows],
            rollout_logprobs_N=mu_N[rows],
            advantages_N=batch.advantages_N[rows],
            loss_mask_N=batch.loss_mask_N[rows],
        )
        loss_N, _ = LOSSES[name](inputs, BOUNDS)
        loss_N = loss_N * correct(CORRECTIONS[correction], inputs).weights_N
        given = (loss_N, inputs.loss_mask_N, weights_N[rows])
        loss = aggregate(*given, kind=kind, max_response_tokens=30, **counts)
        (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
        return loss.detach(), gradient_N

    first, second, third = itertools.pairwise(batch.sequences.cu_seqlens)
    whole = share([first, second, third])
    splits = [[third], [first], [second]], [[second, first], [third]], [[third, second, first]]
    for split in splits:
        shares = [share(pieces) for pieces in split]
        # The sum of 42 float32 terms in another order.
        torch.testing.assert_close(sum(loss for loss, _ in shares), whole[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(sum(gradient_N for _, gradient_N in shares), whole[1], **CLOSE)


def test_a_local_mean_would_have_been_noticed() -> None:
    """Negative control of the test above: with each share divided by its own count the sum is
    another number.
    """
    batch, weights_N = random_batch(0)

    def share(a: int, b: int, tokens: int, sequences: int) -> float:
        parts = [each[a:b] for each in (batch.logprobs_N, batch.loss_mask_N, weights_N)]
        counts = {"num_loss_tokens": tokens, "num_sequences": sequences}
        return float(aggregate(*parts, kind="token", **counts))

    whole = share(0, 60, 42, 3)
    borders = itertools.pairwise(batch.sequences.cu_seqlens)
    local = [share(a, b, int(batch.loss_mask_N[a:b].sum()), 1) for a, b in borders]
    assert abs(sum(local) / 3 - whole) > 1e-3


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kind": "mean"}, "'mean'"),
        ({"num_loss_tokens": 0}, "0 loss tokens"),
        ({"kind": "constant"}, "1 sequences of at most 0"),
        ({"kind": "sequence", "num_sequences": 0}, "0 sequences"),
        ({"loss_mask_N": torch.ones(1)}, r"'loss_mask': \[1\]"),
    ],
)
def test_aggregate_refuses(changes: dict[str, Any], fault: str) -> None:
    given: dict[str, Any] = {"kind": "token", "num_loss_tokens": 3, "num_sequences": 1} | changes
    mask_N = given.pop("loss_mask_N", torch.ones(3))
    with pytest.raises(ValueError, match=fault):
        aggregate(torch.ones(3), mask_N, torch.ones(3), **given)
