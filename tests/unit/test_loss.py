"""Losses against values worked out by hand, slow loops, and the identities they must obey."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from r3.loss import LOSSES, aggregate, kl_penalty, ppo_clip, tis_weights_N

pytestmark = pytest.mark.unit

CLIP: dict[str, float] = {"clip_low": 0.2, "clip_high": 0.28}
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


def ppo(log_ratio: list[float], advantages: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, clipped and the gradient of the summed loss, at pi_old = 1/e."""
    logprobs_N = (torch.tensor(log_ratio) - 1.0).requires_grad_()
    loss_N, clipped_N = ppo_clip(
        logprobs_N,
        torch.full_like(logprobs_N, -1.0),
        torch.tensor(advantages),
        loss_mask_N=torch.ones(len(log_ratio)),
        cu_seqlens=(0, len(log_ratio)),
        **CLIP,
    )
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    return loss_N.detach(), clipped_N, gradient_N


# --- policy losses ------------------------------------------------------------------------------------------


def test_ppo_clip_by_hand() -> None:
    up, down = math.log(1.5), math.log(0.5)
    loss_N, clipped_N, gradient_N = ppo([0.0, up, up, down, down, 0.1], [1.0, 2.0, -2.0, 2.0, -2.0, 0.0])
    # r, A:    1, 1    1.5, 2      1.5, -2   0.5, 2    0.5, -2       A = 0
    # -min(    1       1.28 * 2    -3        1         -0.8 * 2  )
    torch.testing.assert_close(loss_N, torch.tensor([-1.0, -2.56, 3.0, -1.0, 1.6, 0.0]), **CLOSE)
    assert clipped_N.tolist() == [False, True, False, False, True, False]
    # -A r where not clipped: a token that has moved the wrong way is always pulled back.
    torch.testing.assert_close(gradient_N, torch.tensor([-1.0, 0.0, 3.0, -1.0, 0.0, 0.0]), **CLOSE)


def test_ppo_clip_survives_absurd_ratios() -> None:
    """log r is cut at 20: finite loss and gradient where float32's exp would have been infinite."""
    loss_N, _, gradient_N = ppo([500.0, -500.0, 500.0], [-1.0, 1.0, 1.0])
    torch.testing.assert_close(loss_N, torch.tensor([math.exp(20), -math.exp(-20), -1.28]), **CLOSE)
    assert gradient_N.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_gradient_on_policy_is_the_policy_gradient(name: str, kind: Any) -> None:
    """At pi = pi_old every loss has the gradient of -sum A log pi under the same aggregation."""
    batch = random_batch(0)
    logprobs_N = batch["old_N"].clone().requires_grad_()
    counts: dict[str, Any] = {"kind": kind, "num_loss_tokens": 42, "num_sequences": 3}
    loss_N, clipped_N = LOSSES[name](
        logprobs_N,
        logprobs_N,  # the same tensor: no gradient may flow through the old policy
        batch["advantages_N"],
        loss_mask_N=batch["mask_N"],
        cu_seqlens=batch["cu_seqlens"],
        **CLIP,
    )
    loss = aggregate(loss_N, batch["mask_N"], batch["weights_N"], **counts)
    reinforce = aggregate(-batch["advantages_N"] * logprobs_N, batch["mask_N"], batch["weights_N"], **counts)
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    (expected_N,) = torch.autograd.grad(reinforce, logprobs_N)
    assert not clipped_N.any()
    assert expected_N.abs().max() > 0
    torch.testing.assert_close(gradient_N, expected_N, **CLOSE)


@pytest.mark.parametrize("name", LOSSES)
def test_contract_of_every_loss(name: str) -> None:
    """Float32 out of bfloat16; a bool that is False off the mask; masked tokens have no influence; finite."""
    batch = random_batch(1)
    common: dict[str, Any] = {"loss_mask_N": batch["mask_N"], "cu_seqlens": batch["cu_seqlens"], **CLIP}
    low_N = batch["logprobs_N"].bfloat16()
    loss_N, clipped_N = LOSSES[name](low_N, batch["old_N"].bfloat16(), batch["advantages_N"], **common)
    assert loss_N.dtype == torch.float32
    assert clipped_N.dtype == torch.bool
    assert loss_N.shape == clipped_N.shape == low_N.shape

    off = batch["mask_N"] == 0
    logprobs_N, old_N = batch["logprobs_N"].clone(), batch["old_N"].clone()
    # An advantage at masked tokens too: a loss may not rely on it being 0 there.
    reference_N, _ = LOSSES[name](logprobs_N, old_N, batch["advantages_N"] + 1, **common)
    logprobs_N[off], old_N[off] = 0.0, -300.0  # far outside any trust region
    logprobs_N.requires_grad_()
    loss_N, clipped_N = LOSSES[name](logprobs_N, old_N, batch["advantages_N"] + 1, **common)
    assert not clipped_N[off].any()
    assert torch.isfinite(loss_N).all()
    torch.testing.assert_close(loss_N[~off], reference_N[~off], rtol=0.0, atol=0.0)
    loss = aggregate(
        loss_N, batch["mask_N"], batch["weights_N"], kind="token", num_loss_tokens=42, num_sequences=3
    )
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    assert (gradient_N[off] == 0).all()
    assert (gradient_N[~off] != 0).any()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_refuse_what_would_broadcast(name: str) -> None:
    batch = random_batch(2)
    common: dict[str, Any] = {"loss_mask_N": batch["mask_N"], "cu_seqlens": batch["cu_seqlens"], **CLIP}
    with pytest.raises(ValueError, match=r"'advantages': \[1\]"):
        LOSSES[name](batch["logprobs_N"], batch["old_N"], torch.ones(1), **common)
    with pytest.raises(ValueError, match=r"'logprobs': \[60, 1\]"):
        LOSSES[name](batch["logprobs_N"][:, None], batch["old_N"], batch["advantages_N"], **common)


def test_the_signature_admits_sequence_level_ratios() -> None:
    """GSPO (arXiv 2507.18071) as one more function: ratios 1.10 .95 1.30 .90 make s = 1.0515."""

    def sequence_ratio(
        logprobs_N: Tensor,
        old_logprobs_N: Tensor,
        advantages_N: Tensor,
        *,
        loss_mask_N: Tensor,
        cu_seqlens: tuple[int, ...],
        clip_low: float,
        clip_high: float,
    ) -> tuple[Tensor, Tensor]:
        log_ratio_N = (logprobs_N - old_logprobs_N) * loss_mask_N
        means = [log_ratio_N[a:b].sum() / loss_mask_N[a:b].sum() for a, b in itertools.pairwise(cu_seqlens)]
        sizes = torch.tensor(cu_seqlens).diff()
        return -torch.stack(means).exp().repeat_interleave(sizes) * advantages_N, loss_mask_N < 0

    loss_N, _ = sequence_ratio(
        torch.tensor([9.0, 1.10, 0.95, 1.30, 0.90, 1.0, 2.0]).log(),
        torch.zeros(7),
        torch.ones(7),
        loss_mask_N=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]),
        cu_seqlens=(0, 5, 7),
        **CLIP,
    )
    torch.testing.assert_close(-loss_N, torch.tensor([1.0515] * 5 + [2.0] * 2), rtol=1e-4, atol=0.0)


# --- weights against the engine -----------------------------------------------------------------------------


def test_tis_weights_by_hand() -> None:
    rollout_N = torch.full((4,), -2.0)
    old_N = rollout_N + torch.tensor([0.0, math.log(1.5), math.log(4.0), math.log(0.01)])
    torch.testing.assert_close(
        tis_weights_N(old_N, rollout_N, cap=2.0), torch.tensor([1.0, 1.5, 2.0, 0.01]), **CLOSE
    )
    assert tis_weights_N(torch.tensor([400.0]), torch.tensor([0.0]), cap=math.inf).isfinite().all()


def test_tis_without_mismatch_is_a_no_op() -> None:
    old_N = random_batch(3)["old_N"]
    assert (tis_weights_N(old_N, old_N.clone(), cap=math.inf) == 1.0).all()


def test_tis_weights_carry_no_gradient() -> None:
    old_N = random_batch(4)["old_N"].requires_grad_()
    assert not tis_weights_N(old_N, old_N.detach() - 0.1, cap=2.0).requires_grad


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_tis_refuses_a_cap_that_is_not_positive(cap: float) -> None:
    with pytest.raises(ValueError, match=f"got {cap}"):
        tis_weights_N(torch.zeros(2), torch.zeros(2), cap=cap)


# --- KL to the reference ------------------------------------------------------------------------------------


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
    expected = {
        "k1": torch.ones(3),
        "k2": difference_N,
        "k3": 1 - torch.exp(-difference_N),
    }
    for estimator, gradient_N in expected.items():
        logprobs_N = (difference_N - 3.0).requires_grad_()
        ref_N = torch.full((3,), -3.0, requires_grad=True)
        kl_N = kl_penalty(logprobs_N, ref_N, estimator=estimator)  # type: ignore[arg-type]
        kl_N.sum().backward()
        assert ref_N.grad is None
        torch.testing.assert_close(logprobs_N.grad, gradient_N, **CLOSE)


def test_kl_gradients_are_those_of_the_divergences_they_claim() -> None:
    """Expectation over a vocabulary, in full: sum_x pi(x) grad k(x) against autograd of the exact divergence."""
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
        torch.testing.assert_close(
            gradient_V, expected_V, rtol=1e-5, atol=1e-6
        )  # a softmax more than elsewhere


def test_k3_keeps_its_digits_where_policies_are_close() -> None:
    """D = 1e-4: k3 = 5e-9, a twelfth of what float32's exp(-D) - 1 + D can resolve."""
    kl_N = kl_penalty(torch.tensor([1e-4]), torch.tensor([0.0]), estimator="k3")
    # The last bit of D itself is 1.5e-3 of the value.
    torch.testing.assert_close(kl_N, torch.tensor([5e-9]), rtol=5e-3, atol=0.0)


def test_kl_is_finite_for_absurd_inputs_and_refuses_unknown_names() -> None:
    for estimator in ("k1", "k2", "k3"):
        kl_N = kl_penalty(torch.tensor([-900.0, 0.0]), torch.tensor([0.0, -900.0]), estimator=estimator)
        assert torch.isfinite(kl_N).all()
    with pytest.raises(ValueError, match="'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), estimator="k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'ref': \[1\]"):
        kl_penalty(torch.zeros(2), torch.zeros(1), estimator="k1")


# --- aggregation --------------------------------------------------------------------------------------------


def test_aggregate_by_hand() -> None:
    """Sequences of 1 and 3 loss tokens. token: (8 + 1 + 2 + 3) / 4; sequence: (8 + 2) / 2."""
    loss_N = torch.tensor([99.0, 8.0, 99.0, 1.0, 2.0, 3.0])
    mask_N = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    weights_N = torch.tensor([0.0, 1.0, 0.0, 1 / 3, 1 / 3, 1 / 3])
    counts: dict[str, int] = {"num_loss_tokens": 4, "num_sequences": 2}
    assert float(aggregate(loss_N, mask_N, weights_N, kind="token", **counts)) == 3.5
    assert float(aggregate(loss_N, mask_N, weights_N, kind="sequence", **counts)) == pytest.approx(
        5.0, rel=1e-6
    )


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_shares_add_up_however_the_sequences_are_split(kind: Any, seed: int) -> None:
    """Micro-batch and rank permutation: one batch, or each sequence alone in any order, give one loss and gradient."""
    batch = random_batch(seed)
    counts: dict[str, Any] = {"kind": kind, "num_loss_tokens": int(batch["mask_N"].sum()), "num_sequences": 3}

    def share(pieces: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([torch.arange(a, b) for a, b in pieces])
        logprobs_N = batch["logprobs_N"].clone().requires_grad_()
        loss_N, _ = ppo_clip(
            logprobs_N[rows],
            batch["old_N"][rows],
            batch["advantages_N"][rows],
            loss_mask_N=batch["mask_N"][rows],
            cu_seqlens=(0, *torch.tensor([b - a for a, b in pieces]).cumsum(0).tolist()),
            **CLIP,
        )
        loss = aggregate(loss_N, batch["mask_N"][rows], batch["weights_N"][rows], **counts)
        (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
        return loss.detach(), gradient_N

    first, second, third = itertools.pairwise(batch["cu_seqlens"])
    whole = share([first, second, third])
    for split in ([[third], [first], [second]], [[second, first], [third]], [[third, second, first]]):
        shares = [share(pieces) for pieces in split]
        # The sum of 42 float32 terms in another order.
        torch.testing.assert_close(sum(loss for loss, _ in shares), whole[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(sum(gradient_N for _, gradient_N in shares), whole[1], **CLOSE)


def test_a_local_mean_would_have_been_noticed() -> None:
    """Negative control of the test above: with each share divided by its own count the sum is another number."""
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
    assert aggregate(ones_N.bfloat16(), ones_N, ones_N, kind="token", **counts).dtype == torch.float32
    with pytest.raises(ValueError, match="'mean'"):
        aggregate(ones_N, ones_N, ones_N, kind="mean", **counts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 loss tokens"):
        aggregate(ones_N, ones_N, ones_N, kind="token", num_loss_tokens=0, num_sequences=1)
    with pytest.raises(ValueError, match="0 sequences"):
        aggregate(ones_N, ones_N, ones_N, kind="sequence", num_loss_tokens=3, num_sequences=0)
    with pytest.raises(ValueError, match=r"'loss_mask': \[1\]"):
        aggregate(ones_N, ones_N[:1], ones_N, kind="token", **counts)
