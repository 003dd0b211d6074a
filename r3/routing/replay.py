"""Rollout Routing Replay in Megatron: tokens are trained on the experts chosen at generation.

Only the choice of experts is replayed (arXiv 2510.11370). Gate weights come from the live logits of
the chosen experts, through the model's own score function, so the router keeps learning:

    live    g_i = softmax over TopK(s_train) of s_train
    replay  g_i = softmax over I_rollout of s_train

Megatron's RouterReplay keeps its instances in a class-level list, and its state in flags that any
forward may leave behind. Here each router has its own `RouterTap`, found by walking the decoder and
keyed by the global layer number. A micro-batch's routes are loaded before its forward, and every
router must use them exactly once, and once more per recomputation.

The schedule does not tell which micro-batch a recomputation belongs to. A hook on the gradient of
the decoder's output does: every backward pass of a chunk starts there, before any of its layers is
recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.utils import get_attr_wrapped_model

from r3.routing.ledger import ReplayLedger
from r3.runtime.mesh import Axis

Mode = Literal["live", "replay", "record"]


# If every expert is chosen there is no next one, and the gap would be infinite.
_MAX_GAP = 1e6


def _is_recomputation() -> bool:
    """Whether this forward runs inside a backward pass: activation recomputation does."""
    return torch._C._current_graph_task_id() != -1


class RouterTap(RouterReplay):
    """The routes of one router. Megatron calls `get_replay_topk` in every forward of the router."""

    def __init__(self, router: Any, plausibility: float = 0.0) -> None:
        super().__init__()
        # Upstream's constructor adds every instance to the class-level list.
        RouterReplay.global_router_replay_instances.remove(self)
        self.layer = router.layer_number - 1
        self.plausibility = plausibility
        self.topk: int = router.topk
        self._router = router
        self.clear()

    def clear(self) -> None:
        """Reset all state."""
        self.mode: Mode = "live"
        self.training = False
        # Routes of the next forward, rows to compare, their ranges of positions, and what ranks
        # exchange for these routes.
        self._loaded: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any] | None = None
        # What ranks exchange for the routes of the last forward, if it was planned.
        self.sizes: Any = None
        self.forwards = 0
        # Number of the forward whose backward pass is running.
        self.backward_of: int | None = None
        # Routes and sizes for recomputations to come, by number of the forward.
        self._recomputations: dict[int, tuple[torch.Tensor, Any]] = {}
        self.recorded: list[torch.Tensor] = []
        self.used: torch.Tensor | None = None
        # One entry per forward, see `ReplayLedger`.
        self.counts: list[torch.Tensor] = []
        self.loads: list[torch.Tensor] = []
        self.consumed: list[torch.Tensor] = []
        self.rows = 0

    def load(
        self,
        routes_NK: torch.Tensor,
        captured_N: torch.Tensor,
        *,
        rows: int,
        depths_ND: torch.Tensor | None = None,
        sizes: Any = None,
    ) -> None:
        """Set the routes of the next forward.

        Args:
            routes_NK: expert ids; rows of -1 route live.
            captured_N: true at rows to compare with the live choice.
            rows: number of those rows.
            depths_ND: 1 where one of those rows is in a range of positions, float64.
            sizes: what ranks exchange for these routes, for the layer's dispatcher; None: unknown.
        """
        assert self._loaded is None, (
            f"layer {self.layer}: routes of the previous micro-batch were never used"
        )
        if depths_ND is None:
            depths_ND = torch.zeros(len(routes_NK), 0, dtype=torch.float64, device=routes_NK.device)
        self._loaded = routes_NK, captured_N, depths_ND, sizes
        self.rows += rows

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for `scores` [N, E]; returns their scores and ids, both [N, K]."""
        assert default_compute_topk is not None
        self.sizes = None
        ranked = _ranked(self._router, scores)
        if self.mode == "live":
            _, live_NK = default_compute_topk(ranked, topk, num_groups, group_topk)
            return scores.gather(1, live_NK), live_NK
        if _is_recomputation():
            assert self.backward_of in self._recomputations, (
                f"layer {self.layer}: a recomputation for forward {self.backward_of}, whose routes "
                f"are {'taken' if self.backward_of is not None else 'unknown'}; "
                f"waiting: {sorted(self._recomputations)}"
            )
            kept_NK, self.sizes = self._recomputations.pop(self.backward_of)
            routes_NK = kept_NK.long()
            return scores.gather(1, routes_NK), routes_NK
        _, live_NK = default_compute_topk(ranked, topk, num_groups, group_topk)
        if self.mode == "record":
            routes_NK = live_NK
            self.recorded.append(live_NK.to(torch.int16))
        else:
            assert self._loaded is not None, (
                f"layer {self.layer}: a forward without routes loaded for it"
            )
            (loaded_NK, captured_N, depths_ND, self.sizes), self._loaded = self._loaded, None
            loaded_NK = loaded_NK.long()
            assert loaded_NK.shape == (scores.shape[0], topk), (
                f"layer {self.layer}: routes {tuple(loaded_NK.shape)} for {scores.shape[0]} tokens "
                f"and top {topk}"
            )
            asked_NK = torch.where(loaded_NK[:, :1] < 0, live_NK, loaded_NK)
            routes_NK = (
                self._plausible(ranked, live_NK, asked_NK) if self.plausibility else asked_NK
            )
            self.counts.append(
                _counts(self._router, ranked, live_NK, asked_NK, routes_NK, captured_N, depths_ND)
            )
            chosen = captured_N.long()[:, None].expand_as(routes_NK).flatten()
            load_E = chosen.new_zeros(scores.shape[1])
            self.loads.append(load_E.scatter_add_(0, routes_NK.flatten(), chosen))
            replayed_N = loaded_NK[:, 0] >= 0
            self.consumed.append(
                torch.stack([replayed_N & captured_N, ~replayed_N, replayed_N & ~captured_N]).sum(1)
            )
        # A forward of training without gradients is checkpointed: its recomputation follows.
        if self.training and not torch.is_grad_enabled():
            self._recomputations[self.forwards] = (routes_NK.to(torch.int16), self.sizes)
        self.forwards += 1
        self.used = routes_NK
        return scores.gather(1, routes_NK), routes_NK

    def _plausible(
        self, scores: torch.Tensor, live_NK: torch.Tensor, asked_NK: torch.Tensor
    ) -> torch.Tensor:
        """Replace experts of `asked_NK` that the live router finds implausible.

        An expert is implausible if its gate score is below `plausibility` times that of the weakest
        live expert.
        """
        # The bias moves the choice, not the gates.
        if self._router.expert_bias is not None:
            scores = scores - self._router.expert_bias
        weakest = scores.gather(1, live_NK).min(-1, keepdim=True).values
        if _ranks_logits(self._router):
            # Scores are logits: a ratio of gates is a difference of scores.
            limit = weakest + math.log(self.plausibility)
        else:
            limit = weakest * self.plausibility
        return refilled(asked_NK, scores.gather(1, asked_NK) >= limit, live_NK)

    def leftovers(self) -> str:
        """Describe what was loaded and not used; empty if everything was used."""
        parts = []
        if self._loaded is not None:
            parts.append("a micro-batch's routes were loaded and never used")
        if self._recomputations:
            parts.append(f"{len(self._recomputations)} recomputations never ran")
        return f"layer {self.layer}: {', '.join(parts)}" if parts else ""


def _ranked(router: Any, scores: torch.Tensor) -> torch.Tensor:
    """Return what a router chooses by. Megatron adds biases to sigmoid scores only."""
    config = router.config
    if router.expert_bias is None or config.moe_router_score_function == "sigmoid":
        return scores.detach()
    return scores.detach().float().softmax(-1) + router.expert_bias


def _ranks_logits(router: Any) -> bool:
    """Whether a router chooses by logits, whose softmax gives the gates."""
    config = router.config
    is_late = config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
    return is_late and router.expert_bias is None


def refilled(routes_NK: torch.Tensor, kept_NK: torch.Tensor, live_NK: torch.Tensor) -> torch.Tensor:
    """Fill the slots that are not kept with the best live experts that the row does not have yet.

    `live_NK` is ordered, best first. A row always has enough live experts for its free slots.
    """
    taken_NK = (live_NK[:, :, None] == torch.where(kept_NK, routes_NK, -1)[:, None, :]).any(-1)
    free_first_NK = live_NK.gather(1, taken_NK.int().argsort(dim=-1, stable=True))
    place_NK = ((~kept_NK).cumsum(-1) - 1).clamp(min=0)
    return torch.where(kept_NK, routes_NK, free_first_NK.gather(1, place_NK))


def _counts(
    router: Any,
    scores: torch.Tensor,
    live_NK: torch.Tensor,
    asked_NK: torch.Tensor,
    routes_NK: torch.Tensor,
    captured_N: torch.Tensor,
    depths_ND: torch.Tensor,
) -> torch.Tensor:
    """Return one forward's sums over captured rows, float64 [5 + 2 D]; `ReplayLedger.counts`."""
    is_live = torch.zeros_like(scores, dtype=torch.bool).scatter(1, live_NK, True)
    weakest_N = scores.gather(1, live_NK).amin(-1)
    agreed_N = is_live.gather(1, asked_NK).all(-1)
    margin_N = weakest_N - scores.gather(1, asked_NK).amin(-1)
    replaced_N = (routes_NK != asked_NK).sum(-1)
    gap_N = (weakest_N - scores.masked_fill(is_live, -math.inf).amax(-1)).clamp(max=_MAX_GAP)
    gates = scores if router.expert_bias is None else scores - router.expert_bias
    gates = gates.float().softmax(-1) if _ranks_logits(router) else _shares(gates.float())
    entropy_N = torch.special.entr(gates).sum(-1)
    rows_5N = torch.stack([agreed_N, margin_N, replaced_N, entropy_N, gap_N.float()])
    sums_5 = (rows_5N.double() * captured_N).sum(-1)
    return torch.cat([sums_5, depths_ND.sum(0), agreed_N.double() @ depths_ND])


def _shares(scores: torch.Tensor) -> torch.Tensor:
    return scores / scores.sum(-1, keepdim=True)


@dataclass
class Replay:
    """All routers of one policy.

    Attributes:
        taps: by global number of the decoder layer.
        moe_layers: global numbers of the model's MoE layers.
        decoders: decoder of each model chunk -> its MoE layers.
        plan: returns what ranks exchange for the routes [N, K] of each layer, rows of -1 among
            them; a collective of the ranks that share experts. None: nothing is planned.
        mode: what routers do now.
    """

    taps: Mapping[int, RouterTap]
    moe_layers: Sequence[int]
    decoders: Mapping[Any, Sequence[int]]
    plan: Callable[[Sequence[torch.Tensor]], Sequence[Any]] | None = None
    mode: Mode = field(default="live", init=False)

    @property
    def layers(self) -> tuple[int, ...]:
        """Global numbers of the MoE layers whose routers this rank has, ascending."""
        return tuple(self._layers(None))

    @contextmanager
    def schedule(self, mode: Mode, *, training: bool) -> Iterator[Callable[[], ReplayLedger]]:
        """Run one forward(-backward) schedule inside; yields a function that returns its ledger.

        Call that function inside the scope. State is cleared on entry and exit.

        Raises:
            AssertionError: at a normal end, a loaded route was not used exactly once per forward
                and per recomputation.
        """
        for tap in self.taps.values():
            tap.clear()
            tap.mode, tap.training = mode, training
        self.mode = mode
        try:
            yield self._ledger
            leftovers = [text for tap in self.taps.values() if (text := tap.leftovers())]
            assert not leftovers, "routes left over at the end of a schedule: " + "; ".join(
                leftovers
            )
        finally:
            for tap in self.taps.values():
                tap.clear()
            self.mode = "live"

    def load(
        self,
        routed_experts_NLK: torch.Tensor,
        captured_N: torch.Tensor,
        *,
        rows: int,
        depths_ND: torch.Tensor | None = None,
        model: Any = None,
    ) -> None:
        """Give each router its layer's routes for the next forward. Does nothing unless replaying.

        All ranks that share experts must call, if there is a plan.

        Args:
            routed_experts_NLK: routes of this rank's `layers` or of all `moe_layers`, in that
                order; rows of -1 route live.
            captured_N: true at rows to compare with the live choice: captured ones, or with routes
                that this rank recorded all but filler.
            rows: number of those rows.
            depths_ND: 1 where one of those rows is in a range of `DEPTHS`; None: not counted.
            model: the chunk that runs forward next, wrapped or not; None = all chunks of this rank.
        """
        if self.mode != "replay":
            return
        count, own = routed_experts_NLK.shape[1], self._layers(None)
        numbers = own if count == len(own) else self.moe_layers
        assert count == len(numbers), (
            f"routes of {count} layers; this rank has routers in {len(own)}, "
            f"the model in {len(self.moe_layers)}"
        )
        layers = self._layers(model)
        routes = [routed_experts_NLK[:, numbers.index(layer)] for layer in layers]
        planned = self.plan(routes) if self.plan and layers else [None] * len(layers)
        for layer, routes_NK, sizes in zip(layers, routes, planned, strict=True):
            self.taps[layer].load(
                routes_NK, captured_N, rows=rows, depths_ND=depths_ND, sizes=sizes
            )

    def _layers(self, model: Any) -> list[int]:
        """MoE layers of a chunk (None: of this rank), in order."""
        mine = (
            self.taps if model is None else self.decoders[get_attr_wrapped_model(model, "decoder")]
        )
        return [layer for layer in self.moe_layers if layer in mine]

    def _ledger(self) -> ReplayLedger:
        taps = [self.taps[layer] for layer in self._layers(None)]
        recorded = tuple(
            torch.stack(layers, dim=1)
            for layers in zip(*(tap.recorded for tap in taps), strict=True)
        )
        if not any(tap.counts for tap in taps):
            return ReplayLedger(recorded=recorded)
        return ReplayLedger(
            layers=tuple(tap.layer for tap in taps),
            rows=tuple(tap.rows for tap in taps),
            counts=torch.stack([torch.stack(tap.counts).sum(0) for tap in taps]),
            loads=torch.stack([torch.stack(tap.loads).sum(0) for tap in taps]),
            consumed=torch.stack([rows for tap in taps for rows in tap.consumed]).sum(0),
            topk=taps[0].topk,
            filtered=taps[0].plausibility > 0,
        )


# Settings of Megatron's TransformerConfig that exact replay needs, and why.
_PLAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "moe_router_fusion": ((False,), "the fused router returns before it asks for routes"),
    "moe_router_load_balancing_type": (
        ("none",),
        "sinkhorn chooses by itself, the others add a loss",
    ),
    "moe_aux_loss_coeff": ((0,), "the loss would use the live choice, not the replayed one"),
    "moe_router_force_load_balancing": ((False, None), "it routes by random numbers"),
    "moe_input_jitter_eps": ((None,), "the router would see noise"),
    "moe_expert_capacity_factor": ((None,), "tokens over an expert's capacity would be dropped"),
    "moe_pad_expert_input_to_capacity": (
        (False,),
        "tokens over an expert's capacity would be dropped",
    ),
    "moe_router_padding_for_quantization": (
        (False,),
        "padding sends tokens to experts nobody chose",
    ),
    "moe_token_dispatcher_type": (
        ("alltoall", "allgather"),
        "other dispatchers have not been shown to keep",
    ),
}


def check_plain_routing(config: TransformerConfig) -> None:
    """Assert that routers of this config choose a plain top-k, ask for routes and drop no token."""
    for name, (allowed, reason) in _PLAIN.items():
        value = getattr(config, name, allowed[0])
        assert value in allowed, f"{name} = {value!r}, and replay needs {allowed[0]!r}: {reason}"
    if config.moe_router_enable_expert_bias:
        rate = config.moe_router_bias_update_rate
        assert rate == 0, (
            f"moe_router_bias_update_rate = {rate!r}, and replay needs 0: "
            "the engine's bias is fixed"
        )


def attach_replay(
    chunks: Iterable[Any],
    moe_layers: Sequence[int],
    pp: Axis,
    *,
    plausibility: float = 0.0,
    plan: Callable[[Sequence[torch.Tensor]], Sequence[Any]] | None = None,
) -> Replay:
    """Put a tap on every router of the decoder. All ranks of `pp` must call.

    Routers of multi-token-prediction layers stay live.

    Args:
        chunks: this rank's model chunks.
        moe_layers: global numbers of the model's MoE layers.
        pp: pipeline stages.
        plausibility: limit of the plausibility filter; 0 = off.
        plan: see `Replay`. The plausibility filter changes routes: there is no plan with it.

    Raises:
        AssertionError: routing is not a plain top-k, a router is not in one of `moe_layers`, two
            routers are in one layer, or the stages together do not have exactly `moe_layers`.
    """
    taps: dict[int, RouterTap] = {}
    decoders: dict[Any, list[int]] = {}
    for chunk in chunks:
        layers = decoders[chunk.decoder] = []
        for name, router in chunk.named_modules():
            if not isinstance(router, Router):
                continue
            made = getattr(router, "router_replay", None)  # by Megatron
            if made in RouterReplay.global_router_replay_instances:
                RouterReplay.global_router_replay_instances.remove(made)
            if name.startswith("mtp."):
                router.router_replay = None
                continue
            layer = (router.layer_number or 0) - 1
            assert name.startswith("decoder.") and layer in moe_layers and layer not in taps, (
                f"router {name} has decoder layer {layer}; MoE layers are {list(moe_layers)}, "
                f"taps exist on {sorted(taps)}"
            )
            assert type(router) is TopKRouter, (
                f"router {name} is a {type(router).__name__}, not a plain top-k router"
            )
            check_plain_routing(router.config)
            router.router_replay = taps[layer] = RouterTap(router, plausibility)
            router.weight.is_router = True  # for the routers' own gradient norm
            # Expert biases never change: do not count tokens for them.
            router.enable_expert_bias = False
            layers.append(layer)
        chunk.decoder.register_forward_hook(_announce_backward([taps[layer] for layer in layers]))
    stages = pp.all_gather_object(sorted(taps))
    assert sorted(layer for stage in stages for layer in stage) == list(moe_layers), (
        f"pipeline stages have routers in layers {stages}, the model in {list(moe_layers)}"
    )
    assert not (plan and plausibility), "the plausibility filter changes what was planned"
    return Replay(taps=taps, moe_layers=tuple(moe_layers), decoders=decoders, plan=plan)


def _announce_backward(taps: Sequence[RouterTap]) -> Callable[[Any, Any, torch.Tensor], None]:
    """Return a forward hook of a decoder that tells the taps when its backward pass begins."""

    def after_forward(_decoder: Any, _args: Any, output: torch.Tensor) -> None:
        if not taps or not taps[0].training or taps[0].mode == "live":
            return
        number = taps[0].forwards - 1

        def before_backward(_gradient: torch.Tensor) -> None:
            for tap in taps:
                tap.backward_of = number

        output.register_hook(before_backward)

    return after_forward
