"""Qwen2, dense and Mixture-of-Experts (arXiv 2407.10671): biases on q, k and v; a gated expert that sees every token."""

from __future__ import annotations

from typing import Any

from r3.policy.families.family import (
    ATTENTION,
    DENSE_MLP,
    EXPERT,
    NORMS,
    QKV_BIAS,
    ROUTER,
    TOP,
    Family,
    rule,
    shared_expert,
    softmax_router,
    sparse_layers,
)


def _dense(_hf: Any) -> dict[str, Any]:
    return {"add_qkv_bias": True}


def _moe(hf: Any) -> dict[str, Any]:
    return {
        "add_qkv_bias": hf.qkv_bias,
        "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
        **softmax_router(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            norm_topk_prob=hf.norm_topk_prob,
        ),
        **sparse_layers(hf),
    }


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    megatron=_dense,
    layer=NORMS | ATTENTION | QKV_BIAS | DENSE_MLP,
    expert={},
    top=TOP,
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    megatron=_moe,
    layer=NORMS
    | ATTENTION
    | QKV_BIAS
    | DENSE_MLP
    | ROUTER
    | shared_expert("mlp.shared_expert")
    | {"mlp.shared_experts.gate_weight": rule("replicated", "mlp.shared_expert_gate.weight")},
    expert=EXPERT,
    top=TOP,
)
