"""What each rank does in the tests of replay: Megatron's own routers, layers and models, built the way the policy builds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from r3.config import Config
from r3.handover.rollouts import PackingSpec, distribute
from r3.metrics.mismatch import mismatch
from r3.metrics.reduce import Mean
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.policy.updates import train_on
from r3.routing.replay import Replay, RouterTap, attach_replay, routing_metrics
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Batch, MicroBatch, Rollout
from tests.ranks.cases import batches_of, build
from tests.tiny import tiny_config

EXPERTS, TOPK, HIDDEN, FFN, VOCAB = 16, 4, 32, 24, 64
SOFTMAX = {"moe_router_score_function": "softmax"}
SIGMOID = {"moe_router_score_function": "sigmoid"}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax over the top k": SOFTMAX,  # Qwen3-MoE, Mixtral
    "softmax over all": SOFTMAX | {"moe_router_pre_softmax": True},  # OLMoE, Qwen2-MoE
    "softmax, scaled": SOFTMAX
    | {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "softmax, groups": SOFTMAX | GROUPS | {"moe_router_pre_softmax": True},  # DeepSeek-V2
    "softmax, top 1": SOFTMAX | {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sigmoid": SIGMOID,
    "sigmoid, bias": SIGMOID | BIAS,  # Moonlight
    "sigmoid, bias, groups, scaled": SIGMOID
    | BIAS
    | GROUPS
    | {"moe_router_topk_scaling_factor": 2.5},
    "sigmoid, top 1": SIGMOID | {"moe_router_topk": 1},
}
"""Every way to route that a family of today uses, as options of Megatron's TransformerConfig."""


# --------------------------------------------------------------------------------------------------------------------
# A small Megatron model with any router


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPTModel (dense first layer, then MoE layers with a shared expert), its replay owner and its routers by layer."""

    chunk: Any
    replay: Replay
    routers: dict[int, Any]

    @property
    def moe(self) -> Any:
        """The last MoE layer."""
        return self.chunk.decoder.layers[-1].mlp


def model_of(
    device: Device,
    mesh: Mesh,
    options: dict[str, Any],
    *,
    seed: int = 0,
    experts: str = "grouped",
    plausibility: float = 0.0,
) -> Model:
    """Build it with random weights; `options` are Megatron's settings of the router."""
    from megatron.core.transformer import TransformerConfig

    from r3.policy.build import build_chunks, megatron_settings

    shape = ModelShape(
        architecture="any",
        model_type="any",
        num_layers=3,
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=FFN,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        rope_theta=10000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        tied=False,
        num_experts=EXPERTS,
        topk=TOPK,
        moe_ffn_size=FFN,
        shared_ffn_size=FFN,
        moe_layers=(1, 2),
    )
    config = tiny_config(model={"experts": experts})
    megatron = TransformerConfig(**(megatron_settings(config, shape) | options))
    (chunk,) = build_chunks(config, shape, megatron, mesh, device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in chunk.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(
                1 + 0.1 * noise if "norm" in name else noise / max(tensor.shape[-1], 2) ** 0.5
            )
        for name, tensor in chunk.named_buffers():
            if name.endswith("expert_bias"):  # as large as the spread of the scores: it decides
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    replay = attach_replay([chunk], [1, 2], mesh.pp, plausibility=plausibility)
    routers = {layer.layer_number - 1: layer.mlp.router for layer in chunk.decoder.layers[1:]}
    return Model(chunk=chunk, replay=replay, routers=routers)


LENGTHS = (23, 9, 31)
_TOKENS = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7))


def forward_backward(model: Model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of packed sequences, and the gradient of every parameter for a loss that weighs all logits differently."""
    from r3.policy.modules import packed_params

    for parameter in model.chunk.parameters():
        parameter.grad = None
    logits = model.chunk(
        _TOKENS[None],
        torch.cat([torch.arange(length) for length in LENGTHS])[None],
        None,
        packed_seq_params=packed_params(np.cumsum([0, *LENGTHS]).tolist(), _TOKENS.device),
    )
    weights = torch.randn(
        logits.shape, generator=torch.Generator().manual_seed(8), dtype=logits.dtype
    )
    (logits * weights).mean().backward()
    return logits.detach(), {
        name: parameter.grad.clone()
        for name, parameter in model.chunk.named_parameters()
        if parameter.grad is not None
    }


def identical(
    one: tuple[torch.Tensor, dict[str, torch.Tensor]],
    other: tuple[torch.Tensor, dict[str, torch.Tensor]],
) -> list[str]:
    """Names of what differs in any bit: "logits" and gradients."""
    assert one[1].keys() == other[1].keys()
    differs = [
        name for name, gradient in one[1].items() if not torch.equal(gradient, other[1][name])
    ]
    return differs if torch.equal(one[0], other[0]) else ["logits", *differs]


def random_routes(rng: np.random.Generator, rows: int, layers: int, topk: int) -> torch.Tensor:
    """Distinct random experts `[rows, layers, topk]`."""
    return torch.from_numpy(
        np.argsort(rng.random((rows, layers, EXPERTS)), axis=-1)[..., :topk].copy()
    )


def load(replay: Replay, routes_NLK: torch.Tensor) -> None:
    """Load routes of all MoE layers; every row with a route is compared."""
    captured_N = (routes_NLK >= 0).flatten(1).all(1)
    replay.load(routes_NLK, captured_N, rows=int(captured_N.sum()))


def routers(device: Device) -> dict[str, Any]:
    """E1 to E3, which need one rank and no checkpoint."""
    mesh = build_mesh(device, tiny_config().parallel)
    return {
        "identity": identity(device, mesh),
        "oracle": against_oracle(device, mesh),
        "top 1": top_1_softmax(device, mesh),
        "reach": gradient_reach(device, mesh),
        "filter": plausibility_filter(device, mesh),
        "refusals": refusals(device, mesh),
    }


def identity(device: Device, mesh: Mesh) -> dict[str, Any]:
    """E1, and rows of -1: for every router, what differs between no replay at all and replay of the live choice."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    found: dict[str, Any] = {}
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
        missing = torch.from_numpy(rng.random(len(_TOKENS)) < 0.3)
        with model.replay.schedule("replay", training=True):
            load(model.replay, torch.where(missing[:, None, None], -1, routes_NLK))
            partly = forward_backward(model)

        # Foreign routes around them move the hidden states; rows of -1 must route as those states say, whatever they are.
        seen: dict[int, list[torch.Tensor]] = {}

        def keep(
            router: Any, args: Any, out: Any, seen: dict[int, list[torch.Tensor]] = seen
        ) -> None:
            seen[router.layer_number - 1] = [args[0], *out]

        hooks = [router.register_forward_hook(keep) for router in model.routers.values()]
        foreign = random_routes(rng, len(_TOKENS), 2, topk)
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
        found[name] = {
            "gradients": len(untouched[1]),
            "router_gradient": min(
                float(gradient.abs().max())
                for key, gradient in untouched[1].items()
                if "router" in key
            ),
            "record": identical(untouched, recording),
            "replay": identical(untouched, replaying),
            "agreed": ledger.counts[:, 0].tolist(),
            "live_rows": identical(untouched, partly),
            "missing": int(missing.sum()),
            "foreign": identical(untouched, among_foreign),
            "live_rows_moved": live_rows_moved,
            "foreign_rows_moved": foreign_rows_moved,
        }
    return found


# --------------------------------------------------------------------------------------------------------------------
# The oracle: every expert computes every token in float64, and a mask says whose output counts


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Output of one MoE layer and the gradients of a fixed scalar of it."""

    output: torch.Tensor
    input: torch.Tensor
    router: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    logits: torch.Tensor
    gates: torch.Tensor


def oracle(
    hidden: torch.Tensor,
    weights: dict[str, torch.Tensor],
    mask: torch.Tensor,
    upstream: torch.Tensor,
    *,
    score: str,
    over_all: bool,
    scale: float,
) -> Gradients:
    """The layer from its definition: no top-k, no gather, no dispatch, no Megatron."""
    x, router, w1, w2 = (
        tensor.detach().double().requires_grad_()
        for tensor in (hidden, weights["router"], weights["w1"], weights["w2"])
    )
    logits = x @ router.t()
    logits.retain_grad()
    chosen = mask.double()
    if score == "softmax":
        powers = logits.exp() * (1.0 if over_all else chosen)
        gates = powers / powers.sum(-1, keepdim=True) * chosen
    else:
        scores = 1 / (1 + (-logits).exp()) * chosen
        gates = scores / scores.sum(-1, keepdim=True) if int(mask[0].sum()) > 1 else scores
    gates = gates * scale
    gate, up = torch.einsum("nd,efd->nef", x, w1).chunk(2, -1)
    everyone = torch.einsum("nef,edf->ned", gate / (1 + (-gate).exp()) * up, w2)
    output = (gates.unsqueeze(-1) * everyone).sum(1)
    (output * upstream.double()).sum().backward()
    grads = [tensor.grad for tensor in (x, router, w1, w2, logits)]
    return Gradients(
        output=output.detach(),
        **dict(zip(("input", "router", "w1", "w2", "logits"), grads, strict=True)),
        gates=gates.detach(),
    )


def routed_layer(
    model: Model, hidden: torch.Tensor, mask: torch.Tensor, upstream: torch.Tensor
) -> Gradients:
    """The same from Megatron's MoE layer (router, dispatcher, experts) under replay; without the shared expert."""
    moe = model.moe
    for parameter in moe.parameters():
        parameter.grad = None
    x = hidden.detach().clone().requires_grad_()
    logits: list[torch.Tensor] = []
    gates: list[torch.Tensor] = []
    gating = moe.router.gating

    def watched(inputs: torch.Tensor) -> torch.Tensor:
        scores = gating(inputs)
        scores.retain_grad()
        logits.append(scores)
        return scores

    moe.router.gating = watched
    hook = moe.router.register_forward_hook(
        lambda _module, _args, out: gates.append(out[0].detach())
    )
    topk = int(mask[0].sum())
    routes_NK = mask.nonzero()[:, 1].view(-1, topk)
    with model.replay.schedule("replay", training=True):
        load(model.replay, torch.stack([routes_NK, routes_NK], 1))
        model.replay.taps[1].clear()  # only the last layer runs here
        output = moe(x[:, None])[0][:, 0]
    (output * upstream).sum().backward()
    hook.remove()
    moe.router.gating = gating
    w1, w2 = expert_tensors(moe, gradients=True)
    return Gradients(
        output=output.detach(),
        input=x.grad,
        router=moe.router.weight.grad,
        w1=w1,
        w2=w2,
        logits=logits[0].grad[:, 0],
        gates=gates[0],
    )


def expert_tensors(moe: Any, *, gradients: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (or their gradients) of all experts, `[E, 2F, D]` and `[E, D, F]`, however they are stored."""

    def read(parameter: torch.nn.Parameter) -> torch.Tensor:
        if not gradients:
            return parameter.detach()
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    if hasattr(moe.experts, "w1"):
        return read(moe.experts.w1), read(moe.experts.w2)
    each = moe.experts.local_experts
    return (
        torch.stack([read(expert.linear_fc1.weight) for expert in each]),
        torch.stack([read(expert.linear_fc2.weight) for expert in each]),
    )


@contextmanager
def routing_in(dtype: torch.dtype) -> Iterator[None]:
    """Inside, where Megatron's routing function says float32 it computes in `dtype`: its logic at an oracle's precision."""
    from megatron.core.transformer.moe import moe_utils

    class Wide:
        float32 = dtype

        def __getattr__(self, name: str) -> Any:
            return getattr(known, name)

    known, to_float = moe_utils.torch, torch.Tensor.float
    moe_utils.torch = Wide()
    torch.Tensor.float = lambda tensor: tensor.to(dtype)  # type: ignore[method-assign]
    try:
        yield
    finally:
        moe_utils.torch = known
        torch.Tensor.float = to_float  # type: ignore[method-assign]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest entry; 0 / 0 is 0."""
    scale = float(expected.abs().max())
    difference = float((found.double() - expected).abs().max())
    return difference / scale if scale else difference


def _masks(rng: np.random.Generator, live: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random masks, and masks that share no expert with the live choice."""
    rows, topk = len(live), int(live[0].sum())
    noise = torch.from_numpy(rng.random((rows, EXPERTS)))
    nothing = torch.zeros_like(live)
    return {
        "live": live,
        "random": nothing.scatter(1, noise.topk(topk).indices, True),
        "disjoint": nothing.scatter(1, (noise - 2.0 * live).topk(topk).indices, True),
    }


def _layer(
    device: Device, mesh: Mesh, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Model, dict[str, torch.Tensor], dict[str, Any]]:
    """A model whose last MoE layer computes in `dtype` and has no shared expert; its weights; the oracle's settings."""
    precise = (
        {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}
        if dtype == torch.float64
        else {}
    )
    options = options | precise | {"moe_shared_expert_intermediate_size": None}
    model = model_of(device, mesh, options, experts="sequential" if precise else "grouped")
    w1, w2 = expert_tensors(model.moe)
    weights = {"router": model.moe.router.weight.detach(), "w1": w1, "w2": w2}
    settings = model.moe.config
    return (
        model,
        weights,
        {
            "score": settings.moe_router_score_function,
            "over_all": settings.moe_router_pre_softmax,
            "scale": settings.moe_router_topk_scaling_factor or 1.0,
        },
    )


def _live_mask(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.moe.router(hidden[:, None])[1]


def against_oracle(device: Device, mesh: Mesh) -> dict[str, Any]:
    """E2: relative errors of output and gradients for every router, precision and kind of mask, and exact properties."""
    found: dict[str, Any] = {}
    for name, options in ROUTERS.items():
        for dtype in (torch.float32, torch.float64):
            model, weights, settings = _layer(device, mesh, options, dtype)
            rng = np.random.default_rng(3)
            hidden = torch.from_numpy(rng.standard_normal((48, HIDDEN))).to(dtype)
            upstream = torch.from_numpy(rng.standard_normal((48, HIDDEN))).to(dtype)
            with routing_in(dtype):
                live = _live_mask(model, hidden)
                for kind, mask in _masks(rng, live).items():
                    expected = oracle(hidden, weights, mask, upstream, **settings)
                    ours = routed_layer(model, hidden, mask, upstream)
                    errors = {
                        part: relative_error(getattr(ours, part), getattr(expected, part))
                        for part in ("output", "input", "router", "w1", "w2", "logits", "gates")
                    }
                    found[f"{name} / {kind} / {dtype}"] = {
                        "errors": errors,
                        "shared_with_live": int((mask & live).sum()),
                        "logit_gradient": float(ours.logits.abs().max()),
                        "outside_mask": float(ours.logits[~mask].abs().max()),
                        "row_sum": float(ours.logits.sum(-1).abs().max() / ours.logits.abs().max()),
                        "router_gradient": float(ours.router.abs().max()),
                    }
                    if kind == "disjoint" and dtype == torch.float64:
                        found[f"{name} / {kind} / {dtype}"]["finite_difference"] = (
                            _finite_difference(model, hidden, mask, upstream, ours)
                        )
    return found


def _finite_difference(
    model: Model, hidden: torch.Tensor, mask: torch.Tensor, upstream: torch.Tensor, at: Gradients
) -> float:
    """Relative error of the directional derivative along a random move of router weight and input together."""
    weight = model.moe.router.weight
    generator = torch.Generator().manual_seed(5)
    step = 1e-6
    move_w = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    move_x = torch.randn(hidden.shape, generator=generator, dtype=torch.float64)
    values = []
    kept = weight.detach().clone()
    for sign in (1, -1):
        with torch.no_grad():
            weight.copy_(kept + sign * step * move_w)
        moved = routed_layer(model, hidden + sign * step * move_x, mask, upstream)
        values.append(float((moved.output * upstream).sum()))
    with torch.no_grad():
        weight.copy_(kept)
    expected = float((at.router * move_w).sum() + (at.input * move_x).sum())
    return abs((values[0] - values[1]) / (2 * step) - expected) / abs(expected)


def top_1_softmax(device: Device, mesh: Mesh) -> dict[str, Any]:
    """A softmax over one logit is 1 whatever the logit: Megatron refuses to build it, and the router would learn nothing."""
    try:
        model_of(device, mesh, SOFTMAX | {"moe_router_topk": 1})
        refusal = "nothing was raised"
    except ValueError as error:
        refusal = str(error)
    model, weights, settings = _layer(device, mesh, ROUTERS["softmax, top 1"], torch.float32)
    model.moe.config.moe_router_pre_softmax = settings["over_all"] = False
    rng = np.random.default_rng(4)
    hidden, upstream = (
        torch.from_numpy(rng.standard_normal((48, HIDDEN))).float() for _ in range(2)
    )
    mask = _masks(rng, _live_mask(model, hidden))["random"]
    ours = routed_layer(model, hidden, mask, upstream)
    expected = oracle(hidden, weights, mask, upstream, **settings)
    return {
        "refusal": refusal,
        "router_gradient": float(ours.router.abs().max()),
        "expected": float(expected.router.abs().max()),
        "expert_gradient": float(ours.w1.abs().max()),
    }


# --------------------------------------------------------------------------------------------------------------------
# Where gradients must arrive


class ScatterZeroed(RouterTap):
    """The fault of gathering from scores that were zeroed outside the live top-k: drifted experts have no gate, no gradient."""

    def get_replay_topk(self, scores: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        live_NK = scores.detach().topk(topk).indices
        kept = torch.zeros_like(scores).scatter(1, live_NK, scores.gather(1, live_NK))
        return super().get_replay_topk(kept, topk, *args, **kwargs)


def gradient_reach(device: Device, mesh: Mesh) -> dict[str, Any]:
    """E3: with routes among the lower half of the experts only; and the same with a faulty tap in place of ours."""
    found: dict[str, Any] = {}
    for name in ("softmax over the top k", "softmax over all", "sigmoid"):
        for tap in (RouterTap, ScatterZeroed):
            model, _, _ = _layer(device, mesh, ROUTERS[name], torch.float32)
            rng = np.random.default_rng(6)
            hidden, upstream = (
                torch.from_numpy(rng.standard_normal((64, HIDDEN))).float() for _ in range(2)
            )
            live = _live_mask(model, hidden)
            model.replay.taps[2].__class__ = tap
            allowed = torch.arange(EXPERTS) < EXPERTS // 2
            noise = torch.from_numpy(rng.random((64, EXPERTS))) - 2.0 * ~allowed
            mask = torch.zeros_like(live).scatter(1, noise.topk(TOPK).indices, True)
            ours = routed_layer(model, hidden, mask, upstream)
            drifted = mask & ~live
            used = mask.any(0)
            found[f"{name} / {tap.__name__}"] = {
                "router_gradient": float(ours.router.abs().max()),
                "drifted": int(drifted.sum()),
                "drifted_gate": float(ours.gates[drifted].min()),
                "drifted_logit_gradient": float(ours.logits[drifted].abs().min()),
                "unused_experts": int((~used).sum()),
                "unused_gradient": max(float(w[~used].abs().max()) for w in (ours.w1, ours.w2)),
                "used_gradient": min(
                    float(ours.w1[e].abs().max()) for e in used.nonzero().flatten()
                ),
            }
    return found


# --------------------------------------------------------------------------------------------------------------------
# The plausibility filter, and what is refused


def plausibility_filter(device: Device, mesh: Mesh) -> dict[str, Any]:
    """Hand-made scores through a tap; foreign routes through whole models with a ratio of nearly 0 and of 1."""
    scores = torch.full((4, EXPERTS), 0.1)
    scores[:, :8] = torch.tensor([8.0, 7.0, 6.0, 4.0, 3.0, 2.1, 1.9, 1.0])
    routes = torch.tensor([[4, 6, 5, 0], [7, 8, 9, 10], [0, 1, 2, 5], [-1, -1, -1, -1]])
    captured = torch.tensor([True, True, True, False])
    found: dict[str, Any] = {}
    for name, options, seen in (
        ("softmax over the top k", SOFTMAX, scores.log()),
        (
            "softmax over all",
            SOFTMAX | {"moe_router_pre_softmax": True},
            scores / scores.sum(-1, keepdim=True),
        ),
        ("sigmoid, bias", SIGMOID | BIAS, scores / 10),
    ):
        model = model_of(device, mesh, options, plausibility=0.5)
        tap = model.replay.taps[1]
        if (
            "bias" in name
        ):  # the live choice is by 0.01 * score, upside down where the bias says so; gates are not
            model.routers[1].expert_bias.zero_()[7] = 5.0
            seen = seen + model.routers[1].expert_bias
        tap.clear()
        tap.mode = "replay"
        tap.load(routes.to(torch.int8), captured, rows=3)
        values, used = tap.get_replay_topk(
            seen, TOPK, None, None, lambda s, k, *_: torch.topk(s, k)
        )
        found[name] = {
            "used": used.tolist(),
            "gathered": torch.equal(values, seen.gather(1, used)),
            "counts": tap.counts[0].tolist(),
        }
        tap.clear()
    foreign = random_routes(np.random.default_rng(2), len(_TOKENS), 2, TOPK)
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
        metrics = routing_metrics(ledger)
        if ratio == 1.0:
            with model.replay.schedule("live", training=True):
                forward_backward(model)
            found["ratio 1 is the live choice"] = torch.equal(maps[0], maps[2]) and torch.equal(
                maps[1], maps[3]
            )
        for hook in hooks:
            hook.remove()
        found[f"replaced at {ratio}"] = (
            Mean.reduce([metrics["routing/replaced_frac"]])
            if "routing/replaced_frac" in metrics
            else None
        )
    found["nearly 0 is off"] = identical(outcomes[0.0], outcomes[1e-30])
    return found


def refusals(device: Device, mesh: Mesh) -> dict[str, str]:
    """What `attach_replay` says of every setting and every router that would break replay silently."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    model = model_of(device, mesh, ROUTERS["sigmoid, bias"])
    chunk, config = model.chunk, model.moe.config
    said: dict[str, str] = {}

    def attach(name: str, moe_layers: Sequence[int] = (1, 2)) -> None:
        try:
            attach_replay([chunk], moe_layers, mesh.pp)
            said[name] = "nothing was raised"
        except AssertionError as error:
            said[name] = str(error)

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
        attach(name)
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


# --------------------------------------------------------------------------------------------------------------------
# Passes of one policy


def _policy(device: Device, mesh: Mesh, config: Config) -> Policy:
    from r3.models.shape import ModelShape

    return Policy(config, device, mesh, ModelShape.read(config.model.path))


def consistency(device: Device, *, model: str, ep: int) -> dict[str, Any]:
    """E7: ratios of the first update to the old pass, with replay in both, in one only, and with recorded routes (R2)."""
    from r3.policy import policy as module

    mesh, policy = build(device, tiny_config(model, parallel={"ep": ep}))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    ratios: list[torch.Tensor] = []
    real = module.policy_loss

    def watched(
        config: Any, batch: Any, tokens: Any, cp: Any, logprobs_N: Any, old_N: Any, *rest: Any
    ) -> Any:
        ratios.append((logprobs_N.detach() - old_N).exp()[tokens.loss_mask_N > 0])
        return real(config, batch, tokens, cp, logprobs_N, old_N, *rest)

    module.policy_loss = watched
    found: dict[str, Any] = {}
    for old_mode in ("replay", "live", "record"):
        scores = policy.score(batch.micro_batches, mode=old_mode)
        recorded = scores.ledger.recorded if old_mode == "record" else None
        ratios.clear()
        metrics = policy.forward_backward(
            batch, old_logprobs=scores.logprobs, recorded_routes=recorded
        )
        ratio = torch.cat(ratios)
        found[old_mode] = {
            "tokens": len(ratio),
            "off_by": float((ratio - 1).abs().max()),
            "clipped": metrics["loss/clip_frac"].total,
            "agreed": metrics["routing/agreement"].total,
            "slots": metrics["routing/agreement"].count,
        }
    # Several updates on routes recorded before the first: the router moves away from them, the forward stays on them.
    recorded = policy.score(batch.micro_batches, mode="record").ledger.recorded
    agreement, stayed = [], []
    for _ in range(4):
        metrics = policy.update(batch, total_updates=100, recorded_routes=recorded).metrics
        agreement.append(metrics["routing/agreement"].total / metrics["routing/agreement"].count)
        stayed.append(_stays_on(policy, batch, recorded))
    module.policy_loss = real
    return {"old_pass": found, "agreement": agreement, "stayed": stayed}


def _stays_on(policy: Policy, batch: Batch, recorded: Sequence[torch.Tensor]) -> bool:
    """Whether a forward with these routes sends every token where they say."""
    with read_back(policy) as maps:
        policy.score(batch.micro_batches, mode="replay", recorded_routes=recorded)
    layers = [layer for layer in policy.replay.moe_layers if layer in policy.replay.taps]
    return all(
        torch.equal(
            maps[layer][i],
            torch.zeros_like(maps[layer][i]).scatter(1, routes_NLK[:, position].long(), True),
        )
        for position, layer in enumerate(layers)
        for i, routes_NLK in enumerate(recorded)
    )


@contextmanager
def read_back(policy: Policy, *, backward: bool = False) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Inside, the routing maps `[N, E]` that leave every router, per layer in order; `backward`: of recomputations only."""
    maps: dict[int, list[torch.Tensor]] = {layer: [] for layer in policy.replay.taps}
    routers = {
        layer.layer_number - 1: layer.mlp.router
        for chunk in policy.chunks
        for layer in chunk.decoder.layers
        if hasattr(layer.mlp, "router")
    }

    def keep(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            if _in_backward() == backward:
                maps[layer].append(out[1].cpu())

        return hook

    hooks = [router.register_forward_hook(keep(layer)) for layer, router in routers.items()]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


class LastFirst(RouterTap):
    """The fault of a stack where a queue belongs: a recomputation takes the routes of the forward that came last."""

    kept: list[torch.Tensor]

    def get_replay_topk(self, scores: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        values, routes_NK = super().get_replay_topk(scores, topk, *args, **kwargs)
        if not _in_backward():
            self.kept.append(routes_NK)
            return values, routes_NK
        routes_NK = self.kept.pop()
        return scores.gather(1, routes_NK), routes_NK


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def modes(device: Device, *, model: str) -> dict[str, Any]:
    """Keys and values that steps report in every replay mode, with the reference replayed or not; then an accident."""
    config = tiny_config(
        model, model={"recompute": "full"}, algo={"kl_coef": 0.1}, train={"lr": 0.02}
    )
    mesh = build_mesh(device, config.parallel)
    nothing_R = torch.zeros(0)
    found: dict[str, Any] = {}
    for name, replay, updates in (
        ("off", {"mode": "off"}, 2),
        ("r2", {"mode": "r2"}, 2),
        ("r3", {"mode": "r3"}, 2),
        ("r3, one update", {"mode": "r3", "reference": True}, 1),
    ):
        setting = replace(
            config,
            replay=replace(config.replay, **replay),
            train=replace(config.train, updates_per_step=updates),
        )
        policy = _policy(device, mesh, setting)
        batches = batches_of(mesh, policy.shape, micro_batch_tokens=96, num_updates=updates)
        flat = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
        before = policy.score(flat, mode="replay").ledger
        live, replay_arm = (policy.score(flat[1:2], mode=mode) for mode in ("live", "replay"))
        k3 = [
            mismatch(*(torch.cat(c) for c in (s.logprobs, s.rollout_logprobs, s.loss_mask)))["k3"]
            for s in (live, replay_arm)
        ]
        parts: dict[str, list[Any]] = {}

        def report(metrics: Any, parts: dict[str, list[Any]] = parts) -> None:
            for key, part in metrics.items():
                parts.setdefault(key, []).append(part)

        scored: list[tuple[str, int]] = []
        real = policy.score

        def counting(
            micro_batches: Any, *, mode: Any, real: Any = real, scored: Any = scored, **rest: Any
        ) -> Any:
            scored.append((mode, len(micro_batches)))
            return real(micro_batches, mode=mode, **rest)

        policy.score = counting  # type: ignore[method-assign]  # the real one, counted
        train_on(
            policy, batches, nothing_R.double(), nothing_R.long(), setting, step=2, report=report
        )
        policy.score = real  # type: ignore[method-assign]
        found[name] = {
            "scored": scored,
            "sizes": [len(batch.micro_batches) for batch in batches],
            "row": {key: type(some[0]).reduce(some) for key, some in parts.items()},
            "slots": {
                key: sum(part.count for part in some)
                for key, some in parts.items()
                if key == "routing/agreement"
            },
            "agreement": Mean.reduce([routing_metrics(before)["routing/agreement"]]),
            "all_slots": sum(before.rows),
            "k3_ratio": k3[0].total / k3[1].total,
        }
    found["accident"] = _accident(policy, batches[0])
    return found


def _accident(policy: Policy, batch: Batch) -> dict[str, Any]:
    """A forward of an update raises in its second micro-batch, checkpointed: what the passes after it see of that."""
    before = policy.score(batch.micro_batches, mode="live").logprobs
    last = max(policy.replay.taps)
    calls = []

    def fail(_module: Any, _args: Any, _out: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("in the middle of a schedule")

    router = next(
        layer.mlp.router
        for layer in policy.chunks[0].decoder.layers
        if layer.layer_number - 1 == last
    )
    hook = router.register_forward_hook(fail)
    try:
        policy.forward_backward(batch)
        said = "nothing was raised"
    except OSError as error:
        said = str(error)
    hook.remove()
    tap = policy.replay.taps[last]
    state = (tap.mode, tap.training, tap.forwards, tap.leftovers(), tap.counts, policy.replay.mode)
    after = policy.score(batch.micro_batches, mode="live").logprobs
    return {
        "said": said,
        "state": state,
        "same": all(torch.equal(one, other) for one, other in zip(before, after, strict=True)),
        "update": policy.update(batch, total_updates=10).grad_norm,
    }


def recomputation(device: Device, *, model: str) -> dict[str, Any]:
    """E8: gradients with every kind of recomputation: micro-batches one by one, in flight together, out of order, and
    with a faulty tap.

    In flight together means: forward all, then backward in the same order, as the first stage of a pipeline does.
    """
    config = tiny_config(model)
    mesh = build_mesh(device, config.parallel)
    gradients: dict[str, list[torch.Tensor]] = {}
    said: dict[str, str] = {}
    recomputed: dict[str, int] = {}
    batch: Batch | None = None
    for recompute in ("none", "moe", "full"):
        policy = _policy(
            device, mesh, replace(config, model=replace(config.model, recompute=recompute))
        )
        if batch is None:
            (batch,) = batches_of(mesh, policy.shape, (40, 40, 40, 40), micro_batch_tokens=40)
        policy.score(batch.micro_batches, mode="replay")  # a pass between must leave nothing behind
        with read_back(policy, backward=True) as maps:
            policy.forward_backward(batch)
        recomputed[recompute] = sum(map(len, maps.values()))
        gradients[f"{recompute}, one by one"] = _gradient_buffers(policy)
        _in_flight(policy, batch)
        gradients[f"{recompute}, in flight"] = _gradient_buffers(policy)
        for name, order, tap_class in (
            ("last first", (3, 2, 1, 0), RouterTap),
            ("shuffled", (1, 3, 0, 2), RouterTap),
            ("in one pass", None, RouterTap),
            ("twice", (0, 1, 2, 3, 3), RouterTap),
            ("stack", (0, 1, 2, 3), LastFirst),
        ):
            for tap in policy.replay.taps.values():
                tap.__class__, tap.kept = tap_class, []
            try:
                _in_flight(policy, batch, order=order)
            except (AssertionError, RuntimeError) as error:
                said[f"{recompute}, {name}"] = str(error)
            gradients[f"{recompute}, {name}"] = _gradient_buffers(policy)
    expected = gradients["none, one by one"]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    return {
        "micro_batches": len(batch.micro_batches) if batch else 0,
        "recomputed": recomputed,
        "difference": {
            name: max(
                float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)
            )
            / largest
            for name, found in gradients.items()
        },
        "said": said,
    }


def _gradient_buffers(policy: Policy) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in policy.memory.gradient_buffers()]


def _in_flight(policy: Policy, batch: Batch, *, order: Sequence[int] | None = (0, 1, 2, 3)) -> None:
    """Forward all four micro-batches, then backward in this order, or (None) all in one backward pass."""
    from r3.policy.layout import local_tokens
    from r3.policy.modules import packed_params
    from r3.policy.objective import policy_loss

    for chunk in policy.wrapped:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    with policy.replay.schedule("replay", training=True):
        losses = []
        for micro_batch in batch.micro_batches:
            tokens = local_tokens(micro_batch, policy.mesh, policy.device.torch)
            policy.replay.load(tokens.routes_NLK, tokens.captured_N, rows=tokens.num_captured)
            logprobs_N, _ = policy.wrapped[0](
                tokens.tokens_N[None],
                tokens.positions_N[None],
                None,
                labels=tokens.targets_N[None],
                packed_seq_params=packed_params(micro_batch.cu_seqlens, policy.device.torch),
            )
            loss, _ = policy_loss(
                policy.config, batch, tokens, policy.mesh.cp, logprobs_N, logprobs_N.detach()
            )
            losses.append(loss)
        for loss in [sum(losses)] if order is None else [losses[i] for i in order]:
            loss.backward(retain_graph=True)
    for chunk in policy.wrapped:
        chunk.finish_grad_sync()


# --------------------------------------------------------------------------------------------------------------------
# Routes made wrong on purpose, with real rollouts of a real engine

DOSES = (0.0, 0.001, 0.01, 0.1, 1.0)


def dose_response(device: Device, *, engine_dtype: str, model: str = "") -> dict[str, Any]:
    """E6: k3 and agreement as a growing share of slots is corrupted, and for every way routes can be misaligned."""
    from r3.rollout.scored import gather_rewards, score_all
    from tests.e2e.cases import World

    config = tiny_config(
        model,
        engine={"dtype": engine_dtype},
        rollout={"prompts_per_step": 16, "max_response_tokens": 40},
    )
    world = World(device, config)
    world.sync(0)
    before = world.collect(0, step=1).rollouts
    answers = world.collect(0, step=0)
    world.residency.move(world.residency.state.TRAIN)
    rollouts = answers.rollouts
    policy, shape = world.policy, world.task.shape

    def packed(changed: Sequence[Rollout]) -> tuple[MicroBatch, ...]:
        altered = replace(answers, rollouts=list(changed))
        scored = score_all(altered, gather_rewards(altered, world.mesh.world, config), config)
        (batch,), _ = distribute(scored, world.mesh, shape, PackingSpec(micro_batch_tokens=1024))
        return batch.micro_batches

    def measure(micro_batches: Sequence[MicroBatch], mode: Any = "replay") -> dict[str, Any]:
        with read_back(policy) as maps:
            scores = policy.score(micro_batches, mode=mode)
        parts = mismatch(
            *(torch.cat(c) for c in (scores.logprobs, scores.rollout_logprobs, scores.loss_mask))
        )
        figures: dict[str, Any] = {name: type(part).reduce([part]) for name, part in parts.items()}
        if mode == "replay":
            figures["rows"] = scores.ledger.rows[0]
            figures["agreed"] = scores.ledger.counts[:, 0].tolist()
            figures["wrong"] = sum(
                int(
                    (maps[layer][i] != _as_map(micro_batch, position, shape.num_experts))[
                        micro_batch.captured_N
                    ].sum()
                )
                for position, layer in enumerate(shape.moe_layers)
                for i, micro_batch in enumerate(micro_batches)
            )
        return figures

    def changed_by(change: Callable[[Rollout, int], np.ndarray]) -> tuple[MicroBatch, ...]:
        return packed(
            [
                replace(rollout, routed_experts=np.ascontiguousarray(change(rollout, i)))
                for i, rollout in enumerate(rollouts)
            ]
        )

    def of(other: Rollout, rollout: Rollout) -> np.ndarray:
        return np.resize(other.routed_experts, rollout.routed_experts.shape)

    correct = packed(rollouts)
    runners_up = _runners_up(policy, correct)
    layers = range(len(shape.moe_layers))

    def corrupted(share: float, only: int | None = None) -> dict[str, Any]:
        micro_batches, hits = [], []
        for micro_batch, next_best in zip(correct, runners_up, strict=True):
            hit = _hit(micro_batch, share)
            if only is not None:
                hit &= torch.arange(len(layers)) == only
            micro_batches.append(_corrupted(micro_batch, next_best, hit))
            hits.append(hit)
        return measure(micro_batches) | {"hits": torch.cat(hits).sum(0).tolist()}

    return {
        "live": measure(correct, "live"),
        "doses": {str(share): corrupted(share) for share in DOSES},
        "one_layer": [corrupted(0.1, only=layer) for layer in layers],
        "misaligned": {
            name: measure(changed_by(change))
            for name, change in {
                "shifted back": lambda rollout, i: np.roll(rollout.routed_experts, -1, axis=0),
                "shifted on": lambda rollout, i: np.roll(rollout.routed_experts, 1, axis=0),
                "layers swapped": lambda rollout, i: rollout.routed_experts[:, [1, 0, *layers[2:]]],
                "samples permuted": lambda rollout, i: of(
                    rollouts[(i + 1) % len(rollouts)], rollout
                ),
                "groups permuted": lambda rollout, i: of(
                    rollouts[(i + 4) % len(rollouts)], rollout
                ),
                "of the batch before": lambda rollout, i: of(before[i], rollout),
            }.items()
        },
    }


def _as_map(micro_batch: MicroBatch, position: int, experts: int) -> torch.Tensor:
    routes_NK = micro_batch.routed_experts_NLK[:, position].long().clamp(min=0)
    return torch.zeros(len(routes_NK), experts, dtype=torch.bool).scatter(1, routes_NK, True)


def _hit(micro_batch: MicroBatch, share: float) -> torch.Tensor:
    """Which captured (token, layer) slots a dose corrupts, `[captured, L]`; larger doses contain smaller ones."""
    layers = micro_batch.routed_experts_NLK.shape[1]
    rng = np.random.default_rng(micro_batch.rollout_ids[0])
    noise = torch.from_numpy(rng.random((micro_batch.num_tokens, layers)))
    return noise[micro_batch.captured_N] < share


def _corrupted(
    micro_batch: MicroBatch, next_best_NLK: torch.Tensor, hit: torch.Tensor
) -> MicroBatch:
    """The least likely expert of a hit slot becomes the likeliest of those left out: the mildest possible flip."""
    routes_NLK = micro_batch.routed_experts_NLK.clone()
    captured_N = micro_batch.captured_N
    mine = routes_NLK[captured_N]
    routes_NLK[captured_N] = torch.where(
        hit[..., None], next_best_NLK[captured_N].to(mine.dtype), mine
    )
    return replace(micro_batch, routed_experts_NLK=routes_NLK)


def _runners_up(policy: Policy, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Per micro-batch `[N, L, K]`: each slot's routes with its rank-K expert swapped for rank K + 1, by the live logits."""
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in policy.replay.taps}
    routers = {
        layer.layer_number - 1: layer.mlp.router for layer in policy.chunks[0].decoder.layers
    }
    gatings = {layer: router.gating for layer, router in routers.items()}

    def watch(layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def gating(hidden: torch.Tensor) -> torch.Tensor:
            logits = gatings[layer](hidden)
            seen[layer].append(logits.detach().flatten(0, 1))
            return logits

        return gating

    for layer, router in routers.items():
        router.gating = watch(layer)
    policy.score(micro_batches, mode="replay")
    for layer, router in routers.items():
        router.gating = gatings[layer]
    swapped = []
    for i, micro_batch in enumerate(micro_batches):
        layers = []
        for position, layer in enumerate(policy.shape.moe_layers):
            logits_NE = seen[layer][i]
            mine = _as_map(micro_batch, position, policy.shape.num_experts)
            weakest = logits_NE.masked_fill(~mine, torch.inf).argmin(-1, keepdim=True)
            strongest_left = logits_NE.masked_fill(mine, -torch.inf).argmax(-1, keepdim=True)
            routes_NK = micro_batch.routed_experts_NLK[:, position].long()
            layers.append(torch.where(routes_NK == weakest, strongest_left, routes_NK))
        swapped.append(torch.stack(layers, 1))
    return swapped


__all__ = ["consistency", "dose_response", "modes", "recomputation", "routers"]
