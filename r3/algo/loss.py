"""Policy losses, importance weights, KL penalties, and the aggregation of token losses.

Three policies meet here, as log-probabilities of the sampled tokens, aligned as in `types.py`:

    mu       the engine's distribution that the tokens were sampled from   rollout_logprobs_N
    pi_old   the trained policy before the step's first update             old_logprobs_N
    pi       the trained policy now; the only input with a gradient        logprobs_N

r = pi / pi_old measures staleness, which the loss bounds. w = pi_old / mu measures the mismatch of
trainer and engine, which a constant weight corrects. Docstrings say which of the two a "ratio",
"KL" or "clip" is of. A step composes them:

    loss_N, clipped_N = LOSSES[name](inputs, bounds)
    loss_N = loss_N * correct(correction, inputs).weights_N
    loss_N = loss_N + coef * kl_penalty(logprobs_N, ref_logprobs_N, estimator=...)
    loss = aggregate(loss_N, ...)

Everything is computed in float32 whatever comes in. A new loss is one function with the signature
of `Loss` and one line in `LOSSES`; r3/tools/contract.py has its contract. sg[] is a stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

# e^20 = 4.9e8: beyond this a ratio says only "broken", and float32 sums stay finite.
LOG_RATIO_LIMIT = 20.0


def _alone(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True)
class Sequences:
    """The sequences of a micro-batch among this rank's tokens, for sums over whole sequences.

    Attributes:
        cu_seqlens: borders; sequence i is `cu_seqlens[i] : cu_seqlens[i + 1]`, fillers included.
        add_up: sums a tensor over the ranks that have the other parts of the same sequences
            (context parallelism). The default is for sequences that are complete on this rank.
    """

    cu_seqlens: tuple[int, ...]
    add_up: Callable[[Tensor], Tensor] = _alone

    def sum_and_count_N(self, values_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the masked values of each sequence and count them, without gradient.

        Ranks that share sequences must call together.

        Returns:
            Sum and count of the token's whole sequence, at every token, float32, both [N].
        """
        _check_shapes(values=values_N, mask=mask_N)
        lengths = torch.tensor(self.cu_seqlens).diff().to(values_N.device)
        # With its size given, CUDA does not wait for the lengths.
        index_N = torch.repeat_interleave(
            torch.arange(len(lengths), device=values_N.device),
            lengths,
            output_size=self.cu_seqlens[-1],
        )
        on_N = (mask_N > 0).to(torch.float64)
        rows = torch.stack([values_N.detach().double() * on_N, on_N])
        zeros = rows.new_zeros(2, len(lengths))
        sums_N, counts_N = self.add_up(zeros.index_add(1, index_N, rows))[:, index_N].float()
        return sums_N, counts_N


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """What every loss and correction reads; all tensors are [N], aligned as in `types.py`.

    Attributes:
        logprobs_N: log-probabilities under the policy now, with gradient.
        old_logprobs_N: under the policy before the step's first update.
        rollout_logprobs_N: under the engine's sampling distribution; 0 where nothing was sampled.
        advantages_N: advantage of each token's rollout.
        loss_mask_N: 1 at tokens that carry loss, 0 elsewhere.
        sequences: which tokens belong to one sequence.

    Raises:
        ValueError: the tensors do not have one shape [N]. A [1] or [N, 1] among the [N] would
            broadcast into a loss that looks right.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    loss_mask_N: Tensor
    sequences: Sequences

    def __post_init__(self) -> None:
        _check_shapes(
            logprobs=self.logprobs_N,
            old_logprobs=self.old_logprobs_N,
            rollout_logprobs=self.rollout_logprobs_N,
            advantages=self.advantages_N,
            loss_mask=self.loss_mask_N,
        )

    @property
    def on_N(self) -> Tensor:
        """True at tokens that carry loss."""
        return self.loss_mask_N > 0


class Bounds(NamedTuple):
    """How far a policy may move from pi_old. Each loss says how it uses them."""

    low: float  # 1 - low is the lower bound of a ratio
    high: float  # 1 + high is the upper bound of a ratio
    dual: float = 0.0  # ppo_clip: upper bound of the ratio where A < 0; 0 = none
    cap: float = float("inf")  # minirl: upper bound of the weight pi / mu


class Loss(Protocol):
    """The signature of every policy loss.

    Returns:
        The loss of each token, not masked yet, float32 [N], and a bool [N] that marks loss tokens
        outside the bounds, which have lost their gradient or a part of their weight.
    """

    def __call__(self, inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]: ...


def _check_shapes(**tensors_N: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in tensors_N.values()}
    if len(shapes) != 1 or len(shapes.pop()) != 1:
        got = {name: list(tensor.shape) for name, tensor in tensors_N.items()}
        raise ValueError(f"expected one shape [N] for all inputs of a loss, got {got}")


def _log_ratio_N(logprobs_N: Tensor, base_logprobs_N: Tensor) -> Tensor:
    """Return log(p / base) in float32, clamped to +-20.

    No gradient reaches the base, nor p outside the limits.
    """
    return (logprobs_N.float() - base_logprobs_N.detach().float()).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )


def ppo_clip(inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of PPO (arXiv 1707.06347, eq. 7) with clip-higher and dual clip.

        r_t = pi / pi_old
        L_t = -min( r_t A_t, clip(r_t, 1 - low, 1 + high) A_t )
        L_t = min( L_t, -dual A_t )     where A_t < 0 and dual > 0

    Separate bounds are those of DAPO (clip-higher, arXiv 2503.14476). Dual clip is arXiv
    1912.09729, eq. 5, which has c = 3.

    At pi = pi_old the gradient is the policy gradient, -A_t grad log pi. A token is clipped and has
    no gradient where A > 0 and r > 1 + high, or A < 0 and r < 1 - low, or A < 0 and r > dual.
    Usual bounds: 0.2 and 0.2, or 0.2 and 0.28.
    """
    advantages_N = inputs.advantages_N.float()
    ratio_N = _log_ratio_N(inputs.logprobs_N, inputs.old_logprobs_N).exp()
    surrogate_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - bounds.low, 1.0 + bounds.high) * advantages_N
    loss_N, clipped_N = -torch.minimum(surrogate_N, bounded_N), bounded_N < surrogate_N
    if bounds.dual:
        floor_N = -bounds.dual * advantages_N
        too_far_N = (advantages_N < 0) & (loss_N > floor_N)
        loss_N, clipped_N = torch.where(too_far_N, floor_N, loss_N), clipped_N | too_far_N
    return loss_N, clipped_N & inputs.on_N


def pg(inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Plain policy gradient, REINFORCE (Williams 1992).

        L_t = -A_t log pi

    No ratio and no bound: exact for the first update of a step, biased in later ones.
    """
    loss_N = -inputs.advantages_N.float() * inputs.logprobs_N.float()
    return loss_N, torch.zeros_like(inputs.on_N)


def gspo(inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Group sequence policy optimization (arXiv 2507.18071), in its token form (section 4.3).

        s_i  = exp( mean over the tokens of response i of log r_t )
        s_it = sg[s_i] pi / sg[pi]               equal to s_i, with the gradient s_i grad log pi
        L_t  = -min( s_it A_t, clip(s_it, 1 - low, 1 + high) A_t )

    A response is clipped as a whole or not at all. With aggregation "sequence" and one advantage
    per response, value and gradient are those of the sequence form (eq. 5). s_i is close to 1: the
    paper has low = 3e-4 and high = 4e-4.
    """
    advantages_N, logprobs_N = inputs.advantages_N.float(), inputs.logprobs_N.float()
    total_N, count_N = inputs.sequences.sum_and_count_N(
        _log_ratio_N(logprobs_N, inputs.old_logprobs_N), inputs.loss_mask_N
    )
    ratio_N = (total_N / count_N.clamp(min=1)).exp() * (logprobs_N - logprobs_N.detach()).exp()
    surrogate_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - bounds.low, 1.0 + bounds.high) * advantages_N
    return -torch.minimum(surrogate_N, bounded_N), (bounded_N < surrogate_N) & inputs.on_N


def cispo(inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Clipped importance-sampling weights (CISPO, arXiv 2506.13585, section 3.1).

        L_t = -sg[ clip(r_t, 1 - low, 1 + high) ] A_t log pi

    The bound is on a weight: no token loses its gradient. The paper has no lower bound (low = 1)
    and does not give its high; public recipes have 3 to 5. PPO's 0.2 would be another algorithm.
    Clipped tokens are those whose weight was bounded.
    """
    ratio_N = _log_ratio_N(inputs.logprobs_N, inputs.old_logprobs_N).detach().exp()
    weight_N = ratio_N.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    loss_N = -weight_N * inputs.advantages_N.float() * inputs.logprobs_N.float()
    return loss_N, (weight_N != ratio_N) & inputs.on_N


def minirl(inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """MiniRL (arXiv 2512.01374): a weight for the mismatch with the engine, a mask for staleness.

        L_t = -M_t sg[ min(pi / mu, cap) ] A_t log pi
        M_t = 0 where A > 0 and r > 1 + high, or A < 0 and r < 1 - low          r = pi / pi_old

    The weight includes the mismatch already: do not add a correction. The paper has low = 0.2,
    high = 0.27, cap = 5, advantages without standard deviation (dr_grpo) and no length
    normalisation (aggregation constant or token).
    """
    advantages_N = inputs.advantages_N.float()
    ratio_N = _log_ratio_N(inputs.logprobs_N, inputs.old_logprobs_N).detach().exp()
    mismatch_N = _log_ratio_N(inputs.logprobs_N, inputs.rollout_logprobs_N).detach().exp()
    weight_N = mismatch_N.clamp(max=bounds.cap)
    stale_N = ((advantages_N > 0) & (ratio_N > 1.0 + bounds.high)) | (
        (advantages_N < 0) & (ratio_N < 1.0 - bounds.low)
    )
    loss_N = -weight_N * advantages_N * inputs.logprobs_N.float()
    return loss_N.masked_fill(stale_N, 0.0), stale_N & inputs.on_N


LOSSES: dict[str, Loss] = {
    "ppo_clip": ppo_clip,
    "pg": pg,
    "gspo": gspo,
    "cispo": cispo,
    "minirl": minirl,
}


# --- corrections of the mismatch with the engine ------------------------------------------------


class Corrected(NamedTuple):
    """Constant weights of the tokens' losses, both [N].

    Attributes:
        weights_N: factor on each token's loss, float32, without gradient.
        cut_N: true at loss tokens whose weight was truncated or masked.
    """

    weights_N: Tensor
    cut_N: Tensor


class Correction(NamedTuple):
    """A weight made of w = pi_old / mu.

    Attributes:
        of: which ratio: the token's w, the sequence's product of w, or its geometric mean.
        outside: ratios above `high` are truncated to it, or ratios outside [low, high] are masked
            to 0.
        weigh: inside the bounds the weight is the ratio; otherwise it is 1.
        low, high: default bounds of the ratio.
    """

    of: Literal["token", "sequence", "geometric"]
    outside: Literal["truncate", "mask"]
    weigh: bool
    low: float
    high: float


CORRECTIONS: dict[str, Correction] = {
    # min(w, high): truncated importance sampling.
    # Yao et al., August 2025, fengyao.notion.site/off-policy-rl
    "token_tis": Correction("token", "truncate", True, 0.0, 2.0),
    # min(prod w, high): the same for whole responses; unbiased below the bound, of large variance
    "sequence_tis": Correction("sequence", "truncate", True, 0.0, 2.0),
    # w where low <= w <= high, else 0: masked importance sampling.
    # Liu, Li et al., 2025, richardli.xyz/rl-collapse
    "token_mis": Correction("token", "mask", True, 0.0, 2.0),
    "sequence_mis": Correction("sequence", "mask", True, 0.5, 2.0),
    # 1 where low <= exp(mean log w) <= high, else 0: leaves out responses on which trainer and
    # engine disagree
    "geometric_mask": Correction("geometric", "mask", False, 0.999, 1.001),
    # token_mis with both bounds. arXiv 2510.18855
    "icepop": Correction("token", "mask", True, 0.5, 5.0),
}


def correct(correction: Correction, inputs: LossInputs) -> Corrected:
    """Return weights for the mismatch w = pi_old / mu of trainer and engine.

    They multiply each token's loss outside its min and clip, before the KL penalty. Denominators do
    not change: a masked token counts as one without loss. Weights of tokens without loss have no
    meaning. Ranks that share sequences must call together.

    Raises:
        ValueError: the bounds are not 0 <= low < high.
    """
    low, high = correction.low, correction.high
    if not 0 <= low < high:
        raise ValueError(
            f"bounds of importance weights must be 0 <= low < high, got {low} and {high}"
        )
    log_ratio_N = _log_ratio_N(inputs.old_logprobs_N, inputs.rollout_logprobs_N).detach()
    if correction.of != "token":
        total_N, count_N = inputs.sequences.sum_and_count_N(log_ratio_N, inputs.loss_mask_N)
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
    return Corrected(weights_N, cut_N & inputs.on_N)


# --- a teacher ---------------------------------------------------------------------------------


def teacher_advantage(old_logprobs_N: Tensor, teacher_logprobs_N: Tensor, *, coef: float) -> Tensor:
    """Return what a teacher adds to the advantage of each sampled token, without gradient.

        A_t = coef (log pi_teacher(x_t) - log pi_old(x_t)), the difference clamped to +-20

    With tokens sampled from pi_old, -A_t estimates coef KL(pi_old || pi_teacher) of the token's
    distribution, and the policy gradient with A_t is its gradient: on-policy distillation with the
    reverse KL, estimated from the sampled token (GKD, arXiv 2306.13649, with its lambda of 1; the
    reverse KL as a reward is MiniLLM, arXiv 2306.08543). Each token answers for its own divergence
    only, not for that of the tokens after it.
    """
    return coef * _log_ratio_N(teacher_logprobs_N, old_logprobs_N).detach()


# --- KL to a reference policy, and the sum ------------------------------------------------------


def kl_penalty(
    logprobs_N: Tensor, ref_logprobs_N: Tensor, *, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Estimate KL(pi || ref) per token from tokens sampled by pi (joschu.net/blog/kl-approx.html).

    As a loss the estimate is added to each token's loss. As a reward its sum over a response is
    subtracted from the reward (arXiv 2402.14740); k1 is the unbiased estimator for that.

    With D = log pi - log ref, clamped to +-20 (outside there is no gradient):

        value                  gradient as a loss           which is, on policy
        k1 = D                 grad log pi                  0 in expectation: it lowers no KL
        k2 = D^2 / 2           D grad log pi                the gradient of KL(pi || ref)
        k3 = exp(-D) - 1 + D   (1 - ref / pi) grad log pi   the gradient of KL(ref || pi)

    k1 is unbiased and may be negative. k2 is biased and never negative. k3 is unbiased and never
    negative; its variance explodes when D is large and negative. No gradient reaches the reference.

    Raises:
        ValueError: the estimator is unknown, or the shapes differ.
    """
    _check_shapes(logprobs=logprobs_N, ref=ref_logprobs_N)
    difference_N = _log_ratio_N(logprobs_N, ref_logprobs_N)
    match estimator:
        case "k1":
            return difference_N
        case "k2":
            return difference_N.square() / 2
        case "k3":
            # expm1: exp(-D) - 1 would lose the D^2 / 2 of small differences, which nearly all are.
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
    """Sum one micro-batch's share of the loss of an optimizer step.

        token      sum_t m_t L_t / num_loss_tokens            tokens weigh alike (arXiv 2503.14476)
        sequence   sum_t m_t L_t / |o_i(t)| / num_sequences   sequences weigh alike (2402.03300)
        constant   sum_t m_t L_t / (num_sequences L)          L = max_response_tokens (Dr. GRPO,
                                                              2503.20783): as token, but a step of
                                                              long responses is not scaled down

    m is the loss mask; `sequence_weights_N` is 1 / |o_i| at the loss tokens of sequence i. Both
    denominators count over all micro-batches of all ranks, so the shares add up to the same loss
    under every layout and packing.

    Raises:
        ValueError: the kind is unknown, a denominator is 0, or the shapes differ.
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
            f"aggregation {kind!r} has nothing to average over: {num_loss_tokens} loss tokens, "
            f"{num_sequences} sequences of at most {max_response_tokens} tokens"
        )
    return (loss_N.float() * weights_N).sum() / denominator
