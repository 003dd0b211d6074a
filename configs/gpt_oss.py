"""Preset for gpt-oss. SHAPES has the sizes, for a dry run without the model."""

from dataclasses import replace

from r3.config import Config, ModelConfig, ParallelConfig
from r3.configs.qwen3_moe import qwen3_moe_30b_a3b

SHAPES = {
    "openai/gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
}


def gpt_oss_20b() -> Config:
    """gpt-oss-20b on GSM8K: 8 GPUs of 80 GB, engines of 2 ranks."""
    return replace(
        qwen3_moe_30b_a3b(),
        model=ModelConfig(path="openai/gpt-oss-20b", recompute="full"),
        # Experts with biases are whole on a rank.
        parallel=ParallelConfig(ep=8, engine_tp=2),
    )
