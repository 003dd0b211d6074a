"""Preset for Kimi-K2. SHAPES has the sizes, for a dry run without the model."""

from dataclasses import replace

from r3.config import Config, ModelConfig, ParallelConfig, RolloutConfig
from r3.configs.qwen3_moe import qwen3_moe_30b_a3b

SHAPES = {
    "moonshotai/Kimi-K2-Instruct": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    }
}


def kimi_k2() -> Config:
    """Kimi-K2 on GSM8K: 256 GPUs of 80 GB."""
    base = qwen3_moe_30b_a3b()
    return replace(
        base,
        model=ModelConfig(path="moonshotai/Kimi-K2-Instruct", recompute="full"),
        rollout=RolloutConfig(prompts_per_step=256, group_size=16, max_response_tokens=4096),
        train=replace(base.train, optimizer="streamed"),
        parallel=ParallelConfig(
            tp=8, etp=1, ep=32, pp=8, pp_layers=(8, 8, 8, 8, 8, 8, 7, 6), engine_tp=64
        ),
    )
