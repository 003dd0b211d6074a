"""Policy losses, the weights and penalties beside them, and the sum that turns tokens into a scalar.

Three policies meet here (all as log-probabilities of the sampled tokens, aligned as in `types.py`):

    mu       what the engine sampled from                    rollout_logprobs_N
    pi_old   the trainer's policy at the rollout's weights   old_logprobs_N
    pi       the trainer's policy now                        logprobs_N, the only input with a gradient

so that r = pi / pi_old is staleness (bounded by the loss) and w = pi_old / mu is the mismatch of the two
worlds (a constant weight). A "ratio", "KL" or "clip" in this package says of which two. A step composes them:

    loss_N, clipped_N = LOSSES[name](logprobs_N, old_logprobs_N, advantages_N, ...)
    loss_N = loss_N * correct(correction, old_logprobs_N, rollout_logprobs_N, ...).weights_N
    loss_N = loss_N + coef * kl_penalty(logprobs_N, ref_logprobs_N, estimator=...)
    loss = aggregate(loss_N, ...)

Everything is computed in float32 whatever comes in. A new loss is one function with the signature of `Loss`,
one line in `LOSSES`, and passes the contract tests every entry of `LOSSES` passes. sg[] is a stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

# e^20 = 4.9e8: beyond this a ratio says only "broken", and float32 should still add up.
LOG_RATIO_LIMIT = 20.0


def _alone(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True)
class Sequences:
    """The sequences of a micro-batch among this rank's tokens, for what is taken over whole sequences.

    Attributes:
        cu_seqlens: borders; sequence i is `cu_seqlens[i] : cu_seqlens[i + 1]`, fillers included.
        add_up: sums a tensor over the ranks that hold the other parts of the same sequences (context parallelism), on
            all of them alike. Without it a sequence lies whole on this rank.
    """

    cu_seqlens: tuple[int, ...]
    add_up: Callable[[Tensor], Tensor] = _alone

    def sum_and_count_N(self, values_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
        """At every token the sum of the masked values of its whole sequence, and how many there are; no gradient.

        Ranks that share sequences must call together.
        """
        _check_shapes(values=values_N, mask=mask_N)
        lengths = torch.tensor(self.cu_seqlens).diff().to(values_N.device)
        index_N = torch.repeat_interleave(
            torch.arange(len(lengths), device=values_N.device), lengths
        )
        on_N = (mask_N > 0).to(torch.float64)
        rows = torch.stack([values_N.detach().double() * on_N, on_N])
        zeros = rows.new_zeros(2, len(lengths))
        sums_N, counts_N = self.add_up(zeros.index_add(1, index_N, rows))[:, index_N].float()
        return sums_N, counts_N


class Bounds(NamedTuple):
    """How far a policy may move from the rollout's. What each means is said by the loss that reads it."""

    low: float  # 1 - low is the lower bound of a ratio
    high: float  # 1 + high the upper one
    dual: float = 0.0  # ppo_clip: upper bound of the ratio where A < 0; 0 = none
    cap: float = float("inf")  # minirl: upper bound of the weight pi / mu


class Loss(Protocol):
    """The signature of every policy loss.

    Returns the loss of each token, not yet masked, and a bool per token: this loss token lies outside the bounds,
    and has lost its gradient or part of its weight.
    """

    def __call__(
        self,
        logprobs_N: Tensor,
        old_logprobs_N: Tensor,
        advantages_N: Tensor,
        *,
        rollout_logprobs_N: Tensor,
        loss_mask_N: Tensor,
        sequences: Sequences,
        bounds: Bounds,
    ) -> tuple[Tensor, Tensor]: ...


def _check_shapes(**tensors_N: Tensor) -> None:
    """A [1] or [N, 1] among the [N] would broadcast into a loss that looks fine."""
    shapes = {tuple(tensor.shape) for tensor in tensors_N.values()}
    if len(shapes) != 1 or len(shapes.pop()) != 1:
        got = {name: list(tensor.shape) for name, tensor in tensors_N.items()}
        raise ValueError(f"expected one shape [N], got {got}")


def _log_ratio_N(logprobs_N: Tensor, base_logprobs_N: Tensor) -> Tensor:
    """log(p / base) in float32, within +-20; no gradient reaches the base, nor p outside those limits."""
    return (logprobs_N.float() - base_logprobs_N.detach().float()).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )


def ppo_clip(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    rollout_logprobs_N: Tensor,
    loss_mask_N: Tensor,
    sequences: Sequences,
    bounds: Bounds,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of PPO (arXiv 1707.06347, eq. 7) with two bounds (clip-higher, arXiv 2503.14476) and a third.

        r_t = pi / pi_old
        L_t = -min( r_t A_t, clip(r_t, 1 - low, 1 + high) A_t )
        L_t = min( L_t, -dual A_t )     where A_t < 0 and dual > 0 (dual clip, arXiv 1912.09729, eq. 5; c = 3 there)

    At pi = pi_old the gradient is that of the policy gradient, -A_t grad log pi. A token is clipped, and
    without gradient, where A > 0 and r > 1 + high, or A < 0 and r < 1 - low, or A < 0 and r > dual. Works token by
    token. Usual: 0.2 and 0.2, or 0.2 and 0.28.
    """
    _check_shapes(
        logprobs=logprobs_N, old=old_logprobs_N, advantages=advantages_N, loss_mask=loss_mask_N
    )
    advantages_N = advantages_N.float()
    ratio_N = _log_ratio_N(logprobs_N, old_logprobs_N).exp()
    surrogate_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - bounds.low, 1.0 + bounds.high) * advantages_N
    loss_N, clipped_N = -torch.minimum(surrogate_N, bounded_N), bounded_N < surrogate_N
    if bounds.dual:
        floor_N = -bounds.dual * advantages_N
        too_far_N = (advantages_N < 0) & (loss_N > floor_N)
        loss_N, clipped_N = torch.where(too_far_N, floor_N, loss_N), clipped_N | too_far_N
    return loss_N, clipped_N & (loss_mask_N > 0)


def pg(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    rollout_logprobs_N: Tensor,
    loss_mask_N: Tensor,
    sequences: Sequences,
    bounds: Bounds,
) -> tuple[Tensor, Tensor]:
    """Plain policy gradient, REINFORCE (Williams 1992).

        L_t = -A_t log pi

    No ratio and no bound: right for the first update of a step, biased in later ones.
    """
    _check_shapes(
        logprobs=logprobs_N, old=old_logprobs_N, advantages=advantages_N, loss_mask=loss_mask_N
    )
    return -advantages_N.float() * logprobs_N.float(), torch.zeros_like(
        loss_mask_N, dtype=torch.bool
    )


def gspo(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    rollout_logprobs_N: Tensor,
    loss_mask_N: Tensor,
    sequences: Sequences,
    bounds: Bounds,
) -> tuple[Tensor, Tensor]:
    """Group sequence policy optimization (arXiv 2507.18071), in its token form (section 4.3).

        s_i  = exp( mean over the tokens of answer i of log r_t )
        s_it = sg[s_i] pi / sg[pi]                       equal to s_i, with the gradient s_i grad log pi
        L_t  = -min( s_it A_t, clip(s_it, 1 - low, 1 + high) A_t )

    A whole answer is clipped or none of it. With aggregation "sequence" and one advantage per answer, value and gradient
    are those of the sequence form (eq. 5). s_i is close to 1: the paper has low = 3e-4 and high = 4e-4.
    """
    _check_shapes(
        logprobs=logprobs_N, old=old_logprobs_N, advantages=advantages_N, loss_mask=loss_mask_N
    )
    advantages_N, logprobs_N = advantages_N.float(), logprobs_N.float()
    total_N, count_N = sequences.sum_and_count_N(
        _log_ratio_N(logprobs_N, old_logprobs_N), loss_mask_N
    )
    ratio_N = (total_N / count_N.clamp(min=1)).exp() * (logprobs_N - logprobs_N.detach()).exp()
    surrogate_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - bounds.low, 1.0 + bounds.high) * advantages_N
    return -torch.minimum(surrogate_N, bounded_N), (bounded_N < surrogate_N) & (loss_mask_N > 0)


def cispo(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    rollout_logprobs_N: Tensor,
    loss_mask_N: Tensor,
    sequences: Sequences,
    bounds: Bounds,
) -> tuple[Tensor, Tensor]:
    """Clipped importance-sampling weights (CISPO, arXiv 2506.13585, section 3.1).

        L_t = -sg[ clip(r_t, 1 - low, 1 + high) ] A_t log pi

    The bound is on a weight, and no token loses its gradient. The paper has no lower bound (low = 1) and does not say
    its high; public recipes have 3 to 5. PPO's 0.2 would be another algorithm. Clipped: the weight was bounded.
    """
    _check_shapes(
        logprobs=logprobs_N, old=old_logprobs_N, advantages=advantages_N, loss_mask=loss_mask_N
    )
    ratio_N = _log_ratio_N(logprobs_N, old_logprobs_N).detach().exp()
    weight_N = ratio_N.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    return -weight_N * advantages_N.float() * logprobs_N.float(), (weight_N != ratio_N) & (
        loss_mask_N > 0
    )


def minirl(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    rollout_logprobs_N: Tensor,
    loss_mask_N: Tensor,
    sequences: Sequences,
    bounds: Bounds,
) -> tuple[Tensor, Tensor]:
    """MiniRL (arXiv 2512.01374): one weight against the engine, one mask against staleness.

        L_t = -M_t sg[ min(pi / mu, cap) ] A_t log pi
        M_t = 0 where A > 0 and r > 1 + high, or A < 0 and r < 1 - low          r = pi / pi_old

    The weight holds the mismatch already: no correction goes on top. The paper has low = 0.2, high = 0.27, cap = 5,
    advantages without standard deviation (dr_grpo) and no length normalisation (aggregation constant or token).
    """
    _check_shapes(
        logprobs=logprobs_N,
        old=old_logprobs_N,
        rollout=rollout_logprobs_N,
        advantages=advantages_N,
        loss_mask=loss_mask_N,
    )
    advantages_N = advantages_N.float()
    ratio_N = _log_ratio_N(logprobs_N, old_logprobs_N).detach().exp()
    weight_N = _log_ratio_N(logprobs_N, rollout_logprobs_N).detach().exp().clamp(max=bounds.cap)
    stale_N = ((advantages_N > 0) & (ratio_N > 1.0 + bounds.high)) | (
        (advantages_N < 0) & (ratio_N < 1.0 - bounds.low)
    )
    loss_N = -weight_N * advantages_N * logprobs_N.float()
    return loss_N.masked_fill(stale_N, 0.0), stale_N & (loss_mask_N > 0)


LOSSES: dict[str, Loss] = {
    "ppo_clip": ppo_clip,
    "pg": pg,
    "gspo": gspo,
    "cispo": cispo,
    "minirl": minirl,
}


# --- corrections against the engine -------------------------------------------------------------------------


class Corrected(NamedTuple):
    """Constant weights of the tokens' losses, and where the weight is not the exact ratio: truncated or masked."""

    weights_N: Tensor
    cut_N: Tensor


class Correction(NamedTuple):
    """A weight made of w = pi_old / mu: over tokens or sequences, with what happens outside of [low, high].

    Attributes:
        of: whose ratio: the token's w, the sequence's product of w, or its geometric mean.
        outside: above high the weight is truncated to it, or outside of the bounds it is masked to 0.
        weigh: whether what is inside is weighted by the ratio, or kept as it is (weight 1).
        low, high: usual bounds.
    """

    of: Literal["token", "sequence", "geometric"]
    outside: Literal["truncate", "mask"]
    weigh: bool
    low: float
    high: float


CORRECTIONS: dict[str, Correction] = {
    # min(w, high): truncated importance sampling. Yao et al., August 2025, fengyao.notion.site/off-policy-rl
    "token_tis": Correction("token", "truncate", True, 0.0, 2.0),
    # min(prod w, high): the same for whole answers; unbiased up to the cut, of large variance
    "sequence_tis": Correction("sequence", "truncate", True, 0.0, 2.0),
    # w where low <= w <= high, else 0: masked importance sampling. Liu, Li et al., 2025, richardli.xyz/rl-collapse
    "token_mis": Correction("token", "mask", True, 0.0, 2.0),
    "sequence_mis": Correction("sequence", "mask", True, 0.5, 2.0),
    # 1 where low <= exp(mean log w) <= high, else 0: answers on which the two worlds disagree are left out
    "geometric_mask": Correction("geometric", "mask", False, 0.999, 1.001),
    # token_mis with both bounds. arXiv 2510.18855
    "icepop": Correction("token", "mask", True, 0.5, 5.0),
}


def correct(
    correction: Correction,
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    loss_mask_N: Tensor,
    sequences: Sequences,
) -> Corrected:
    """Weights for the mismatch w = pi_old / mu between trainer and engine; they carry no gradient.

    They multiply the token's loss outside of its min and clip, before the KL penalty. Denominators stay: a masked token
    counts as one without loss. Where nothing was sampled (mu is stored as 0 there) they mean nothing: the loss mask drops
    those. Ranks that share sequences must call together.
    """
    _check_shapes(old=old_logprobs_N, rollout=rollout_logprobs_N, loss_mask=loss_mask_N)
    low, high = correction.low, correction.high
    if not 0 <= low < high:
        raise ValueError(
            f"bounds of importance weights must be 0 <= low < high, got {low} and {high}"
        )
    log_ratio_N = _log_ratio_N(old_logprobs_N, rollout_logprobs_N).detach()
    if correction.of != "token":
        total_N, count_N = sequences.sum_and_count_N(log_ratio_N, loss_mask_N)
        log_ratio_N = total_N / count_N.clamp(min=1) if correction.of == "geometric" else total_N
        log_ratio_N = log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_N = log_ratio_N.exp()
    weights_N = ratio_N if correction.weigh else torch.ones_like(ratio_N)
    if correction.outside == "truncate":
        cut_N = ratio_N > high
        weights_N = weights_N.clamp(max=high)
    else:
        cut_N = (ratio_N < low) | (ratio_N > high)
        weights_N = weights_N.masked_fill(cut_N, 0.0)
    return Corrected(weights_N, cut_N & (loss_mask_N > 0))


# --- KL to a reference, and the sum -------------------------------------------------------------------------


def kl_penalty(
    logprobs_N: Tensor, ref_logprobs_N: Tensor, *, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Per-token estimate of KL(pi || ref) from tokens sampled by pi (joschu.net/blog/kl-approx.html).

    In the loss it is added to the token's; in the reward its sum over an answer is taken off (arXiv 2402.14740), where k1
    is the unbiased one.

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
    kind: Literal["token", "sequence", "constant"],
    num_loss_tokens: int,
    num_sequences: int,
    max_response_tokens: int = 0,
) -> Tensor:
    """One micro-batch's share of the loss of an optimizer step.

        token      sum_t m_t L_t / num_loss_tokens            all tokens weigh the same (arXiv 2503.14476)
        sequence   sum_t m_t L_t / |o_i(t)| / num_sequences   all sequences weigh the same (arXiv 2402.03300)
        constant   sum_t m_t L_t / (num_sequences L)          as token, but a step of long answers is not scaled down:
                                                              L = max_response_tokens (Dr. GRPO, arXiv 2503.20783)

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
        case "constant":
            denominator = num_sequences * max_response_tokens
        case _:
            raise ValueError(f"unknown aggregation {kind!r}: token, sequence or constant")
    if denominator < 1:
        raise ValueError(
            f"nothing to average over: {num_loss_tokens} loss tokens, {num_sequences} sequences of at most "
            f"{max_response_tokens}"
        )
    return (loss_N.float() * weights_N).sum() / denominator
