"""E1 and E3: identity of replay, reach of gradients, the plausibility filter, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3.metrics import Mean
from r3.routing import RouterTap, attach_replay, routing_metrics
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from tests.errors import message_of
from tests.ranks.oracle_cases import (
    against_oracle,
    layer_in,
    live_mask,
    routed_layer,
    top_1_softmax,
)
from tests.ranks.router_model import (
    BIAS,
    EXPERTS,
    HIDDEN,
    ROUTERS,
    SIGMOID,
    SOFTMAX,
    TOKENS,
    TOPK,
    forward_backward,
    identical,
    load,
    model_of,
    random_routes,
)
from tests.tiny import tiny_config


def routers(device: Device) -> SimpleNamespace:
    """E1 to E3, which need one rank and no checkpoint.

    Returns:
        All results of one rank without a checkpoint.
    """
    mesh = build_mesh(device, tiny_config().parallel)
    return SimpleNamespace(
        identity=identity(device, mesh),
        oracle=against_oracle(device, mesh),
        top_1=top_1_softmax(device, mesh),
        reach=gradient_reach(device, mesh),
        filter=plausibility_filter(device, mesh),
        refusals=refusals(device, mesh),
    )


def identity(device: Device, mesh: Mesh) -> dict[str, SimpleNamespace]:
    """E1, and rows of -1: for every router, what differs between no replay at all and replay of the
    live choice.

    Returns:
        E1 for one router: names of what differs from a model without replay.
        `gradients` counts the compared ones. `live_rows` are rows of -1 among recorded routes; the
        counts of moved rows are of rows of -1 and of others among foreign routes.
    """
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    found: dict[str, SimpleNamespace] = {}
    for name, options in ROUTERS.items():
        model = model_of(device, mesh, options)
        topk = model.moe.config.moe_router_topk
        taps = {layer: router.router_replay for layer, router in model.routers.items()}
        for router in model.routers.values():
            router.router_replay = None
        untouched = forward_backward(model)  # Megatron by itself
        for layer, router in model.routers.items():
            router.router_replay = taps[layer]

        with model.replay.schedule("record", training=True) as ledger_of:
            recording = forward_backward(model)
            (routes_NLK,) = ledger_of().recorded
        with model.replay.schedule("replay", training=True) as ledger_of:
            load(model.replay, routes_NLK)
            replaying = forward_backward(model)
            ledger = ledger_of()

        rng = np.random.default_rng(1)
        missing = torch.from_numpy(rng.random(len(TOKENS)) < 0.3)
        with model.replay.schedule("replay", training=True):
            load(model.replay, torch.where(missing[:, None, None], -1, routes_NLK))
            partly = forward_backward(model)

        # Foreign routes around them move the hidden states; rows of -1 must route as those states
        # say, whatever they are.
        seen: dict[int, list[torch.Tensor]] = {}

        def keep(
            router: Any, args: Any, out: Any, seen: dict[int, list[torch.Tensor]] = seen
        ) -> None:
            seen[router.layer_number - 1] = [args[0], *out]

        hooks = [router.register_forward_hook(keep) for router in model.routers.values()]
        foreign = random_routes(rng, len(TOKENS), 2, topk)
        with model.replay.schedule("replay", training=True):
            load(model.replay, torch.where(missing[:, None, None], -1, foreign))
            among_foreign = forward_backward(model)
        for hook in hooks:
            hook.remove()
        live_rows_moved = foreign_rows_moved = 0
        for layer, router in model.routers.items():
            hidden, probs, routing_map = seen[layer]
            settings = router.config
            live_probs, live_map = topk_routing_with_score_function(
                router.gating(hidden).flatten(0, 1),
                topk,
                use_pre_softmax=settings.moe_router_pre_softmax,
                num_groups=settings.moe_router_num_groups,
                group_topk=settings.moe_router_group_topk,
                scaling_factor=settings.moe_router_topk_scaling_factor,
                score_function=settings.moe_router_score_function,
                expert_bias=router.expert_bias,
            )
            moved = (probs != live_probs).any(-1) | (routing_map != live_map).any(-1)
            live_rows_moved += int(moved[missing].sum())
            foreign_rows_moved += int(moved[~missing].sum())
        found[name] = SimpleNamespace(
            gradients=len(untouched[1]),
            router_gradient=min(
                float(gradient.abs().max())
                for key, gradient in untouched[1].items()
                if "router" in key
            ),
            record=identical(untouched, recording),
            replay=identical(untouched, replaying),
            agreed=ledger.counts[:, 0].tolist(),
            live_rows=identical(untouched, partly),
            missing=int(missing.sum()),
            foreign=identical(untouched, among_foreign),
            live_rows_moved=live_rows_moved,
            foreign_rows_moved=foreign_rows_moved,
        )
    return found


class ScatterZeroed(RouterTap):
    """The fault of gathering from scores that were zeroed outside the live top-k: drifted experts
    have no gate, no gradient.
    """

    def get_replay_topk(self, scores: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        live_NK = scores.detach().topk(topk).indices
        kept = torch.zeros_like(scores).scatter(1, live_NK, scores.gather(1, live_NK))
        return super().get_replay_topk(kept, topk, *args, **kwargs)


def gradient_reach(device: Device, mesh: Mesh) -> dict[str, SimpleNamespace]:
    """E3: with routes among the lower half of the experts only; and the same with a faulty tap in
    place of ours.

    Returns:
        E3 for one router and tap: largest or smallest gradients, and numbers of experts and rows.
    """
    found: dict[str, SimpleNamespace] = {}
    for name in ("softmax over the top k", "softmax over all", "sigmoid"):
        for tap in (RouterTap, ScatterZeroed):
            model, _, _ = layer_in(device, mesh, ROUTERS[name], torch.float32)
            rng = np.random.default_rng(6)
            hidden, upstream = (
                torch.from_numpy(rng.standard_normal((64, HIDDEN))).float() for _ in range(2)
            )
            live = live_mask(model, hidden)
            model.replay.taps[2].__class__ = tap
            allowed = torch.arange(EXPERTS) < EXPERTS // 2
            noise = torch.from_numpy(rng.random((64, EXPERTS))) - 2.0 * ~allowed
            mask = torch.zeros_like(live).scatter(1, noise.topk(TOPK).indices, True)
            ours = routed_layer(model, hidden, mask, upstream)
            drifted = mask & ~live
            used = mask.any(0)
            found[f"{name} / {tap.__name__}"] = SimpleNamespace(
                router_gradient=float(ours.router.abs().max()),
                drifted=int(drifted.sum()),
                drifted_gate=float(ours.gates[drifted].min()),
                drifted_logit_gradient=float(ours.logits[drifted].abs().min()),
                unused_experts=int((~used).sum()),
                unused_gradient=max(float(w[~used].abs().max()) for w in (ours.w1, ours.w2)),
                used_gradient=min(float(ours.w1[e].abs().max()) for e in used.nonzero().flatten()),
            )
    return found


def plausibility_filter(device: Device, mesh: Mesh) -> SimpleNamespace:
    """Hand-made scores through a tap; foreign routes through whole models with a ratio of nearly 0
    and of 1.

    Returns:
        `by_router` on hand-made scores; the rest on whole models, `replaced` by ratio.
    """
    scores = torch.full((4, EXPERTS), 0.1)
    scores[:, :8] = torch.tensor([8.0, 7.0, 6.0, 4.0, 3.0, 2.1, 1.9, 1.0])
    routes = torch.tensor([[4, 6, 5, 0], [7, 8, 9, 10], [0, 1, 2, 5], [-1, -1, -1, -1]])
    captured = torch.tensor([True, True, True, False])
    by_router: dict[str, SimpleNamespace] = {}
    replaced: dict[str, float | None] = {}
    is_live = False
    for name, options, seen in (
        ("softmax over the top k", SOFTMAX, scores.log()),
        (
            "softmax over all",
            SOFTMAX | {"moe_router_pre_softmax": True},
            scores / scores.sum(-1, keepdim=True),
        ),
        ("sigmoid, bias", SIGMOID | BIAS, scores / 10),
        ("softmax, bias", SOFTMAX, scores.log()),
    ):
        model = model_of(device, mesh, options, plausibility=0.5)
        tap = model.replay.taps[1]
        # The live choice is by 0.01 * score, upside down where the bias says so; gates are not.
        if "bias" in name:
            router = model.routers[1]
            router.expert_bias = torch.zeros(EXPERTS)
            router.expert_bias[7] = 5.0
            if name.startswith("sigmoid"):  # Megatron adds it
                seen = seen + router.expert_bias
        tap.clear()
        tap.mode = "replay"
        tap.load(routes.to(torch.int8), captured, rows=3)
        values, used = tap.get_replay_topk(
            seen, TOPK, None, None, lambda s, k, *_: torch.topk(s, k)
        )
        by_router[name] = SimpleNamespace(
            used=used.tolist(),
            gathered=torch.equal(values, seen.gather(1, used)),
            counts=tap.counts[0][:3].tolist(),
            shapes=tap.counts[0][3:].tolist(),
        )
        tap.clear()
    foreign = random_routes(np.random.default_rng(2), len(TOKENS), 2, TOPK)
    outcomes = {}
    for ratio in (0.0, 1e-30, 1.0):
        model = model_of(device, mesh, ROUTERS["sigmoid"], plausibility=ratio)
        maps: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda _module, _args, out, maps=maps: maps.append(out[1]))
            for router in model.routers.values()
        ]
        with model.replay.schedule("replay", training=True) as ledger_of:
            load(model.replay, foreign)
            outcomes[ratio] = forward_backward(model)
            ledger = ledger_of()
        part = routing_metrics(ledger).get("routing/replaced_frac")
        replaced[str(ratio)] = part and Mean.reduce([part])
        if ratio == 1.0:
            with model.replay.schedule("live", training=True):
                forward_backward(model)
            is_live = torch.equal(maps[0], maps[2]) and torch.equal(maps[1], maps[3])
        for hook in hooks:
            hook.remove()
    return SimpleNamespace(
        by_router=by_router,
        replaced=replaced,
        ratio_1_is_live=is_live,
        nearly_0_differs=identical(outcomes[0.0], outcomes[1e-30]),
    )


def refusals(device: Device, mesh: Mesh) -> dict[str, str]:
    """What `attach_replay` says of every setting and every router that would break replay
    silently.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    model = model_of(device, mesh, ROUTERS["sigmoid, bias"])
    chunk, config = model.chunk, model.moe.config
    said: dict[str, str] = {}

    def attach(name: str, moe_layers: Sequence[int] = (1, 2)) -> None:
        action = partial(attach_replay, [chunk], moe_layers, mesh.pp)
        said[name] = message_of(action, AssertionError)

    for name, value in {
        "moe_router_fusion": True,
        "moe_router_load_balancing_type": "sinkhorn",
        "moe_aux_loss_coeff": 0.01,
        "moe_router_force_load_balancing": True,
        "moe_input_jitter_eps": 0.1,
        "moe_expert_capacity_factor": 1.25,
        "moe_pad_expert_input_to_capacity": True,
        "moe_router_padding_for_quantization": True,
        "moe_token_dispatcher_type": "flex",
        "moe_router_bias_update_rate": 0.001,
    }.items():
        plain = getattr(config, name)
        setattr(config, name, value)
        attach(f"{name} = {value!r}")
        setattr(config, name, plain)
    attach("a router in a dense layer", (2,))
    attach("a layer without a router", (1, 2, 5))

    class Quantile(TopKRouter):
        pass

    model.moe.router.__class__ = Quantile
    attach("another router")
    model.moe.router.__class__ = TopKRouter

    def outside() -> Any:
        return TopKRouter(config=config, pg_collection=mesh.megatron)

    chunk.add_module("stray", torch.nn.ModuleList([outside()]))
    attach("an orphan")
    del chunk.stray
    head = outside()
    listed = head.router_replay in RouterReplay.global_router_replay_instances
    chunk.add_module("mtp", torch.nn.ModuleList([head]))
    attach("a head of multi-token prediction")
    said["of the head"] = (
        f"{listed} {head.router_replay} {len(RouterReplay.global_router_replay_instances)}"
    )
    return said
