"""E2: MoE layers under replay against a dense float64 oracle.

In the oracle every expert computes every token, and a mask says whose output counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from tests.errors import message_of
from tests.ranks.router_model import EXPERTS, HIDDEN, ROUTERS, SOFTMAX, Model, load, model_of


def oracle(
    hidden: torch.Tensor,
    weights: dict[str, torch.Tensor],
    mask: torch.Tensor,
    upstream: torch.Tensor,
    *,
    score: str,
    over_all: bool,
    scale: float,
) -> SimpleNamespace:
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
    return SimpleNamespace(
        output=output.detach(),
        **dict(zip(("input", "router", "w1", "w2", "logits"), grads, strict=True)),
        gates=gates.detach(),
    )


def routed_layer(
    model: Model, hidden: torch.Tensor, mask: torch.Tensor, upstream: torch.Tensor
) -> SimpleNamespace:
    """The same from Megatron's MoE layer (router, dispatcher, experts) under replay; without the
    shared expert.

    Returns:
        Output of one MoE layer and the gradients of a fixed scalar of it.
    """
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
    return SimpleNamespace(
        output=output.detach(),
        input=x.grad,
        router=moe.router.weight.grad,
        w1=w1,
        w2=w2,
        logits=logits[0].grad[:, 0],
        gates=gates[0],
    )


def expert_tensors(moe: Any, *, gradients: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (or their gradients) of all experts, `[E, 2F, D]` and `[E, D, F]`, however they are
    stored.
    """

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
    """Inside, where Megatron's routing function says float32 it computes in `dtype`: its logic at
    an oracle's precision.
    """
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


def layer_in(
    device: Device, mesh: Mesh, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Model, dict[str, torch.Tensor], dict[str, Any]]:
    """A model whose last MoE layer computes in `dtype` and has no shared expert; its weights; the
    oracle's settings.
    """
    precise = {"params_dtype": dtype, "moe_router_dtype": "fp64"} if dtype == torch.float64 else {}
    options = options | precise | {"moe_shared_expert_intermediate_size": None}
    model = model_of(device, mesh, options, experts="sequential" if precise else "grouped")
    w1, w2 = expert_tensors(model.moe)
    weights = {"router": model.moe.router.weight.detach(), "w1": w1, "w2": w2}
    config = model.moe.config
    settings = {
        "score": config.moe_router_score_function,
        "over_all": config.moe_router_pre_softmax,
        "scale": config.moe_router_topk_scaling_factor or 1.0,
    }
    return model, weights, settings


def live_mask(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.moe.router(hidden[:, None])[1]


def against_oracle(device: Device, mesh: Mesh) -> dict[str, SimpleNamespace]:
    """E2: relative errors of output and gradients for every router, precision and kind of mask, and
    exact properties.

    Returns:
        E2 for one router, mask and precision: relative errors by part, and exact properties.
    """
    found: dict[str, SimpleNamespace] = {}
    for name, options in ROUTERS.items():
        for dtype in (torch.float32, torch.float64):
            model, weights, settings = layer_in(device, mesh, options, dtype)
            rng = np.random.default_rng(3)
            hidden = torch.from_numpy(rng.standard_normal((48, HIDDEN))).to(dtype)
            upstream = torch.from_numpy(rng.standard_normal((48, HIDDEN))).to(dtype)
            with routing_in(dtype):
                live = live_mask(model, hidden)
                for kind, mask in _masks(rng, live).items():
                    expected = oracle(hidden, weights, mask, upstream, **settings)
                    ours = routed_layer(model, hidden, mask, upstream)
                    errors = {
                        part: relative_error(getattr(ours, part), getattr(expected, part))
                        for part in ("output", "input", "router", "w1", "w2", "logits", "gates")
                    }
                    found[f"{name} / {kind} / {dtype}"] = SimpleNamespace(
                        errors=errors,
                        shared_with_live=int((mask & live).sum()),
                        outside_mask=float(ours.logits[~mask].abs().max()),
                        row_sum=float(ours.logits.sum(-1).abs().max() / ours.logits.abs().max()),
                        router_gradient=float(ours.router.abs().max()),
                        finite_difference=_finite_difference(model, hidden, mask, upstream, ours)
                        if kind == "disjoint" and dtype == torch.float64
                        else None,
                    )
    return found


def _finite_difference(
    model: Model,
    hidden: torch.Tensor,
    mask: torch.Tensor,
    upstream: torch.Tensor,
    at: SimpleNamespace,
) -> float:
    """Relative error of the directional derivative along a random move of router weight and input
    together.
    """
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


def top_1_softmax(device: Device, mesh: Mesh) -> SimpleNamespace:
    """A softmax over one logit is 1 whatever the logit: Megatron refuses to build it, and the
    router would learn nothing.

    Returns:
        A softmax over one expert: Megatron's refusal, and the gradients if it is built anyway.
    """
    options = SOFTMAX | {"moe_router_topk": 1}
    refusal = message_of(lambda: model_of(device, mesh, options), ValueError)
    model, weights, settings = layer_in(device, mesh, ROUTERS["softmax, top 1"], torch.float32)
    model.moe.config.moe_router_pre_softmax = settings["over_all"] = False
    rng = np.random.default_rng(4)
    hidden, upstream = (
        torch.from_numpy(rng.standard_normal((48, HIDDEN))).float() for _ in range(2)
    )
    mask = _masks(rng, live_mask(model, hidden))["random"]
    ours = routed_layer(model, hidden, mask, upstream)
    expected = oracle(hidden, weights, mask, upstream, **settings)
    return SimpleNamespace(
        refusal=refusal,
        router_gradient=float(ours.router.abs().max()),
        expected=float(expected.router.abs().max()),
        expert_gradient=float(ours.w1.abs().max()),
    )
