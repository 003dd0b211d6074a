"""DeepSeek-V3 (arXiv 2412.19437) and Moonlight: latent attention, sigmoid router with expert biases and groups.

The bias moves the choice of experts, not their gates. It is a float32 buffer, frozen here: Megatron would shift it after
every update to balance load, away from the one the engine routes with. Multi-token-prediction heads are left out.
"""

from __future__ import annotations

from typing import Any

from megatron.core.post_training.modelopt.layers import Linear

from r3.policy.families.family import (
    DENSE_MLP,
    EXPERT,
    NORMS,
    ROUTER,
    TOP,
    Family,
    Rule,
    rule,
    shared_expert,
)
from r3.policy.modules import RMSNorm


class LatentNorm(RMSNorm):
    """Norm of the compressed queries and of the compressed keys and values.

    The model's own code leaves epsilon at 1e-6 whatever rms_norm_eps is (Moonlight's is 1e-5, which vLLM uses here too: on
    latents of usual size that differs by less than bfloat16 rounds).
    """

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


LATENT_ATTENTION: dict[str, Rule] = {
    "self_attention.linear_q_proj.weight": rule("column", "self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": rule("replicated", "self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": rule("replicated", "self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": rule("column", "self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": rule(
        "replicated", "self_attn.kv_a_proj_with_mqa.weight"
    ),
    "self_attention.kv_layernorm.weight": rule("replicated", "self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": rule("column", "self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": rule("row", "self_attn.o_proj.weight"),
}


def _megatron(hf: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "kv_channels": hf.v_head_dim,
        "num_query_groups": hf.num_attention_heads,
        "rope_type": "rope",
        "rotary_base": hf.rope_parameters["rope_theta"],
        "rotary_percent": 1.0,
        "num_moe_experts": hf.n_routed_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        "moe_layer_freq": [int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    }
    if hf.topk_group < hf.n_group:
        arguments |= {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    return arguments


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    megatron=_megatron,
    layer=NORMS
    | LATENT_ATTENTION
    | DENSE_MLP
    | ROUTER
    | {"mlp.router.expert_bias": rule("replicated", "mlp.gate.e_score_correction_bias")}
    | shared_expert("mlp.shared_experts"),
    expert=EXPERT,
    top=TOP,
    attention={
        # Replicated: cut by columns, as upstream has it, k's rotary part loses its gradient's sum over tp.
        "linear_q_down_proj": Linear,
        "linear_kv_down_proj": Linear,
        "q_layernorm": LatentNorm,
        "kv_layernorm": LatentNorm,
    },
)
