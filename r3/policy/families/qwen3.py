"""Qwen3, dense and Mixture-of-Experts (arXiv 2505.09388): q/k normalisation, softmax router, no shared expert."""

from __future__ import annotations

from typing import Any

from r3.policy.families.family import (
    ATTENTION,
    DENSE_MLP,
    EXPERT,
    NORMS,
    QK_NORM,
    ROUTER,
    TOP,
    Family,
    softmax_router,
    sparse_layers,
)


def _dense(_hf: Any) -> dict[str, Any]:
    return {"qk_layernorm": True}


def _moe(hf: Any) -> dict[str, Any]:
    return {
        "qk_layernorm": True,
        **softmax_router(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            norm_topk_prob=hf.norm_topk_prob,
        ),
        **sparse_layers(hf),
    }


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    megatron=_dense,
    layer=NORMS | ATTENTION | QK_NORM | DENSE_MLP,
    expert={},
    top=TOP,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    megatron=_moe,
    layer=NORMS | ATTENTION | QK_NORM | DENSE_MLP | ROUTER,
    expert=EXPERT,
    top=TOP,
)
