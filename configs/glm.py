"""Presets for GLM. SHAPES has the sizes, for a dry run without the model."""

from dataclasses import replace
from typing import Any

from r3.config import Config, ModelConfig, ParallelConfig, RolloutConfig
from r3.configs.qwen3_moe import qwen3_moe_30b_a3b

_ROUTER: dict[str, Any] = {
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "zai-org/GLM-4.5-Air": {
        **_ROUTER,
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "zai-org/GLM-4.7-Flash": {
        **_ROUTER,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
}


def glm_4_7_flash() -> Config:
    """GLM-4.7-Flash on GSM8K: 8 GPUs of 80 GB, attention over 4 ranks, engines of 4 ranks."""
    return replace(
        qwen3_moe_30b_a3b(),
        model=ModelConfig(path="zai-org/GLM-4.7-Flash", recompute="full"),
        parallel=ParallelConfig(tp=4, etp=1, ep=8, engine_tp=4),
    )


def glm_4_5_air() -> Config:
    """GLM-4.5-Air on GSM8K: 32 GPUs of 80 GB, attention over 8 ranks, engines of 8 ranks."""
    return replace(
        qwen3_moe_30b_a3b(),
        model=ModelConfig(path="zai-org/GLM-4.5-Air", recompute="full"),
        rollout=RolloutConfig(prompts_per_step=256, group_size=16, max_response_tokens=4096),
        parallel=ParallelConfig(tp=8, etp=1, ep=32, engine_tp=8),
    )
