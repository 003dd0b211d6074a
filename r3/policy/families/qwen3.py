"""Qwen3, dense and Mixture-of-Experts (arXiv 2505.09388): q/k normalisation, softmax router, no shared expert."""

from __future__ import annotations

from typing import Any

from r3.policy.families.family import ATTENTION, DENSE_MLP, EXPERT, NORMS, QK_NORM, ROUTER, TOP, Family


def _dense(_hf: Any) -> dict[str, Any]:
    return {"qk_layernorm": True}


def _moe(hf: Any) -> dict[str, Any]:
    routed = [
        int(layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0)
        for layer in range(hf.num_hidden_layers)
    ]
    arguments: dict[str, Any] = {
        "qk_layernorm": True,
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        # Renormalising the top k after a softmax over all experts is a softmax over the k logits.
        "moe_router_pre_softmax": not hf.norm_topk_prob,
    }
    if not all(routed):
        arguments["moe_layer_freq"] = routed
    return arguments


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
