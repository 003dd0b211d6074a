"""Policy losses, the weights and penalties beside them, and the sum that turns tokens into a scalar.

Three policies meet here (all as log-probabilities of the sampled tokens, aligned as in `types.py`):

    mu       what the engine sampled from                    rollout_logprobs_N
    pi_old   the trainer's policy at the rollout's weights   old_logprobs_N
    pi       the trainer's policy now                        logprobs_N, the only input with a gradient

so that r = pi / pi_old is staleness (clipped by the loss) and w = pi_old / mu is the mismatch of the two
worlds (a constant weight). A step composes them:

    loss_N, clipped_N = LOSSES[name](logprobs_N, old_logprobs_N, advantages_N, ...)
    loss_N = loss_N * tis_weights_N(old_logprobs_N, rollout_logprobs_N, cap=...)
    loss_N = loss_N + coef * kl_penalty(logprobs_N, ref_logprobs_N, estimator=...)
    loss = aggregate(loss_N, ...)

Everything is computed in float32 whatever comes in. A new loss is one function with the signature of `Loss`,
one line in `LOSSES`, and passes the contract tests every entry of `LOSSES` passes.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

# e^20 = 4.9e8: beyond this a ratio says only "broken", and float32 should still add up.
LOG_RATIO_LIMIT = 20.0


class Loss(Protocol):
    """The signature of every policy loss.

    A loss sees whole sequences: sequence i is `cu_seqlens[i] : cu_seqlens[i + 1]`, fillers included, so
    sequence-level ratios (GSPO) need nothing more. Returns the loss of each token, not yet masked, and a bool
    per token: this loss token lies outside the trust region and has lost its gradient.
    """

    def __call__(
        self,
        logprobs_N: Tensor,
        old_logprobs_N: Tensor,
        advantages_N: Tensor,
        *,
        loss_mask_N: Tensor,
        cu_seqlens: tuple[int, ...],
        clip_low: float,
        clip_high: float,
    ) -> tuple[Tensor, Tensor]: ...


def _check_shapes(**tensors_N: Tensor) -> None:
    """A [1] or [N, 1] among the [N] would broadcast into a loss that looks fine."""
    shapes = {tuple(tensor.shape) for tensor in tensors_N.values()}
    if len(shapes) != 1 or len(shapes.pop()) != 1:
        got = {name: list(tensor.shape) for name, tensor in tensors_N.items()}
        raise ValueError(f"expected one shape [N], got {got}")


def _log_ratio_N(logprobs_N: Tensor, base_logprobs_N: Tensor) -> Tensor:
    """log(p / base) in float32, within +-20; no gradient reaches the base, nor p outside those limits."""
    return (logprobs_N.float() - base_logprobs_N.detach().float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    loss_mask_N: Tensor,
    cu_seqlens: tuple[int, ...],
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of PPO (arXiv 1707.06347, eq. 7) with two bounds (clip-higher, arXiv 2503.14476).

        r_t = pi / pi_old
        L_t = -min( r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t )

    At pi = pi_old the gradient is that of the policy gradient, -A_t grad log pi. A token is clipped, and
    without gradient, where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low. Works token by token:
    `cu_seqlens` is not used.
    """
    _check_shapes(logprobs=logprobs_N, old=old_logprobs_N, advantages=advantages_N, loss_mask=loss_mask_N)
    advantages_N = advantages_N.float()
    ratio_N = _log_ratio_N(logprobs_N, old_logprobs_N).exp()
    surrogate_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    return -torch.minimum(surrogate_N, bounded_N), (bounded_N < surrogate_N) & (loss_mask_N > 0)


LOSSES: dict[str, Loss] = {"ppo_clip": ppo_clip}


def tis_weights_N(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, *, cap: float) -> Tensor:
    """Truncated importance sampling of the trainer against the engine.

        w_t = sg[ min( pi_old / mu, cap ) ]

    (Yao et al., August 2025, fengyao.notion.site/off-policy-rl.) It multiplies the token's loss outside the
    min and the clip; only the upper side is cut; no gradient. With cap = inf and mu = pi_old it is exactly 1.
    It means nothing where nothing was sampled (mu is stored as 0 there): the loss mask drops those.
    """
    _check_shapes(old=old_logprobs_N, rollout=rollout_logprobs_N)
    if not cap > 0:
        raise ValueError(f"the cap of the importance weights must be positive, got {cap}")
    return _log_ratio_N(old_logprobs_N, rollout_logprobs_N).detach().exp().clamp(max=cap)


def kl_penalty(logprobs_N: Tensor, ref_logprobs_N: Tensor, *, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(pi || ref) from tokens sampled by pi (joschu.net/blog/kl-approx.html).

    With D = log pi - log ref, clamped to +-20 (outside there is no gradient):

        value                  gradient as a loss           which is, on policy
        k1 = D                 grad log pi                  0 in expectation: it reports a KL, it lowers none
        k2 = D^2 / 2           D grad log pi                the gradient of KL(pi || ref)
        k3 = exp(-D) - 1 + D   (1 - ref / pi) grad log pi   the gradient of KL(ref || pi); as k2 for small D

    k1 is unbiased and may be negative; k2 is biased, never negative; k3 is unbiased and never negative, and
    its variance explodes when D is large and negative. No gradient reaches the reference.
    """
    _check_shapes(logprobs=logprobs_N, ref=ref_logprobs_N)
    difference_N = _log_ratio_N(logprobs_N, ref_logprobs_N)
    match estimator:
        case "k1":
            return difference_N
        case "k2":
            return difference_N.square() / 2
        case "k3":
            # expm1: exp(-D) - 1 would lose the D^2 / 2 of the small differences that are nearly all of them.
            return torch.expm1(-difference_N) + difference_N
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")


def aggregate(
    loss_N: Tensor,
    loss_mask_N: Tensor,
    sequence_weights_N: Tensor,
    *,
    kind: Literal["token", "sequence"],
    num_loss_tokens: int,
    num_sequences: int,
) -> Tensor:
    """One micro-batch's share of the loss of an optimizer step.

        token      sum_t m_t L_t / num_loss_tokens            all tokens weigh the same (arXiv 2503.14476)
        sequence   sum_t m_t L_t / |o_i(t)| / num_sequences   all sequences weigh the same (arXiv 2402.03300)

    m is the loss mask, `sequence_weights_N` is 1 / |o_i| at the loss tokens of sequence i. Both denominators
    count over all micro-batches of all ranks: the shares add up to the same loss, whatever the layout or the
    packing.
    """
    _check_shapes(loss=loss_N, loss_mask=loss_mask_N, sequence_weights=sequence_weights_N)
    weights_N = loss_mask_N.float()
    match kind:
        case "token":
            denominator = num_loss_tokens
        case "sequence":
            weights_N = weights_N * sequence_weights_N.float()
            denominator = num_sequences
        case _:
            raise ValueError(f"unknown aggregation {kind!r}: token or sequence")
    if denominator < 1:
        raise ValueError(f"nothing to average over: {num_loss_tokens} loss tokens, {num_sequences} sequences")
    return (loss_N.float() * weights_N).sum() / denominator
