"""Exchanges between ranks: tokens of fused experts; gradients and parameters.

Token dispatch of a MoE layer: a token goes once to each rank that needs it.

Megatron's dispatcher sends and keeps one copy of a token per chosen expert. Here a token travels
once to every expert-parallel rank that has one of its experts, and comes back as one row: the sum
over that rank's experts. Without expert parallelism nothing is copied, and nothing waits for the
device.

With it, the host must know how many rows ranks exchange. Replayed routes are known before a
micro-batch's forward, so that all layers' sizes are exchanged and read at once, and the order of
rows is the same in every pass over the micro-batch. A token whose route is not known, such as the
last one of a sequence, then goes to every rank, of which those without its experts add zero. Where
all routes are live, ranks exchange and read sizes per layer and pass.

Rows travel while ranks compute. Forward: shared experts run while the sums of
the other experts come back. Backward: gradients of shared experts are computed while those of the
sums travel, and gradients of the experts' weights while those of tokens travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from r3.backends import expert_kernels  # noqa: F401  (defines torch.ops.r3)
from r3.runtime.mesh import Axis


class Slots(NamedTuple):
    """Which of a rank's experts get its tokens.

    Attributes:
        experts_NK: expert of each slot, counted on this rank; -1: not on this rank.
        num_local: number of slots with an expert of this rank or more, known without asking the
            device.
    """

    experts_NK: torch.Tensor
    num_local: int


def chosen_experts(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """The experts [N, K] of each token from Megatron's map [N, E], in ascending order."""
    # One expert too many in one row would shift the routes of all later tokens.
    counts_N = routing_map.sum(1)
    is_right = (counts_N == topk).all()
    if routing_map.is_cuda:  # the device raises the error, and nothing waits for it
        torch._assert_async(is_right, f"a token has not {topk} experts in the routing map")
        return first_set(routing_map, topk)
    assert is_right, (
        f"tokens have {counts_N.unique().tolist()} experts each in the routing map, not {topk}"
    )
    return routing_map.nonzero()[:, 1].view(-1, topk)


def first_set(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """Columns of the first `topk` true values of each row, without waiting for the device."""
    order_NE = routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    # A view would keep the memory of all columns until backward.
    return order_NE[:, :topk].contiguous()


class Rows(NamedTuple):
    """Which tokens are sent, rank by rank, and for a rank token by token.

    Attributes:
        tokens_M: number of the token in each row.
        firsts_M: number of the first expert of the rank that gets the row.
        places_NR: row of each token for each rank; M or more: none.
    """

    tokens_M: torch.Tensor
    firsts_M: torch.Tensor
    places_NR: torch.Tensor


class Needs(NamedTuple):
    """What the routes of a layer ask for.

    Attributes:
        sizes_R2: tokens and slots that every rank gets. Of a token whose route is not known, that
            is the token, and as many slots as it can have.
        needed_RN: whether a rank gets a token.
    """

    sizes_R2: torch.Tensor
    needed_RN: torch.Tensor


class Sizes(NamedTuple):
    """What the ranks of ep exchange in one layer and pass.

    Attributes:
        sent, received: tokens to and from each rank.
        num_local: most slots of this rank's experts in what it receives.
        rows: the tokens that it sends.
        needs: what it was made from.
        unknown_N: whether a token's route was not known. Every rank gets such tokens.
    """

    sent: list[int]
    received: list[int]
    num_local: int
    rows: Rows
    needs: Needs
    unknown_N: torch.Tensor


def size_plan(ep: Axis, local: int) -> Callable[[Sequence[torch.Tensor]], list[Sizes]] | None:
    """Return a function for `Replay.plan`, which all ranks of ep must call; None for one rank.

    Args:
        ep: the ranks that share experts.
        local: number of experts on each.
    """
    if ep.size == 1:
        return None

    def plan(routes: Sequence[torch.Tensor]) -> list[Sizes]:
        unknown = [routes_NK[:, 0] < 0 for routes_NK in routes]
        needs = [
            needs_of(owned_by_rank(routes_NK, ep.size, local), unknown_N, local)
            for routes_NK, unknown_N in zip(routes, unknown, strict=True)
        ]
        return _sizes(needs, unknown, ep, local)

    return plan


def _sizes(
    needs: Sequence[Needs], unknown: Sequence[torch.Tensor], ep: Axis, local: int
) -> list[Sizes]:
    """Tell every rank what it gets in each layer, and wait for the device, once."""
    sent_LR, received_LR, slots_L = _exchanged(torch.stack([each.sizes_R2 for each in needs]), ep)
    rows = [
        rows_by_rank(each.needed_RN, sum(sent), local)
        for each, sent in zip(needs, sent_LR, strict=True)
    ]
    return list(map(Sizes, sent_LR, received_LR, slots_L, rows, needs, unknown))


def _exchanged(
    sizes_LR2: torch.Tensor, ep: Axis
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Tell every rank how much it gets; returns tokens to and from each rank, and slots, by layer.

    The host waits for the device.
    """
    sent_RL2 = sizes_LR2.transpose(0, 1)
    transfer = Transfer(ep, [1] * ep.size, [1] * ep.size)
    transfer.start([sent_RL2])
    (received_RL2,) = transfer.finish()
    slots_L = received_RL2[:, :, 1].sum(0)
    tokens_2LR = torch.stack([sent_RL2, received_RL2])[..., 0].transpose(1, 2)
    # One transfer
    numbers = torch.cat([tokens_2LR.flatten(), slots_L]).tolist()
    layers, ranks = sizes_LR2.shape[:2]
    rows = [numbers[i : i + ranks] for i in range(0, 2 * layers * ranks, ranks)]
    return rows[:layers], rows[layers:], numbers[2 * layers * ranks :]


class GatherRows(torch.autograd.Function):
    """Rows of tokens; backward adds the gradients of a token's rows in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, values_ND: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return values_ND[rows.tokens_M]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.r3.sum_rows(upstream[0], ctx.rows.places_NR), None


class SumRows(torch.autograd.Function):
    """The sum of each token's rows, in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, values_MD: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return torch.ops.r3.sum_rows(values_MD, rows.places_NR)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream[0][ctx.rows.tokens_M], None


class Transfer:
    """Rows that travel between the ranks of ep in forward, and whose gradients return in backward.

    All ranks of ep must call both methods, and start and finish transfers in the same order.

    Args:
        ep: the ranks.
        sent, received: number of rows to and from each of them, in forward.
    """

    def __init__(self, ep: Axis, sent: list[int], received: list[int]) -> None:
        self._ep, self._sent, self._received = ep, sent, received
        self._results: list[torch.Tensor] = []
        self._pending: list[Any] = []

    def start(self, rows: Sequence[torch.Tensor], *, back: bool = False) -> None:
        """Send rows of tensors, ordered by rank."""
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        rows = [each.contiguous() for each in rows]
        self._results = [each.new_empty(sum(received), *each.shape[1:]) for each in rows]
        self._pending = [
            dist.all_to_all_single(
                result, each, received, sent, group=self._ep.group, async_op=True
            )
            for result, each in zip(self._results, rows, strict=True)
        ]

    def finish(self) -> list[torch.Tensor]:
        """Return the received rows. On CUDA, the current stream waits for them, not the host."""
        for exchange in self._pending:
            exchange.wait()
        results, self._results, self._pending = self._results, [], []
        return results


class Depart(torch.autograd.Function):
    """Starts a transfer, and returns an empty tensor for `Arrive`; backward ends the transfer."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, *rows: torch.Tensor) -> torch.Tensor:
        ctx.transfer, ctx.has_gradient = transfer, [tensor.is_floating_point() for tensor in rows]
        transfer.start(rows)
        return rows[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_empty: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = iter(ctx.transfer.finish())
        return (None, *(next(gradients) if counts else None for counts in ctx.has_gradient))


class Arrive(torch.autograd.Function):
    """Ends a transfer, and returns the received rows; backward starts that of their gradients.

    What forward computes between `Depart` and `Arrive` runs while rows travel. So do, in backward,
    the nodes made between the two: of the nodes that can run, autograd takes the last one made.
    """

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, _empty: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.transfer, results = transfer, transfer.finish()
        ctx.mark_non_differentiable(*(one for one in results if not one.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[None, torch.Tensor]:
        gradients = [each for each in upstream if each is not None and each.is_floating_point()]
        ctx.transfer.start(gradients, back=True)
        return None, gradients[0].new_empty(0)


class TokenDispatcher(MoETokenDispatcher):
    """Sends every token once to each expert-parallel rank that has one of its experts.

    It also runs the layer's shared experts. All ranks of ep must call. Experts are not divided over
    tensor-parallel ranks (etp 1).
    """

    def __init__(self, layer: MoELayer, pg_collection: Any, ep: Axis) -> None:
        super().__init__(config=layer.config, pg_collection=pg_collection)
        assert self.tp_size == 1, f"experts are divided over {self.tp_size} ranks (etp)"
        self._ep = ep
        self._router = layer.router  # its tap has the planned sizes
        self._experts, self._shared = layer.experts, layer.shared_experts
        layer.shared_expert_overlap = True  # the layer leaves shared experts to its dispatcher
        self._local, self._topk = layer.num_local_experts, layer.config.moe_router_topk
        self._slots = Slots(torch.empty(0), 0)
        # Of the forward that runs: the layer's input, and its shared experts' output
        self._tokens: torch.Tensor | None = None
        self._shared_output: torch.Tensor | None = None
        # Expert parallelism only
        self._sizes: Sizes | None = None

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [N, D] and the gate weights of their experts [N, K]."""
        self._tokens = tokens
        experts_NK = chosen_experts(routing_map, self._topk)
        self._slots = Slots(experts_NK, experts_NK.numel())
        return tokens.view(-1, tokens.shape[-1]), probs.gather(1, experts_NK)

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange tokens; returns those for this rank's experts [M, D] and their gates [M, K]."""
        if self.ep_size == 1:
            return hidden_states, probs
        experts_NK = self._slots.experts_NK
        self._sizes = sizes = self._sizes_of(experts_NK)
        experts_MK = experts_NK[sizes.rows.tokens_M] - sizes.rows.firsts_M[:, None]
        elsewhere_MK = (experts_MK < 0) | (experts_MK >= self._local)
        experts_MK.masked_fill_(elsewhere_MK, -1)
        transfer = Transfer(self._ep, sizes.sent, sizes.received)
        # A gate of another rank's expert travels with the token, and no expert reads it there.
        departed = Depart.apply(
            transfer,
            GatherRows.apply(hidden_states, sizes.rows),
            GatherRows.apply(probs, sizes.rows),
            experts_MK,
        )
        self._experts.defer_weight_gradients()
        values_MD, gates_MK, experts_MK = Arrive.apply(transfer, departed)
        self._slots = Slots(experts_MK, sizes.num_local)
        return values_MD, gates_MK

    def _sizes_of(self, experts_NK: torch.Tensor) -> Sizes:
        """What was planned for this forward, compared with its routes; exchanged without a plan.

        Raises:
            AssertionError: the routes are not those that were planned. On CUDA, the device does.
        """
        owned_RNK = owned_by_rank(experts_NK, self.ep_size, self._local)
        planned: Sizes | None = getattr(self._router.router_replay, "sizes", None)
        if planned is None:
            return self._exchange_sizes(owned_RNK)
        needs = needs_of(owned_RNK, planned.unknown_N, self._local)
        are_equal = (needs.needed_RN == planned.needs.needed_RN).all()
        are_equal &= (needs.sizes_R2 == planned.needs.sizes_R2).all()
        layer = self._router.layer_number - 1
        message = f"layer {layer}: the tokens for each rank are not those that were planned"
        if experts_NK.is_cuda:
            torch._assert_async(are_equal, message)
        else:
            assert are_equal, (
                f"{message}; tokens and slots per rank: {needs.sizes_R2.tolist()}, "
                f"planned: {planned.needs.sizes_R2.tolist()}"
            )
        return planned

    def _exchange_sizes(self, owned_RNK: torch.Tensor) -> Sizes:
        """Tell every rank how much it gets, and wait for the device."""
        unknown_N = owned_RNK.new_zeros(owned_RNK.shape[1])
        needs = needs_of(owned_RNK, unknown_N, self._local)
        return _sizes([needs], [unknown_N], self._ep, self._local)[0]

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, Slots, torch.Tensor]:
        """Return what `FusedExperts.forward` and `DeviceExperts.forward` take."""
        return hidden_states, self._slots, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' sums as they are."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Bring the sums back to the ranks of their tokens, and add those of all ranks."""
        if self.ep_size == 1:
            self._run_shared_experts()
            return hidden_states
        assert self._sizes is not None
        transfer = Transfer(self._ep, self._sizes.received, self._sizes.sent)
        departed = Depart.apply(transfer, hidden_states)
        self._run_shared_experts()
        return SumRows.apply(*Arrive.apply(transfer, departed), self._sizes.rows)

    def _run_shared_experts(self) -> None:
        if self._shared is not None:
            self._shared_output = self._shared(self._tokens)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return outputs in the shape of the layer's input, with those of shared experts."""
        assert self._tokens is not None
        output = hidden_states.view(self._tokens.shape)
        if self._shared_output is not None:
            output = output + self._shared_output
        # They would live until the next forward.
        self._tokens = self._shared_output = None
        return output


def owned_by_rank(experts_NK: torch.Tensor, ranks: int, local: int) -> torch.Tensor:
    """Whether a rank has the expert of a slot: [R, N, K]. Each rank has `local` experts."""
    numbers_R = torch.arange(ranks, device=experts_NK.device)
    return experts_NK // local == numbers_R[:, None, None]


def rows_by_rank(needed_RN: torch.Tensor, count: int, local: int) -> Rows:
    """Order tokens by the ranks that need them. `count` are all rows, `local` experts per rank."""
    ranks, tokens = needed_RN.shape
    order_M = needed_RN.flatten().to(torch.uint8).argsort(descending=True, stable=True)[:count]
    places_RN = (needed_RN.flatten().cumsum(0) - 1).view(ranks, tokens)
    return Rows(
        tokens_M=order_M % tokens,
        firsts_M=order_M // tokens * local,
        places_NR=places_RN.masked_fill(~needed_RN, count).t().contiguous(),
    )


def needs_of(owned_RNK: torch.Tensor, unknown_N: torch.Tensor, local: int) -> Needs:
    """What every rank gets, if it has `local` experts and `owned_by_rank` is as given."""
    needed_RN = owned_RNK.any(-1) | unknown_N
    known_R = (owned_RNK & ~unknown_N[:, None]).sum((1, 2))
    slots_R = known_R + unknown_N.sum() * min(owned_RNK.shape[2], local)
    return Needs(torch.stack([needed_RN.sum(-1), slots_R], -1), needed_RN)


def exchange_without_copies(wrapped: list[Any]) -> None:
    """Replace Megatron's collectives of gradients and parameters where they copy for nothing.

    Where one data-parallel rank has all of a buffer, Megatron still reduces and gathers it, onto
    itself: nothing is left to do. On CPU, gloo's reduce-scatter is an all-reduce of a copy, and its
    all-gather collects into a second tensor. Here gloo sums in the gradients, of which a rank reads
    its own part only, and each rank sends its parameters to where they belong. On CUDA, Megatron's
    own collectives stay. Gradients are not scaled, because of `calculate_per_token_loss`.

    Args:
        wrapped: this rank's model chunks.
    """
    for chunk in wrapped:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            factors = {bucket.gradient_scaling_factor for bucket in group.buckets}
            assert factors == {1.0}, f"rank {dist.get_rank()}: gradients to be scaled by {factors}"
            if group.intra_distributed_optimizer_instance_size == 1:
                group.start_grad_sync = group.start_param_sync = _skip
            elif not group.buckets[0].grad_data.is_cuda:
                group.start_grad_sync = partial(_sum_in_place, group)
                group.start_param_sync = partial(_send_own_part, group)


def _skip(*_args: Any, **_kwargs: Any) -> None: ...


def _sum_in_place(group: Any, force_all_reduce: bool | None = False) -> None:
    """Sum the gradients of a bucket group over its ranks. All of them must call.

    Megatron's `start_grad_sync` (param_and_grad_buffer.py) without overlap. It is an all-reduce
    with either value of the argument.
    """
    for bucket in group.buckets:
        dist.all_reduce(bucket.grad_data, group=group.intra_distributed_optimizer_instance_group)


def _send_own_part(group: Any, force_sync: bool = False) -> None:
    """Give every rank of a bucket group all parameters. All of them must call.

    Megatron's `start_param_sync` (param_and_grad_buffer.py) without overlap, where nothing is left
    to force.
    """
    size = group.intra_distributed_optimizer_instance_size
    for bucket in group.buckets:
        for rank, part in enumerate(bucket.param_data.chunk(size)):
            dist.broadcast(
                part, group=group.intra_distributed_optimizer_instance_group, group_src=rank
            )
