"""Preset for the text model of Qwen3.5. SHAPES has the sizes, for a dry run without the model."""

from r3.config import (
    AlgoConfig,
    CheckpointConfig,
    Config,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from r3.configs import gsm8k

SHAPES = {
    "Qwen/Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 2048,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "moe_intermediate_size": 512,
            "mtp_num_hidden_layers": 1,
            "num_attention_heads": 16,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            },
            "shared_expert_intermediate_size": 512,
            "vocab_size": 248320,
        },
    }
}


def qwen3_5_35b_a3b() -> Config:
    """Qwen3.5-35B-A3B (its text model) on GSM8K: 8 GPUs of 80 GB, engines of 4 ranks."""
    return Config(
        model=ModelConfig(path="Qwen/Qwen3.5-35B-A3B", recompute="full"),
        data=gsm8k.DATA,
        rollout=RolloutConfig(prompts_per_step=128, group_size=16, max_response_tokens=4096),
        algo=AlgoConfig(correction="token_tis"),
        train=TrainConfig(
            steps=200,
            lr=1e-6,
            warmup_updates=10,
            updates_per_step=2,
            micro_batch_tokens=8192,
            # Gated delta layers are whole on every rank: beside them no optimizer fits.
            optimizer="streamed",
        ),
        parallel=ParallelConfig(ep=8, engine_tp=4),
        engine=EngineConfig(memory_fraction=0.7, max_num_seqs=256),
        eval=gsm8k.EVAL,
        checkpoint=CheckpointConfig(every=50),
    )
