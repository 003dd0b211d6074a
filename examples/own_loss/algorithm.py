"""A policy loss and an advantage that R3 does not have."""

import torch


def tapered(inputs, bounds, limit=1.0):
    """Learn good responses without a ratio, and unlearn bad ones the less the policy moved away.

    After TOPR (arXiv 2503.14286), with w the ratio pi / mu of the whole response:

        L_t = -A log pi                       where A > 0
        L_t = -sg[ min(w, limit) ] A log pi   where A < 0
    """
    log_ratio_N = (inputs.logprobs_N - inputs.rollout_logprobs_N).detach().clamp(-20, 20)
    # Sums over whole responses, also if several ranks share one (parallel.cp).
    total_N, _ = inputs.sequences.sum_and_count_N(log_ratio_N, inputs.loss_mask_N)
    weight_N = total_N.clamp(-20, 20).exp()
    tapered_N = (inputs.advantages_N < 0) & (weight_N > limit)
    weight_N = torch.where(inputs.advantages_N < 0, weight_N.clamp(max=limit), 1.0)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return loss_N, tapered_N & inputs.on_N


def wins(rewards_R, groups_R):
    """Compare each sample with the others of its prompt: (wins - losses) / others, in -1 .. 1.

    Only the order of rewards counts, so one extreme reward does not change the others' advantages.
    """
    same_RR = groups_R[:, None] == groups_R[None, :]
    order_RR = torch.sign(rewards_R[:, None] - rewards_R[None, :])
    others_R = (same_RR.sum(1) - 1).clamp(min=1)
    return (order_RR * same_RR).sum(1) / others_R
