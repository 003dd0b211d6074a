"""Presets for Qwen3, dense. SHAPES has the sizes, for a dry run without the model."""

from r3.config import (
    CheckpointConfig,
    Config,
    EngineConfig,
    ModelConfig,
    ReplayConfig,
    RolloutConfig,
    TrainConfig,
)
from r3.configs import gsm8k

SHAPES = {
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    }
}


def qwen3_0_6b() -> Config:
    """Qwen3-0.6B, dense, on GSM8K: one GPU of 40 GB or more, no routes to replay."""
    return Config(
        model=ModelConfig(path="Qwen/Qwen3-0.6B", recompute="full"),
        data=gsm8k.DATA,
        rollout=RolloutConfig(prompts_per_step=64, group_size=8, max_response_tokens=2048),
        train=TrainConfig(steps=200, lr=2e-6, warmup_updates=10, micro_batch_tokens=8192),
        # Takes turns with the policy: its weights are 1.1 GiB, the rest of the half is KV cache.
        engine=EngineConfig(memory_fraction=0.5, max_num_seqs=512),
        replay=ReplayConfig(mode="off"),
        eval=gsm8k.EVAL,
        checkpoint=CheckpointConfig(every=50),
    )
