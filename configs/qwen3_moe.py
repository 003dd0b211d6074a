"""Presets for Qwen3-MoE. SHAPES has the sizes, for a dry run without the model."""

from dataclasses import replace

from r3.config import (
    AlgoConfig,
    CheckpointConfig,
    Config,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from r3.configs import gsm8k

SHAPES = {
    "Qwen/Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
}


def qwen3_moe_30b_a3b() -> Config:
    """Qwen3-30B-A3B on GSM8K: 8 GPUs of 141 GB, experts sharded over all of them."""
    return Config(
        # Activations of 48 layers with 8 experts per token do not fit beside the optimizer. They
        # are recomputed, with the routes replayed.
        model=ModelConfig(path="Qwen/Qwen3-30B-A3B", recompute="full"),
        data=gsm8k.DATA,
        rollout=RolloutConfig(prompts_per_step=128, group_size=16, max_response_tokens=4096),
        # Weights of min(pi_old / mu, 2) correct the mismatch that replay leaves.
        algo=AlgoConfig(correction="token_tis"),
        # Two updates per step: the second is off-policy, where clipping and replay matter most.
        train=TrainConfig(
            steps=200, lr=1e-6, warmup_updates=10, updates_per_step=2, micro_batch_tokens=8192
        ),
        parallel=ParallelConfig(ep=8),
        # Weights are 57 GiB, so about 30 GiB are left for the KV cache. The policy's weights stay
        # in memory too.
        engine=EngineConfig(memory_fraction=0.7, max_num_seqs=256),
        eval=gsm8k.EVAL,
        checkpoint=CheckpointConfig(every=50),
    )


def qwen3_moe_30b_80gb() -> Config:
    """The same on 8 GPUs of 80 GB, by the plan: attention over 4 ranks, engines of 4 ranks."""
    base = qwen3_moe_30b_a3b()
    return replace(
        base,
        # The optimizer's 43 GiB per rank stay the same under every layout. Weights and gradients of
        # attention and vocabulary are divided by 4; experts are whole, 16 per rank.
        parallel=ParallelConfig(tp=4, etp=1, ep=8, engine_tp=4),
        # A quarter of the engine's weights leaves 40 GiB of KV cache per rank.
        engine=EngineConfig(memory_fraction=0.7, max_num_seqs=512),
    )


def qwen3_30b_a3b_lora() -> Config:
    """Qwen3-30B-A3B with LoRA on GSM8K: 2 GPUs of 80 GB, by the plan."""
    # `--parallel.ep 1 --parallel.engine_tp 1` is for one GPU of 141 GB.
    base = qwen3_moe_30b_a3b()
    return replace(
        base,
        # 32 / 8 experts per token: as many adapted dimensions per token as elsewhere.
        lora=LoraConfig(rank=32, expert_rank=4),
        # Ten times what is common for full training (docs/lora.md).
        train=replace(base.train, lr=1e-5),
        rollout=replace(base.rollout, prompts_per_step=64, group_size=8),
        parallel=ParallelConfig(ep=2, engine_tp=2),
        engine=EngineConfig(memory_fraction=0.5, max_num_seqs=128),
    )
