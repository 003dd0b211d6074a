"""Log-probabilities and entropy from logits whose vocabulary is cut over tensor parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from r3.mesh import Axis

# A logit whose probability is exactly 0 after the softmax, and that times 0 is 0, which infinity is not.
_NOWHERE = -1e30


class _LogprobsEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        axis: Axis,
        inverse_temperature: float,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled_NV = logits_NV.float() * inverse_temperature
        first = axis.rank * logits_NV.shape[-1]
        if (
            first + logits_NV.shape[-1] > vocab_size
        ):  # rows that pad the vocabulary to the ranks are no tokens
            scaled_NV[:, max(0, vocab_size - first) :] = _NOWHERE
        local_N = targets_N - first
        mine_N = (local_N >= 0) & (local_N < logits_NV.shape[-1])
        index_N1 = local_N.clamp(0, logits_NV.shape[-1] - 1).unsqueeze(-1)

        top_N = axis.all_reduce(scaled_NV.amax(-1), dist.ReduceOp.MAX)
        scaled_NV = scaled_NV - top_N.unsqueeze(-1)
        target_N = torch.where(mine_N, scaled_NV.gather(-1, index_N1).squeeze(-1), 0.0)
        probs_NV = scaled_NV.exp()
        # sum of exp, sum of exp * z, and the target's z: one collective for the three
        sums_3N = axis.all_reduce(torch.stack([probs_NV.sum(-1), (probs_NV * scaled_NV).sum(-1), target_N]))
        total_N, weighted_N, target_N = sums_3N.unbind(0)
        log_total_N = total_N.log()
        probs_NV = probs_NV / total_N.unsqueeze(-1)
        ctx.save_for_backward(probs_NV, index_N1, mine_N)
        ctx.inverse_temperature, ctx.dtype = inverse_temperature, logits_NV.dtype
        entropy_N = log_total_N - weighted_N / total_N
        ctx.mark_non_differentiable(entropy_N)
        return target_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None, None, None]:
        probs_NV, index_N1, mine_N = ctx.saved_tensors
        grad_N = grads[0] * ctx.inverse_temperature
        grad_NV = probs_NV * -grad_N.unsqueeze(-1)
        grad_NV.scatter_add_(-1, index_N1, torch.where(mine_N, grad_N, 0.0).unsqueeze(-1))
        return grad_NV.to(ctx.dtype), None, None, None, None


def logprobs_and_entropy(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, axis: Axis, *, vocab_size: int, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution; float32, both `[N]`.

    All ranks of `axis` (tp) must call, each with its slice of the vocabulary, padded beyond `vocab_size` to equal parts, and
    the same global `targets_N`. The gradient flows through the log-probabilities only; entropy is a metric.
    """
    return _LogprobsEntropy.apply(logits_NV, targets_N, axis, 1.0 / temperature, vocab_size)
