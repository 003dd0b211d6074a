"""Experts of a MoE layer in few passes over memory: fused experts on CPU.

Megatron's dispatcher writes one copy of a token per chosen expert, sorted, and one per output.
Here experts take their rows from the tokens and add their outputs to them one expert after the
other, so that what an expert works on stays in the processor's cache. The order of a sum is that of
the experts, whatever the batch: forward and recomputation give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from r3.policy.dispatch import Slots
from r3.policy.modules import GroupedExperts


class FusedExperts(GroupedExperts):
    """Experts as in `GroupedExperts`, on tokens that are neither copied nor sorted before."""

    def forward(
        self, tokens_ND: torch.Tensor, slots: Slots, gates_NK: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return every token's sum over this rank's experts, [N, D].

        Args:
            tokens_ND: tokens.
            slots: experts of the tokens.
            gates_NK: weights of the slots, float32.
        """
        return _Experts.apply(tokens_ND, gates_NK, slots.experts_NK, self.w1, self.w2), None


class _Experts(torch.autograd.Function):
    """sum_k gate_k * w2[e_k] (silu(gate part of w1[e_k] x) * up part), saving w1's outputs only.

    Below, S are slots of [N * K] in the order of their experts. Index N is a token of zeros, and
    index N * K a slot with gate 0: they fill an expert's part up to a multiple.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens_ND: torch.Tensor,
        gates_NK: torch.Tensor,
        experts_NK: torch.Tensor,
        w1: nn.Parameter,
        w2: nn.Parameter,
    ) -> torch.Tensor:
        parts = _parts(experts_NK, len(w1), multiple=_MULTIPLES.get(tokens_ND.dtype, 1))
        tokens, gates = _with_zero(tokens_ND), _with_zero(gates_NK.flatten())
        saved_SF = tokens_ND.new_empty(sum(len(slots) for _, slots, _ in parts), w1.shape[1])
        out = _zeros(tokens)
        done = 0
        for expert, slots_S, rows_S in parts:
            both_SF = saved_SF[done : done + len(slots_S)]
            done += len(slots_S)
            torch.mm(tokens.index_select(0, rows_S), w1[expert].t(), out=both_SF)
            gate, up = both_SF.chunk(2, -1)
            inner = F.silu(gate).mul_(up) * gates.index_select(0, slots_S)[:, None]
            outputs = inner.to(tokens.dtype) @ w2[expert].t()
            out.index_add_(0, rows_S, outputs.to(out.dtype))
        ctx.save_for_backward(tokens_ND, gates_NK, saved_SF)
        ctx.parts, ctx.weights = parts, (w1, w2)
        return out[:-1].to(tokens.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        tokens_ND, gates_NK, saved_SF = ctx.saved_tensors
        w1, w2 = ctx.weights
        tokens, gates = _with_zero(tokens_ND), _with_zero(gates_NK.flatten())
        d_out = _with_zero(upstream[0])
        d_tokens, d_gates = _zeros(tokens), torch.zeros_like(gates)
        w1_gradient, w2_gradient = (
            _WeightGradient(weight) if needed else None
            for weight, needed in zip((w1, w2), ctx.needs_input_grad[3:], strict=True)
        )
        done = 0
        for expert, slots_S, rows_S in ctx.parts:
            both_SF = saved_SF[done : done + len(slots_S)]
            done += len(slots_S)
            gate, up = both_SF.chunk(2, -1)
            weight_S = gates.index_select(0, slots_S)[:, None]
            sigmoid = torch.sigmoid(gate)
            swish = gate * sigmoid
            d_outputs = d_out.index_select(0, rows_S)
            d_inner = (d_outputs @ w2[expert]).to(gates.dtype)
            product = swish * up
            if w2_gradient:
                w2_gradient.add(expert, d_outputs.t(), (product * weight_S).to(tokens.dtype))
            d_gates[slots_S] = (d_inner * product).sum(-1)
            d_product = d_inner * weight_S
            d_both = torch.empty_like(both_SF)
            torch.mul(d_product, swish, out=d_both[:, up.shape[1] :])
            # d silu = sigmoid * (1 + gate * (1 - sigmoid)) = sigmoid + swish * (1 - sigmoid)
            slope = torch.addcmul(sigmoid, swish, 1 - sigmoid)
            torch.mul(d_product.mul_(up), slope, out=d_both[:, : up.shape[1]])
            if w1_gradient:
                w1_gradient.add(expert, d_both.t(), tokens.index_select(0, rows_S))
            d_tokens.index_add_(0, rows_S, (d_both @ w1[expert]).to(d_tokens.dtype))
        return (
            d_tokens[:-1].to(tokens.dtype),
            d_gates[:-1].view_as(gates_NK),
            None,
            w1_gradient and w1_gradient.result(),
            w2_gradient and w2_gradient.result(),
        )


# oneDNN prepares a product of bfloat16 anew for every number of rows that it has not seen lately,
# which takes longer than a small product. Rounded up, the numbers repeat.
_MULTIPLES = {torch.bfloat16: 64}


def _parts(
    experts_NK: torch.Tensor, count: int, *, multiple: int
) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Per expert that has tokens: its number, its slots in [N * K], and their rows in [N]."""
    flat = experts_NK.flatten()
    slots = flat.argsort(stable=True)
    _, *by_expert = slots.split(_sizes(flat, count))  # the first part are the slots of other ranks
    found = []
    for expert, part_S in enumerate(by_expert):
        if len(part_S):
            slots_S = F.pad(part_S, (0, -len(part_S) % multiple), value=flat.numel())
            rows_S = slots_S.div(experts_NK.shape[1], rounding_mode="floor")
            found.append((expert, slots_S, rows_S))
    return found


def _sizes(experts: torch.Tensor, count: int) -> list[int]:
    """How many slots have expert -1, 0, ..., count - 1."""
    return torch.bincount(experts + 1, minlength=count + 1).tolist()


def _with_zero(values: torch.Tensor) -> torch.Tensor:
    """One row of zeros behind the others."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Sums over experts are taken in float32 at least."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


class _WeightGradient:
    """Gradient of experts' weights [E, ...], added straight to Megatron's buffer if there is one.

    Megatron's own layers do the same under gradient_accumulation_fusion: they set
    `grad_added_to_main_grad` and return a tensor whose values nobody reads, so that hooks run.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight, self._direct = weight, hasattr(weight, "main_grad")
        self._total = weight.main_grad if self._direct else torch.zeros_like(weight)

    def add(self, expert: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left @ right to the gradient of one expert."""
        total = self._total[expert]
        if total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            total += left @ right

    def result(self) -> torch.Tensor:
        """What backward returns for the weight."""
        if not self._direct:
            return self._total
        self._weight.grad_added_to_main_grad = True
        return torch.empty_like(self._weight)
