"""The loss of one micro-batch, composed of the functions that the settings name."""

from __future__ import annotations

import torch

from r3.algo.loss import (
    CORRECTIONS,
    LossInputs,
    Sequences,
    aggregate,
    correct,
    kl_penalty,
    teacher_advantage,
)
from r3.config import Config
from r3.policy.layout import LocalTokens
from r3.runtime.mesh import Axis
from r3.types import Batch
from r3.user_code.algorithm import bounds_of, loss_of


def policy_loss(
    config: Config,
    batch: Batch,
    tokens: LocalTokens,
    cp: Axis,
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    reference_logprobs_N: torch.Tensor | None = None,
    teacher_logprobs_N: torch.Tensor | None = None,
    *,
    entropy_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute a micro-batch's share of the batch's loss.

        loss = aggregate( w_t L_t + kl_coef KL_t - entropy_coef H_t )

    w_t is the importance weight against the engine, if `algo.correction` asks for one. All ranks of
    cp must call: they share sequences.

    Args:
        config: the sections `algo` and `rollout` are read.
        batch: gives the global denominators.
        tokens: the micro-batch's tokens of this rank.
        cp: context-parallel ranks.
        logprobs_N: log-probabilities of the targets, with gradient.
        old_logprobs_N: of the policy before the step's first update.
        reference_logprobs_N: of the reference policy; None = no KL penalty.
        teacher_logprobs_N: of the teacher; None = none. Its part is added to the advantages, or
            replaces them with train.objective distill.
        entropy_N: entropy of the policy's distribution at each token, with gradient; needed if
            `algo.entropy_coef` is above 0.

    Returns:
        The loss (a scalar) and statistics [N]: "clipped", and if used "weight", "cut", "kl" and
        "kl_teacher".
    """
    algo = config.algo
    # Bypass: the engine's log-probabilities stand for the old policy's, so that r = pi / mu.
    if algo.correction == "bypass":
        old_logprobs_N = tokens.rollout_logprobs_N
    advantages_N = tokens.advantages_N
    if teacher_logprobs_N is not None:
        taught_N = teacher_advantage(old_logprobs_N, teacher_logprobs_N, coef=algo.teacher_coef)
        alone = config.train.objective == "distill"
        advantages_N = tokens.loss_mask_N * (taught_N if alone else advantages_N + taught_N)
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_logprobs_N,
        rollout_logprobs_N=tokens.rollout_logprobs_N,
        advantages_N=advantages_N,
        loss_mask_N=tokens.loss_mask_N,
        sequences=Sequences(tokens.cu_seqlens, cp.all_reduce),
    )
    loss_N, clipped_N = loss_of(algo)(inputs, bounds_of(algo))
    stats = {"clipped": clipped_N.float()}
    if teacher_logprobs_N is not None:
        stats["kl_teacher"] = -taught_N / algo.teacher_coef
    if algo.correction in CORRECTIONS:
        usual = CORRECTIONS[algo.correction]
        low, high = algo.correction_low or usual.low, algo.correction_high or usual.high
        weights_N, cut_N = correct(usual._replace(low=low, high=high), inputs)
        loss_N = loss_N * weights_N
        stats |= {"weight": weights_N, "cut": cut_N.float()}
    if reference_logprobs_N is not None:
        kl_N = kl_penalty(logprobs_N, reference_logprobs_N, estimator=algo.kl_estimator)
        loss_N = loss_N + algo.kl_coef * kl_N
        stats["kl"] = kl_N.detach()
    if algo.entropy_coef:
        assert entropy_N is not None, f"algo.entropy_coef {algo.entropy_coef} needs entropies"
        loss_N = loss_N - algo.entropy_coef * entropy_N
    loss = aggregate(
        loss_N,
        tokens.loss_mask_N,
        tokens.sequence_weights_N,
        kind=algo.aggregation,
        num_loss_tokens=batch.num_loss_tokens,
        num_sequences=batch.num_sequences,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return loss, stats
