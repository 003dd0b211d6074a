"""The loss of one micro-batch, composed of the functions that the settings select."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

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
from r3.runtime.mesh import Axis
from r3.types import MicroBatch
from r3.user_code.algorithm import bounds_of, loss_of


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What passes before an update found, one tensor per micro-batch; None: not made.

    Attributes:
        old: log-probabilities before the step's first update. Where there is none, the update's
            own forward is the old policy.
        reference: log-probabilities of the reference policy, for the KL penalty.
        teacher: log-probabilities of the teacher.
        recorded: `ledger.recorded` of a pass over the same micro-batches (R2). None replays what
            the engine captured.
    """

    old: Sequence[torch.Tensor | None] | None = None
    reference: Sequence[torch.Tensor] | None = None
    teacher: Sequence[torch.Tensor] | None = None
    recorded: Sequence[torch.Tensor] | None = None

    def part(self, micro_batches: slice) -> Passes:
        """Return what was found for some of the micro-batches."""
        columns = {declared.name: getattr(self, declared.name) for declared in fields(self)}
        return Passes(
            **{name: column and column[micro_batches] for name, column in columns.items()}
        )


NONE_MADE = Passes()

PolicyLoss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""`policy_loss`, or another function with its arguments."""


def policy_loss(
    config: Config,
    tokens: MicroBatch,
    cp: Axis,
    logprobs_N: torch.Tensor,
    passes: Passes,
    *,
    number: int = 0,
    entropy_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute a micro-batch's share of the update's loss.

        loss = aggregate( w_t L_t + kl_coef KL_t - entropy_coef H_t )

    w_t is the importance weight against the engine, if `algo.correction` asks for one. All ranks of
    cp must call: they share sequences.

    Args:
        config: the sections `algo` and `rollout` are read.
        tokens: this rank's part of the micro-batch.
        cp: context-parallel ranks.
        logprobs_N: log-probabilities of the targets, with gradient.
        passes: what other policies give the targets. A teacher's part is added to the advantages,
            or replaces them with train.objective distill.
        number: of the micro-batch among those of `passes`.
        entropy_N: entropy of the policy's distribution at each token, with gradient; needed if
            `algo.entropy_coef` is above 0.

    Returns:
        The loss (a scalar) and statistics [N]: "clipped", and if used "kl_old", "weight", "cut",
        "kl" and "kl_teacher".
    """
    algo = config.algo
    old_N = passes.old[number] if passes.old else None
    # Bypass: the engine's log-probabilities stand for the old policy's, so that r = pi / mu.
    if algo.correction == "bypass":
        old_N = tokens.rollout_logprobs_N
    elif old_N is None:
        old_N = logprobs_N.detach()
    advantages_N = tokens.advantages_N
    if passes.teacher:
        taught_N = teacher_advantage(old_N, passes.teacher[number], coef=algo.teacher_coef)
        alone = config.distils
        advantages_N = tokens.loss_mask_N * (taught_N if alone else advantages_N + taught_N)
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        rollout_logprobs_N=tokens.rollout_logprobs_N,
        advantages_N=advantages_N,
        loss_mask_N=tokens.loss_mask_N,
        sequences=Sequences(tokens.cu_seqlens, cp.all_reduce),
    )
    loss_N, clipped_N = loss_of(algo)(inputs, bounds_of(algo))
    stats = {"clipped": clipped_N.float()}
    if passes.old and passes.old[number] is not None and algo.correction != "bypass":
        stats["kl_old"] = kl_penalty(old_N, logprobs_N.detach(), estimator="k3")
    if passes.teacher:
        stats["kl_teacher"] = -taught_N / algo.teacher_coef
    if algo.correction in CORRECTIONS:
        usual = CORRECTIONS[algo.correction]
        low, high = algo.correction_low or usual.low, algo.correction_high or usual.high
        weights_N, cut_N = correct(usual._replace(low=low, high=high), inputs)
        loss_N = loss_N * weights_N
        stats |= {"weight": weights_N, "cut": cut_N.float()}
    if passes.reference:
        kl_N = kl_penalty(logprobs_N, passes.reference[number], estimator=algo.kl_estimator)
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
        num_loss_tokens=tokens.num_loss_tokens,
        num_sequences=tokens.num_sequences,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return loss, stats
