"""Log-probabilities and entropy from hidden states, one chunk of tokens at a time.

With a vocabulary of 150,000, logits are by far the largest tensor of a training step. Here each
chunk's logits are computed, reduced to four numbers per token and freed; the backward pass computes
them again. The vocabulary may be sharded over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from r3.policy.products import product
from r3.runtime.mesh import Axis

# A logit whose probability is exactly 0 after the softmax. Unlike infinity, 0 times it is 0.
_NOWHERE = -1e30


@dataclass(frozen=True, kw_only=True)
class Head:
    """How hidden states become log-probabilities.

    Attributes:
        axis: the ranks that share the vocabulary (tp), with equally many rows of the output weight.
        vocab_size: tokens; further rows pad the vocabulary to equal parts.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at a time; 0 = all.
        fp32: multiply hidden states and weight in float32; otherwise in their own type, to which
            every logit is then rounded.
        entropy_gradient: entropies have a gradient (`algo.entropy_coef`). It needs one more tensor
            of a chunk's logits in the backward pass.
    """

    axis: Axis
    vocab_size: int
    temperature: float
    chunk_tokens: int
    fp32: bool
    entropy_gradient: bool = False

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        size = self.chunk_tokens or max(num_tokens, 1)
        return (slice(start, start + size) for start in range(0, num_tokens, size))

    def operand(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert an operand of the matrix product."""
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if self.fp32 else tensor

    def is_mixed(self, weight_VD: torch.Tensor) -> bool:
        """Whether torch computes float32 logits of bfloat16 operands, which it can on CUDA only.

        vLLM does the same for a float32 head (logits_processor.py). Products of bfloat16 numbers
        are exact in float32, so these are the logits of converted operands, about ten times faster.
        Gradients are those of `products_of_halves`.
        """
        return self.fp32 and weight_VD.is_cuda and weight_VD.dtype == torch.bfloat16

    def scaled_logits(self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of logits / temperature, at least float32, [N, V / tp].

        Rows that pad the vocabulary are `_NOWHERE`. `weight_VD` is the `operand` of the output
        weight, or the weight itself if `is_mixed`.
        """
        if self.is_mixed(weight_VD):
            logits_NV = torch.mm(hidden_ND, weight_VD.t(), out_dtype=torch.float32)
        else:
            logits_NV = product(self.operand(hidden_ND), weight_VD.t())
        scaled_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if self.temperature != 1:
            scaled_NV.mul_(1.0 / self.temperature)
        first, rows = self.axis.rank * len(weight_VD), len(weight_VD)
        if first + rows > self.vocab_size:
            scaled_NV[:, max(0, self.vocab_size - first) :] = _NOWHERE
        return scaled_NV

    def local_targets(
        self, targets_N: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each target's column in this rank's slice, [N, 1], and whether it is there, [N].

        A target in another rank's slice gets an arbitrary column.
        """
        local_N = targets_N - self.axis.rank * rows
        return local_N.clamp(0, rows - 1).unsqueeze(-1), (local_N >= 0) & (local_N < rows)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        head: Head,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index_N1, mine_N = head.local_targets(targets_N, len(weight_VD))
        weight = weight_VD if head.is_mixed(weight_VD) else head.operand(weight_VD)
        # Per token, over this rank's slice: largest z, sum of exp, sum of exp * z, and target's z.
        parts = []
        for rows in head.chunks(len(hidden_ND)):
            scaled_NV = head.scaled_logits(hidden_ND[rows], weight)
            top_N = scaled_NV.amax(-1)
            scaled_NV.sub_(top_N.unsqueeze(-1))
            target_N = scaled_NV.gather(-1, index_N1[rows]).squeeze(-1)
            probs_NV = scaled_NV.exp()
            parts.append(
                torch.stack([top_N, probs_NV.sum(-1), scaled_NV.mul_(probs_NV).sum(-1), target_N])
            )
        own_top_N, total_N, weighted_N, target_N = torch.cat(parts, 1).unbind(0)

        # Sums relative to a slice's own largest z are made relative to the largest z of all slices.
        top_N = head.axis.all_reduce(own_top_N.clone(), dist.ReduceOp.MAX)
        below_N = own_top_N - top_N
        scale_N = below_N.exp()
        sums_3N = torch.stack(
            [
                scale_N * total_N,
                scale_N * (weighted_N + total_N * below_N),
                torch.where(mine_N, target_N + below_N, 0.0),
            ]
        )
        total_N, weighted_N, target_N = head.axis.all_reduce(sums_3N).unbind(0)
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        # log p = z - top - log total, so that log p + H = z - top + excess.
        excess_N = entropy_N - log_total_N
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, top_N, total_N, excess_N)
        ctx.head = head
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return target_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden_ND, weight_VD, targets_N, top_N, total_N, excess_N = ctx.saved_tensors
        head: Head = ctx.head
        index_N1, mine_N = head.local_targets(targets_N, len(weight_VD))
        # d log p_target / d z_v = [v = target] - p_v and d H / d z_v = -p_v (log p_v + H).
        grad_N, entropy_grad_N = (grad / head.temperature for grad in grads)
        mixed = head.is_mixed(weight_VD)
        weight = weight_VD if mixed else head.operand(weight_VD)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD: torch.Tensor | None = None
        for rows in head.chunks(len(hidden_ND)):
            scaled_NV = head.scaled_logits(hidden_ND[rows], weight)
            scaled_NV.sub_(top_N[rows, None])
            factor_NV = -grad_N[rows, None]
            if head.entropy_gradient:
                factor_NV = (scaled_NV + excess_N[rows, None]).mul_(-entropy_grad_N[rows, None])
                factor_NV.sub_(grad_N[rows, None])
            grad_NV = scaled_NV.exp_().mul_(factor_NV.div_(total_N[rows, None]))
            del factor_NV
            grad_NV.scatter_add_(
                -1, index_N1[rows], torch.where(mine_N[rows], grad_N[rows], 0.0).unsqueeze(-1)
            )
            if mixed:
                grad_hidden_ND[rows], part_VD = products_of_halves(grad_NV, weight, hidden_ND[rows])
            else:
                grad_NV = grad_NV.to(weight.dtype)
                grad_hidden_ND[rows] = product(grad_NV, weight)
                part_VD = product(grad_NV.t(), head.operand(hidden_ND[rows]))
            # Chunks are summed in float32, and the sum is rounded once.
            if grad_weight_VD is None:
                grad_weight_VD = part_VD.to(torch.promote_types(part_VD.dtype, torch.float32))
            else:
                grad_weight_VD += part_VD
        assert grad_weight_VD is not None, "a micro-batch has at least one token"
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None


def products_of_halves(
    grad_NV: torch.Tensor, weight_VD: torch.Tensor, hidden_ND: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grad @ weight [N, D] and grad.T @ hidden [V, D] in float32.

    CUDA multiplies float32 without its tensor cores. So the gradient, float32, becomes the sum of
    two bfloat16 numbers, which keeps 16 of its 24 bits. Their products with bfloat16 numbers are
    exact in float32, and sums are float32.

    Args:
        grad_NV: float32.
        weight_VD, hidden_ND: bfloat16.
    """
    high_NV = grad_NV.bfloat16()
    halves = torch.cat([high_NV, (grad_NV - high_NV).bfloat16()])
    first_ND, second_ND = _float32_product(halves, weight_VD).chunk(2)
    return first_ND + second_ND, _float32_product(halves.t(), hidden_ND.repeat(2, 1))


def _float32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right of bfloat16 matrices with float32 results; CPU, in tests, converts first."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def logprobs_and_entropy(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and its entropy.

    All ranks of `head.axis` must call, with their rows of the output weight, the same hidden states
    and the same global targets. A rank's gradient of the hidden states is its slice's share, to be
    summed over the axis. Entropy has a gradient if `head.entropy_gradient` says so.

    Args:
        hidden_ND: hidden states.
        weight_VD: this rank's rows of the output weight, [V / tp, D].
        targets_N: token ids.
        head: how hidden states become log-probabilities.

    Returns:
        Log-probabilities and entropies, float32, both [N].
    """
    return _HeadLogprobs.apply(hidden_ND, weight_VD, targets_N, head)


class ScoringGPT(GPTModel):
    """Megatron's GPTModel that returns log-probabilities and entropy for `labels`.

    For labels [b, s] it returns [2, b * s], sequence by sequence; upstream returns a cross-entropy
    of full logits (gpt_model.py, `_postprocess`). Without labels it returns logits like any
    GPTModel, and on all but the last pipeline stage hidden states. Set `head` after construction.
    """

    head: Head

    def _postprocess(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None, **rest: Any
    ) -> Any:
        if labels is None or not self.post_process:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)
        if self.head.axis.size > 1:
            assert self.config.sequence_parallel, "tensor parallel ranks hold parts of the sequence"
            # Its backward sums every rank's share of the gradient and returns to each rank the part
            # of its own tokens.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=self.head.axis.group
            )
        tied = self.share_embeddings_and_output_weights
        weight_VD = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        hidden_ND = hidden_states.transpose(0, 1).flatten(0, 1)  # Megatron's are [s, b, D]
        return torch.stack(logprobs_and_entropy(hidden_ND, weight_VD, labels.flatten(), self.head))
