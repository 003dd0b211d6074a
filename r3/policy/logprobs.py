"""Log-probabilities and entropy from hidden states, one chunk of tokens at a time.

With a vocabulary of 150,000, logits are by far the largest tensor of a training step. Here each
chunk's logits are computed, reduced to four numbers per token and freed; the backward pass computes
them again, unless they are those of all tokens. The vocabulary may be sharded over tensor-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from r3.algo.sampling_mask import KeptColumns
from r3.layers.kernels import NOWHERE, product
from r3.runtime.mesh import Axis


@dataclass(frozen=True, kw_only=True)
class Head:
    """How hidden states become log-probabilities.

    Attributes:
        axis: the ranks that share the vocabulary (tp), with equally many rows of the output weight.
        vocab_size: tokens; further rows pad the vocabulary to equal parts.
        temperature: the output layer's product is divided by it: the temperature of sampling times
            `ModelShape.logits_scaling`.
        chunk_tokens: tokens whose logits exist at a time; 0 = all, and backward keeps them.
        fp32: multiply hidden states and weight in float32; otherwise in their own type, to which
            every logit is then rounded.
        entropy_gradient: entropies have a gradient (`algo.entropy_coef`). It needs one more tensor
            of a chunk's logits in the backward pass.
        adds_to_main_grad: products add the weight's gradient to Megatron's float32 buffer, if it
            has one. The sum is never rounded, and no other pass adds it.
        is_embedding: the weight is that of the embedding too.
    """

    axis: Axis
    vocab_size: int
    temperature: float
    chunk_tokens: int
    fp32: bool
    entropy_gradient: bool = False
    adds_to_main_grad: bool = False
    is_embedding: bool = False

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
        Gradients are those of `product_of_halves`.
        """
        return self.fp32 and weight_VD.is_cuda and weight_VD.dtype == torch.bfloat16

    def logits(self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the logits, [N, V / tp].

        `weight_VD` is the `operand` of the output weight, or the weight itself if `is_mixed`.
        """
        if self.is_mixed(weight_VD):
            return _float32_product(hidden_ND, weight_VD.t())
        return product(self.operand(hidden_ND), weight_VD.t())

    def restricted(
        self, logits_NV: torch.Tensor, rows: slice, mask: KeptColumns | None
    ) -> torch.Tensor:
        """Return logits whose probability is 0 where the engine kept no token; changes them."""
        if mask:
            mask.restrict(logits_NV, rows, NOWHERE * self.temperature)
        return logits_NV

    def columns(self, rows: int) -> int:
        """How many rows of this rank's slice are tokens; the others pad the vocabulary."""
        return max(0, min(rows, self.vocab_size - self.axis.rank * rows))

    def local_targets(
        self, targets_N: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each target's column in this rank's slice, and whether it is there, both [N].

        A target in another rank's slice gets an arbitrary column.
        """
        local_N = targets_N - self.axis.rank * rows
        return local_N.clamp(0, rows - 1), (local_N >= 0) & (local_N < rows)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        head: Head,
        mask: KeptColumns | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index_N, mine_N = head.local_targets(targets_N, len(weight_VD))
        weight = weight_VD if head.is_mixed(weight_VD) else head.operand(weight_VD)
        columns, scale = head.columns(len(weight_VD)), 1.0 / head.temperature
        parts, kept = [], []
        for rows in head.chunks(len(hidden_ND)):
            logits_NV = head.restricted(head.logits(hidden_ND[rows], weight), rows, mask)
            parts.append(torch.ops.r3.logit_sums(logits_NV, index_N[rows], columns, scale))
            kept = [] if head.chunk_tokens else [logits_NV]
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
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, top_N, total_N, excess_N, *kept)
        ctx.head, ctx.mask = head, mask
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return target_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        hidden_ND, weight_VD, targets_N, top_N, total_N, excess_N, *kept = ctx.saved_tensors
        head: Head = ctx.head
        index_N, mine_N = head.local_targets(targets_N, len(weight_VD))
        # d log p_target / d z_v = [v = target] - p_v and d H / d z_v = -p_v (log p_v + H).
        grad_N, entropy_grad_N = (grad / head.temperature for grad in grads)
        at_target_N = torch.where(mine_N, grad_N, 0.0)
        mixed = head.is_mixed(weight_VD)
        weight = weight_VD if mixed else head.operand(weight_VD)
        columns, scale = head.columns(len(weight_VD)), 1.0 / head.temperature
        grad_hidden_ND = torch.empty_like(hidden_ND)
        direct = head.adds_to_main_grad and hasattr(weight_VD, "main_grad")
        total_VD: torch.Tensor | None = weight_VD.main_grad if direct else None
        for rows in head.chunks(len(hidden_ND)):
            grad_NV = torch.ops.r3.logit_gradient(
                kept[0]
                if kept
                else head.restricted(head.logits(hidden_ND[rows], weight), rows, ctx.mask),
                index_N[rows],
                columns,
                scale,
                top_N[rows],
                total_N[rows],
                grad_N[rows],
                at_target_N[rows],
                entropy_grad_N[rows] if head.entropy_gradient else None,
                excess_N[rows] if head.entropy_gradient else None,
                mixed,
            )
            operand_ND = head.operand(hidden_ND[rows])
            if mixed:
                grad_hidden_ND[rows] = product_of_halves(grad_NV, weight)
                operand_ND = hidden_ND[rows].repeat(2, 1)
            else:
                grad_hidden_ND[rows] = product(grad_NV, weight)
            if direct:
                _add_product(total_VD, grad_NV.t(), operand_ND)
                continue
            multiply = _float32_product if mixed else product
            part_VD = multiply(grad_NV.t(), operand_ND)
            # Chunks are summed in float32, and the sum is rounded once.
            if total_VD is None:
                total_VD = part_VD.to(torch.promote_types(part_VD.dtype, torch.float32))
            else:
                total_VD += part_VD
        assert total_VD is not None, "a micro-batch has at least one token"
        if not direct:
            return grad_hidden_ND, total_VD.to(weight_VD.dtype), None, None, None
        if head.is_embedding:  # Megatron adds the embedding's gradient, and what is returned here
            return grad_hidden_ND, torch.zeros_like(weight_VD), None, None, None
        weight_VD.grad_added_to_main_grad = True  # nobody reads what is returned
        return grad_hidden_ND, torch.empty_like(weight_VD), None, None, None


def product_of_halves(halves_NV: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Return (upper half + lower half) @ weight in float32, [N, D].

    CUDA multiplies float32 without its tensor cores. A sum of two bfloat16 numbers keeps 16 of its
    24 bits. Their products with bfloat16 numbers are exact in float32, and sums are float32.

    Args:
        halves_NV: bfloat16 numbers above those that are added to them, [2N, V].
        weight_VD: bfloat16.
    """
    high_ND, low_ND = _float32_product(halves_NV, weight_VD).chunk(2)
    return high_ND + low_ND


def _float32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right of bfloat16 matrices with float32 results; CPU, in tests, converts first."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to a float32 matrix; CPU, in tests, converts bfloat16 first."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def logprobs_and_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    head: Head,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
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
        kept: counts and ids of the tokens that the softmax is over (`r3.algo.sampling_mask`); 0
            or None: all.

    Returns:
        Log-probabilities and entropies, float32, both [N].
    """
    mask, size = None, len(weight_VD)
    if kept:
        first = head.axis.rank * size
        mask = KeptColumns.of(*kept, first=first, size=size, device=weight_VD.device)
    return _HeadLogprobs.apply(hidden_ND, weight_VD, targets_N, head, mask)


class ScoringGPT(GPTModel):
    """Megatron's GPTModel that returns log-probabilities and entropy for `labels`.

    For labels [b, s] it returns [2, b * s], sequence by sequence; upstream returns a cross-entropy
    of full logits (gpt_model.py, `_postprocess`). Without labels it returns logits like any
    GPTModel, and on all but the last pipeline stage hidden states. Set `head` after construction,
    and `kept` before each forward.
    """

    head: Head
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    logits_scaling = 1.0  # logits are divided by it

    def _postprocess(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None, **rest: Any
    ) -> Any:
        if labels is None or not self.post_process:
            output = super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)
            return output / self.logits_scaling if self.post_process else output
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
        scores = logprobs_and_entropy(hidden_ND, weight_VD, labels.flatten(), self.head, self.kept)
        return torch.stack(scores)
