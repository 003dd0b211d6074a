"""Preset for the text model of Qwen3.5. SHAPES has the sizes, for a dry run without the model."""

from dataclasses import replace

from r3.config import Config, ModelConfig, ParallelConfig
from r3.configs.qwen3_moe import qwen3_30b_a3b_lora, qwen3_moe_30b_a3b

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
    base = qwen3_moe_30b_a3b()
    return replace(
        base,
        model=ModelConfig(path="Qwen/Qwen3.5-35B-A3B", recompute="full"),
        # Gated delta layers are whole on every rank: beside them no optimizer fits.
        train=replace(base.train, optimizer="streamed"),
        parallel=ParallelConfig(ep=8, engine_tp=4),
    )


def qwen3_5_35b_a3b_lora() -> Config:
    """Qwen3.5-35B-A3B (its text model) with LoRA on GSM8K: 2 GPUs of 80 GB, by the plan."""
    # `--parallel.ep 1 --parallel.engine_tp 1` is for one GPU of 141 GB.
    base = qwen3_30b_a3b_lora()
    return replace(
        base,
        # Policy and engine do not fit beside each other in bfloat16.
        model=ModelConfig(path="Qwen/Qwen3.5-35B-A3B", base="int8", recompute="full"),
        engine=replace(base.engine, memory_fraction=0.6),
    )
