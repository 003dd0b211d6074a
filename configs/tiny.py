"""Presets for the embedded model: they run on any machine, nothing to download."""

from dataclasses import replace

from r3 import assets
from r3.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    ReplayConfig,
    RolloutConfig,
    TrainConfig,
)


def tiny() -> Config:
    """The demo: a 1 M parameter Qwen3-MoE learns to write its steps; two CPU ranks, a minute."""
    # Its routers are close to ties: in bfloat16 the engine often chooses other experts than the
    # policy would. `launch/local.sh tiny --replay.mode off --log.dir runs/tiny-off` trains the same
    # with live routes; `make compare` does both.
    return Config(
        # bfloat16 in engine and policy, as in large runs. The output layer is float32: rounded
        # logits would double the mismatch with replay (k3 4.5e-5 instead of 2.4e-5 with tiny-moe).
        model=ModelConfig(path=str(assets.TINY_MOE_TIES), dtype="bfloat16", fp32_head=True),
        data=DataConfig(path=(str(assets.WORD_PROBLEMS_TRAIN),)),
        # The longest response with steps has about 30 tokens.
        rollout=RolloutConfig(prompts_per_step=16, group_size=8, max_response_tokens=40),
        # Large for RL: with 1e-6, common for large models, the curve would take hours.
        train=TrainConfig(steps=25, lr=2e-4, micro_batch_tokens=4096),
        # Two ranks with half of the experts each, so that tokens cross ranks. `--parallel.ep 1`
        # runs on one.
        parallel=ParallelConfig(ep=2),
        # Steps of a few thousand tokens: a larger sample than by default, for a steady figure.
        replay=ReplayConfig(shadow_frac=0.3),
        engine=EngineConfig(dtype="bfloat16", kv_cache_gib=0.0625, max_num_seqs=128),
        eval=EvalConfig(path=(str(assets.WORD_PROBLEMS_EVAL),), every=5),
        checkpoint=CheckpointConfig(every=10),
    )


def tiny_smoke() -> Config:
    """A short run for tests: six steps at a higher learning rate, no near ties, float32."""
    base = tiny()
    return replace(
        base,
        # With float32 in engine and policy the mismatch is rounding alone, 1e-6.
        model=ModelConfig(path=str(assets.TINY_MOE), dtype="float32"),
        train=replace(base.train, steps=6, lr=5e-4),
        engine=replace(base.engine, dtype="float32"),
        eval=replace(base.eval, every=0),
    )


def tiny_tools() -> Config:
    """A second embedded model learns to call a calculator: several turns, two CPU ranks."""
    base = tiny()
    return replace(
        base,
        model=ModelConfig(path=str(assets.TINY_MOE_TOOLS), dtype="float32"),
        engine=replace(base.engine, dtype="float32"),
        # The longest useful conversation has four calls and the answer: 84 tokens, at most 60 of
        # them sampled.
        env=EnvConfig(name="calculator", max_turns=6, max_turn_tokens=14),
        rollout=replace(base.rollout, max_response_tokens=112),
        train=replace(base.train, steps=15),
    )
