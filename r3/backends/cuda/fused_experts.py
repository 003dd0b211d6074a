"""Fused experts of a MoE layer on CUDA: few kernels, no host synchronisation.

The experts of all tokens are known, so that their slots are sorted once. Rows are gathered in that
order, go through torch's grouped products, and each token adds up its own rows in float32: there is
no atomic sum, and forward and recomputation give the same bits. Backward runs the same way in the
other direction. Gradients of weights come last, while those of tokens travel.

On CPU tensors it runs with plain torch, for tests; CPU runs use `r3.backends.cpu.fused_experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from r3.backends import expert_kernels  # noqa: F401  (defines torch.ops.r3)
from r3.backends.dispatch import Slots
from r3.layers.grouped_experts import GroupedExperts


class DeviceExperts(GroupedExperts):
    """Experts as in `GroupedExperts`, on tokens that `r3.backends.dispatch` hands over unsorted."""

    _weights: Weights | None = None  # of the next forward

    def defer_weight_gradients(self) -> None:
        """Place the weights' gradients in the next forward's graph.

        Backward computes them after that of all nodes that are made from now on, such as those
        that bring tokens here and, in backward, start to send gradients back.
        """
        self._weights = deferred(self.w1, self.w2)

    def forward(
        self, tokens_ND: torch.Tensor, slots: Slots, gates_NK: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return every token's sum over this rank's experts, [N, D]; see `FusedExperts`."""
        weights, self._weights = self._weights or deferred(self.w1, self.w2), None
        return _Experts.apply(tokens_ND, gates_NK, *slots, *weights), None


class Weights(NamedTuple):
    """Experts' weights for one forward.

    Attributes:
        w1, w2: the weights.
        todo: `_Experts` leaves here how to compute their gradients, if they need some.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    todo: list[Callable[[bool, bool], Any]]


def deferred(w1: nn.Parameter, w2: nn.Parameter) -> Weights:
    """Weights whose gradients are computed by a node of their own, which is made here.

    Autograd runs the backward of the node that was made last first, if that of both can run.
    """
    todo: list[Callable[[bool, bool], Any]] = []
    w1, w2 = _WeightGradients.apply(todo, w1, w2)
    return Weights(w1, w2, todo)


class _WeightGradients(torch.autograd.Function):
    """Experts' weights; backward computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, todo: list[Callable[[bool, bool], Any]], w1: nn.Parameter, w2: nn.Parameter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.todo = todo
        return w1.view_as(w1), w2.view_as(w2)

    @staticmethod
    def backward(ctx: Any, *_placeholders: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.todo.pop()
        return None, *gradients(*ctx.needs_input_grad[1:])


class _Order(NamedTuple):
    """Slots of this rank's experts in the order of their experts.

    There may be other slots behind the last expert's: no product reads or writes their rows.

    Attributes:
        slots_S: their numbers in [N * K].
        places_NK: where a slot is in that order; S or more: not on this rank.
        ends_E: where each expert's slots end, int32.
    """

    slots_S: torch.Tensor
    places_NK: torch.Tensor
    ends_E: torch.Tensor


def _sorted(experts_NK: torch.Tensor, num_experts: int, count: int) -> _Order:
    """Sort slots by expert, those of a token's earlier experts and of earlier tokens first."""
    # Other ranks' slots come last. Few bits sort faster.
    keys = experts_NK.masked_fill(experts_NK < 0, num_experts).flatten().to(torch.int16)
    keys, slots = keys.sort(stable=True)
    experts_E = torch.arange(num_experts, dtype=keys.dtype, device=keys.device)
    ends_E = torch.searchsorted(keys, experts_E, right=True, out_int32=True)
    numbers = torch.arange(len(slots), device=slots.device)
    places_NK = torch.empty_like(slots).scatter_(0, slots, numbers).view(experts_NK.shape)
    return _Order(slots[:count], places_NK.masked_fill_(experts_NK < 0, count), ends_E)


class _Experts(torch.autograd.Function):
    """sum_k w2[e_k] (gate_k * silu(gate part of w1[e_k] x) * up part), saving w1's outputs only."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_ND: torch.Tensor,
        gates_NK: torch.Tensor,
        experts_NK: torch.Tensor,
        count: int,
        w1: torch.Tensor,
        w2: torch.Tensor,
        todo: list[Callable[[bool, bool], Any]],
    ) -> torch.Tensor:
        ctx.todo = todo
        order = _sorted(experts_NK, len(w1), count)
        rows_S = order.slots_S // experts_NK.shape[1]
        both_SF = _products(tokens_ND[rows_S], w1.transpose(1, 2), order)
        inner_SF = torch.ops.r3.weighted_swiglu(both_SF, gates_NK.flatten()[order.slots_S])
        outputs_SD = _products(inner_SF, w2.transpose(1, 2), order)
        ctx.save_for_backward(tokens_ND, gates_NK, both_SF, *order, w1, w2)
        return torch.ops.r3.sum_rows(outputs_SD, order.places_NK)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        tokens_ND, gates_NK, both_SF, *rest, w1, w2 = ctx.saved_tensors
        order = _Order(*rest)
        rows_S = order.slots_S // gates_NK.shape[1]
        d_outputs_SD = upstream[0][rows_S]
        inner_SF, d_both_SF, d_gates_S = torch.ops.r3.weighted_swiglu_backward(
            both_SF, gates_NK.flatten()[order.slots_S], _products(d_outputs_SD, w2, order)
        )
        d_gates = torch.zeros_like(gates_NK).flatten().scatter_(0, order.slots_S, d_gates_S)
        is_elsewhere = order.places_NK.flatten() >= len(order.slots_S)
        d_tokens_ND = torch.ops.r3.sum_rows(_products(d_both_SF, w1, order), order.places_NK)

        def weight_gradients(w1_needed: bool, w2_needed: bool) -> Any:
            # Megatron's hook adds a weight's gradient to its buffer.
            return (
                _weight_gradient(d_both_SF, tokens_ND[rows_S], w1, order) if w1_needed else None,
                _weight_gradient(d_outputs_SD, inner_SF, w2, order) if w2_needed else None,
            )

        w1_counts, w2_counts = ctx.needs_input_grad[4:6]
        if w1_counts or w2_counts:
            ctx.todo.append(weight_gradients)
        return (
            d_tokens_ND,
            d_gates.masked_fill_(is_elsewhere, 0.0).view_as(gates_NK),
            None,
            None,
            _placeholder(w1) if w1_counts else None,
            _placeholder(w2) if w2_counts else None,
            None,
        )


def _placeholder(weight: torch.Tensor) -> torch.Tensor:
    """What `_Experts` returns as the gradient of a weight: nobody reads its values."""
    return weight.new_zeros(()).expand(weight.shape)


def _products(rows_SD: torch.Tensor, matrices: torch.Tensor, order: _Order) -> torch.Tensor:
    """Multiply each expert's rows with its matrix [E, D, F]: [S, F]."""
    if not len(rows_SD):
        return rows_SD.new_empty(0, matrices.shape[2])
    return F.grouped_mm(rows_SD, matrices, offs=order.ends_E)


def _weight_gradient(
    left_SF: torch.Tensor, right_SD: torch.Tensor, weight: torch.Tensor, order: _Order
) -> torch.Tensor:
    """Sum the outer products of each expert's rows: [E, F, D]."""
    if not len(left_SF):
        return torch.zeros_like(weight)
    return F.grouped_mm(left_SF.t(), right_SD, offs=order.ends_E)
