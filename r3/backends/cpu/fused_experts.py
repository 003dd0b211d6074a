"""Fused experts of a MoE layer on CPU: few passes over memory.

Megatron's dispatcher writes one copy of a token per chosen expert, sorted, and one per output.
Here experts take their rows from the tokens and add their outputs to them one expert after the
other. The order of a sum is that of the experts, whatever the batch: forward and recomputation give
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from r3.backends.dispatch import Slots
from r3.backends.expert_kernels import weighted_swiglu, weighted_swiglu_backward
from r3.layers.grouped_experts import GroupedExperts
from r3.layers.kernels import is_by_float32, product


class FusedExperts(GroupedExperts):
    """Experts as in `GroupedExperts`, on tokens that are neither copied nor sorted before."""

    def defer_weight_gradients(self) -> None:
        """Do nothing: backward computes all gradients of an expert while its rows are in cache."""

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

    Below, S are slots of [N * K] in the order of their experts. Slot N * K has gate 0 and row 0: it
    fills an expert's part up to a multiple, and changes no sum. What lies between two products is
    computed in float32 at least.
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
        dtype, wide = tokens_ND.dtype, gates_NK.dtype
        slots_S, rows_S, sizes = _parts(experts_NK, len(w1), multiple=_multiple(tokens_ND))
        gates_S = F.pad(gates_NK.flatten(), (0, 1)).index_select(0, slots_S)
        saved = []
        out_ND = torch.zeros_like(tokens_ND, dtype=wide)
        for expert, rows, gates in _by_expert(sizes, rows_S, gates_S):
            both = product(tokens_ND.index_select(0, rows), w1[expert].t())
            saved.append(both)
            inner = weighted_swiglu(both, gates)
            out_ND.index_add_(0, rows, product(inner, w2[expert].t()).to(wide))
        ctx.save_for_backward(tokens_ND, gates_S, slots_S, rows_S, *saved)
        ctx.sizes, ctx.weights, ctx.shape = sizes, (w1, w2), gates_NK.shape
        return out_ND.to(dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        tokens_ND, gates_S, slots_S, rows_S, *saved = ctx.saved_tensors
        (d_out_ND,), (w1, w2) = upstream, ctx.weights
        dtype, wide = tokens_ND.dtype, gates_S.dtype
        d_tokens_ND, d_gates_S = (
            torch.zeros_like(tokens_ND, dtype=wide),
            torch.empty_like(gates_S),
        )
        w1_gradient, w2_gradient = (
            _WeightGradient(weight) if needed else None
            for weight, needed in zip((w1, w2), ctx.needs_input_grad[3:], strict=True)
        )
        parts = _by_expert(ctx.sizes, rows_S, gates_S, d_gates_S)
        for both, (expert, rows, gates, d_gates) in zip(saved, parts, strict=True):
            d_outputs = d_out_ND.index_select(0, rows)
            inner, d_both, d_gates[:] = weighted_swiglu_backward(
                both, gates, product(d_outputs, w2[expert])
            )
            if w2_gradient:
                w2_gradient.add(expert, d_outputs.t(), inner)
            if w1_gradient:
                w1_gradient.add(expert, d_both.t(), tokens_ND.index_select(0, rows))
            d_tokens_ND.index_add_(0, rows, product(d_both, w1[expert]).to(wide))
        d_gates = d_gates_S.new_zeros(ctx.shape.numel() + 1)
        d_gates[slots_S] = d_gates_S
        return (
            d_tokens_ND.to(dtype),
            d_gates[:-1].view(ctx.shape),
            None,
            w1_gradient and w1_gradient.result(),
            w2_gradient and w2_gradient.result(),
        )


def _multiple(tokens_ND: torch.Tensor) -> int:
    """What the number of an expert's rows is rounded up to.

    torch prepares a bfloat16 product again for every number of rows that it has not seen lately,
    which takes longer than a small product. Rounded up, the numbers repeat.
    """
    is_bfloat16 = tokens_ND.dtype == torch.bfloat16 and not is_by_float32(tokens_ND)
    return 64 if is_bfloat16 else 1


def _parts(
    experts_NK: torch.Tensor, num_experts: int, *, multiple: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Slots of [N * K] by expert, their rows of [N], and how many of them each expert has."""
    flat = experts_NK.flatten()
    # How many slots have expert -1, 0, ..., num_experts - 1.
    elsewhere, *sizes = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
    slots_S = flat.argsort(stable=True)[elsewhere:]
    rows_S = slots_S.div(experts_NK.shape[1], rounding_mode="floor")
    if multiple > 1:
        missing = [-size % multiple for size in sizes]
        slots_S, rows_S = (
            torch.cat(
                [
                    F.pad(part, (0, more), value=filler)
                    for part, more in zip(values_S.split(sizes), missing, strict=True)
                ]
            )
            for values_S, filler in ((slots_S, flat.numel()), (rows_S, 0))
        )
        sizes = [size + more for size, more in zip(sizes, missing, strict=True)]
    return slots_S, rows_S, sizes


def _by_expert(sizes: list[int], *values_S: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Number and parts of every expert that has slots."""
    for expert, *parts in zip(count(), *(values.split(sizes) for values in values_S)):
        if len(parts[0]):
            yield expert, *parts


class _WeightGradient:
    """Gradient of experts' weights [E, ...], added straight to Megatron's buffer if there is one.

    Megatron's own layers do the same under gradient_accumulation_fusion: they set
    `grad_added_to_main_grad` and return a tensor whose values nobody reads, so that hooks run.

    Attributes:
        total: what gradients are added to.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight, self._direct = weight, hasattr(weight, "main_grad")
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.total = weight.main_grad if self._direct else torch.zeros_like(weight, dtype=wide)

    def add(self, expert: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left @ right to the gradient of one expert."""
        total = self.total[expert]
        if is_by_float32(left):
            left, right = left.to(total.dtype), right.to(total.dtype)
        if total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            total += product(left, right)

    def result(self) -> torch.Tensor:
        """What backward returns for the weight."""
        if not self._direct:
            return self.total.to(self._weight.dtype)
        self._weight.grad_added_to_main_grad = True
        return torch.empty_like(self._weight)
