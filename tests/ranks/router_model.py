"""A small Megatron model with any router, for the tests of replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from r3.models.shape import ModelShape
from r3.routing import Replay, attach_replay
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
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


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPTModel (dense first layer, then MoE layers with a shared expert), its replay owner and
    its routers by layer.
    """

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
        rotary_size=8,
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


TOKENS = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7))


def forward_backward(model: Model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of packed sequences, and the gradient of every parameter for a loss that weighs all
    logits differently.
    """
    from r3.layers import packed_params

    for parameter in model.chunk.parameters():
        parameter.grad = None
    logits = model.chunk(
        TOKENS[None],
        torch.cat([torch.arange(length) for length in LENGTHS])[None],
        None,
        packed_seq_params=packed_params(np.cumsum([0, *LENGTHS]).tolist(), TOKENS.device),
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
