"""Rollout Routing Replay inside Megatron: the experts chosen at generation process the same tokens in training.

Only the choice is replayed (arXiv 2510.11370): gate weights come from the live logits of the chosen experts, through the
model's own score function, so the router keeps learning.

    live    g_i = softmax over TopK(s_train) of s_train          replay  g_i = softmax over I_rollout of s_train

Megatron's RouterReplay keeps its instances in a class-level list and its state in flags that any forward may leave behind.
Here each router has its own `RouterTap`, found by walking the decoder and keyed by the global layer number; a micro-batch's
routes are loaded before its forward and must be used exactly once by every router, and once more by each recomputation.

Which micro-batch a recomputation is of does not follow from its place in the schedule: a hook on the gradient of the decoder's
output says it. Every backward pass of a chunk starts there, before any of its layers is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.utils import get_attr_wrapped_model

Mode = Literal["live", "replay", "record"]


def _is_recomputation() -> bool:
    """Whether this forward runs inside a backward pass, which is what activation recomputation is."""
    return torch._C._current_graph_task_id() != -1


class RouterTap(RouterReplay):
    """One router's routes. Megatron calls `get_replay_topk` in every forward of its router."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)  # never in the class-level list
        self.layer = layer
        self.mode: Mode = "live"
        self.training = False
        self._loaded: torch.Tensor | None = None
        self._captured_N: torch.Tensor | None = None
        self.forwards = 0
        self.backward_of: int | None = None  # number of the forward whose backward pass runs
        self._recomputations: dict[int, torch.Tensor] = {}  # by number of the forward
        self.recorded: list[torch.Tensor] = []
        self.used: torch.Tensor | None = None
        self.agreed: list[torch.Tensor] = []
        self.consumed: list[torch.Tensor] = []
        self.rows = 0

    def load(self, routes_NK: torch.Tensor, captured_N: torch.Tensor, *, rows: int) -> None:
        """Routes of the next forward, `[N, K]` integers, rows of -1 route live; `captured_N` marks the `rows` to compare."""
        assert self._loaded is None, f"layer {self.layer}: routes of the previous micro-batch were never used"
        self._loaded, self._captured_N = routes_NK, captured_N
        self.rows += rows

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The router's choice for `scores` `[N, E]`: values and expert ids, both `[N, K]`."""
        assert default_compute_topk is not None
        if self.mode == "live":
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if _is_recomputation():
            assert self.backward_of in self._recomputations, (
                f"layer {self.layer}: a recomputation for forward {self.backward_of}, whose routes are "
                f"{'taken' if self.backward_of is not None else 'unknown'}; waiting: {sorted(self._recomputations)}"
            )
            routes_NK = self._recomputations.pop(self.backward_of).long()
            return scores.gather(1, routes_NK), routes_NK
        _, live_NK = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
        if self.mode == "record":
            routes_NK = live_NK
            self.recorded.append(live_NK.to(torch.int16))
        else:
            assert self._loaded is not None and self._captured_N is not None, (
                f"layer {self.layer}: a forward without routes loaded for it"
            )
            loaded_NK, captured_N = self._loaded.long(), self._captured_N
            self._loaded = self._captured_N = None
            assert loaded_NK.shape == (scores.shape[0], topk), (
                f"layer {self.layer}: routes {tuple(loaded_NK.shape)} for {scores.shape[0]} tokens and top {topk}"
            )
            routes_NK = torch.where(loaded_NK[:, :1] < 0, live_NK, loaded_NK)
            replayed_N = loaded_NK[:, 0] >= 0
            self.consumed.append(
                torch.stack([replayed_N & captured_N, ~replayed_N, replayed_N & ~captured_N]).sum(1)
            )
            same_N = (live_NK.sort(-1).values == routes_NK.sort(-1).values).all(-1)
            self.agreed.append((same_N & captured_N).sum())
        if self.training and not torch.is_grad_enabled():  # checkpointed: its recomputation will come
            self._recomputations[self.forwards] = routes_NK.to(torch.int16)
        self.forwards += 1
        self.used = routes_NK
        return scores.gather(1, routes_NK), routes_NK

    def leftovers(self) -> str:
        """What was loaded and not used, in words; empty when everything was."""
        parts = []
        if self._loaded is not None:
            parts.append("a micro-batch's routes were loaded and never used")
        if self._recomputations:
            parts.append(f"{len(self._recomputations)} recomputations never ran")
        return f"layer {self.layer}: {', '.join(parts)}" if parts else ""

    def clear(self) -> None:
        """Forget everything."""
        self.mode, self.training = "live", False
        self._loaded = self._captured_N = self.used = None
        self.forwards, self.backward_of = 0, None
        self._recomputations.clear()
        self.recorded, self.agreed, self.consumed, self.rows = [], [], [], 0


@dataclass(frozen=True, kw_only=True)
class ReplayLedger:
    """What one schedule did on this rank.

    Attributes:
        agreed: per MoE layer of this rank, rows whose live top-k equals the replayed set (device scalars).
        rows: captured rows that were compared, per layer.
        consumed: (token, layer) slots that this rank's routers replayed, routed live and filled, int64 [3] on the device;
            recomputations not counted again; None when nothing was replayed.
        recorded: routes recorded per micro-batch, `[N, L_local, K]` (mode "record").
    """

    agreed: tuple[torch.Tensor, ...] = ()
    rows: int = 0
    consumed: torch.Tensor | None = None
    recorded: tuple[torch.Tensor, ...] = ()


@dataclass
class Replay:
    """Every router of one policy, by global decoder layer number; `decoders` holds the layers of each model chunk."""

    taps: Mapping[int, RouterTap]
    moe_layers: Sequence[int]
    decoders: Mapping[Any, Sequence[int]]
    mode: Mode = field(default="live", init=False)

    @property
    def layers(self) -> tuple[int, ...]:
        """Global numbers of the MoE layers whose routers this rank holds, ascending."""
        return tuple(self._layers(None))

    @contextmanager
    def schedule(self, mode: Mode, *, training: bool) -> Iterator[Callable[[], ReplayLedger]]:
        """Scope of one forward(-backward) schedule; yields a function that gives its ledger, to be called inside.

        State is cleared on entry, on exit and on an exception; at a normal end every loaded route must have been used
        exactly once per forward and per recomputation, else `AssertionError` says which layer kept what.
        """
        for tap in self.taps.values():
            tap.clear()
            tap.mode, tap.training = mode, training
        self.mode = mode
        try:
            yield self._ledger
            leftovers = [text for tap in self.taps.values() if (text := tap.leftovers())]
            assert not leftovers, "routes left over at the end of a schedule: " + "; ".join(leftovers)
        finally:
            for tap in self.taps.values():
                tap.clear()
            self.mode = "live"

    def load(
        self, routed_experts_NLK: torch.Tensor, captured_N: torch.Tensor, *, rows: int, model: Any = None
    ) -> None:
        """Give each router its layer's routes for the next forward. No effect unless replaying.

        Args:
            routed_experts_NLK: this rank's `layers`, or all `moe_layers`, in that order; -1 rows route live.
            captured_N: true where the row was captured (not filler, not missing); `rows` of them.
            model: the chunk that runs forward next, wrapped or not; None = all of this rank's layers.
        """
        if self.mode != "replay":
            return
        found, own = routed_experts_NLK.shape[1], self._layers(None)
        given = own if found == len(own) else self.moe_layers
        assert found == len(given), (
            f"routes of {found} layers; this rank has routers in {len(own)}, the model in {len(self.moe_layers)}"
        )
        for layer in self._layers(model):
            self.taps[layer].load(routed_experts_NLK[:, given.index(layer)], captured_N, rows=rows)

    def load_local(
        self, routes_NLK: torch.Tensor, compared_N: torch.Tensor, *, rows: int, model: Any = None
    ) -> None:
        """As `load`, with routes of this rank's own layers only, as one of its passes recorded them."""
        mine = self._layers(None)
        for layer in self._layers(model):
            self.taps[layer].load(routes_NLK[:, mine.index(layer)], compared_N, rows=rows)

    def _layers(self, model: Any) -> list[int]:
        """MoE layers of a chunk, or of this rank, in order."""
        mine = self.taps if model is None else self.decoders[get_attr_wrapped_model(model, "decoder")]
        return [layer for layer in self.moe_layers if layer in mine]

    def _ledger(self) -> ReplayLedger:
        taps = [self.taps[layer] for layer in self._layers(None)]
        agreed = tuple(torch.stack(tap.agreed).sum() for tap in taps if tap.agreed)
        consumed = [count for tap in taps for count in tap.consumed]
        recorded = tuple(
            torch.stack(layers, dim=1) for layers in zip(*(tap.recorded for tap in taps), strict=True)
        )
        return ReplayLedger(
            agreed=agreed,
            rows=taps[0].rows if taps else 0,
            consumed=torch.stack(consumed).sum(0) if consumed else None,
            recorded=recorded,
        )


def attach_replay(chunks: Iterable[Any], moe_layers: Sequence[int]) -> Replay:
    """Put a tap on every router of the decoder (multi-token-prediction heads keep routing live) and return their owner.

    Raises AssertionError when a router's layer is not one of `moe_layers`, or two routers claim one layer.
    """
    taps: dict[int, RouterTap] = {}
    decoders: dict[Any, list[int]] = {}
    for chunk in chunks:
        layers = decoders[chunk.decoder] = []
        for module in chunk.decoder.modules():
            if isinstance(module, TopKRouter):
                layer = module.layer_number - 1
                assert layer in moe_layers and layer not in taps, (
                    f"router of decoder layer {layer}; MoE layers are {list(moe_layers)}, taps exist on {sorted(taps)}"
                )
                tap = RouterTap(layer)
                if module.router_replay in RouterReplay.global_router_replay_instances:
                    RouterReplay.global_router_replay_instances.remove(module.router_replay)
                module.router_replay = taps[layer] = tap
                module.weight.is_router = True  # for the routers' own gradient norm
                layers.append(layer)
        chunk.decoder.register_forward_hook(_announce_backward([taps[layer] for layer in layers]))
    return Replay(taps=taps, moe_layers=tuple(moe_layers), decoders=decoders)


def _announce_backward(taps: Sequence[RouterTap]) -> Callable[[Any, Any, torch.Tensor], None]:
    """A forward hook of a decoder: when the backward pass of this very forward begins, its taps hear of it."""

    def after_forward(_decoder: Any, _args: Any, output: torch.Tensor) -> None:
        if not taps or not taps[0].training or taps[0].mode == "live":
            return
        number = taps[0].forwards - 1

        def before_backward(_gradient: torch.Tensor) -> None:
            for tap in taps:
                tap.backward_of = number

        output.register_hook(before_backward)

    return after_forward
