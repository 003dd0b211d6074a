"""Settings of the model: weights, adapters, layout over the ranks, and the engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from r3.config.fields import setting
from r3.errors import ConfigError, Problem
from r3.models.hub import is_hub

if TYPE_CHECKING:
    from r3.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The initial policy."""

    path: str = setting("", path=True)
    """Folder of a Hugging Face checkpoint (config.json, *.safetensors, and a tokenizer with a chat
    template), or hub:OWNER/NAME[@REVISION] for a model of the hub, which a start downloads."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights in training. Router scores, softmax and loss are always float32."""
    base: Literal["dtype", "int8", "fp8"] = "dtype"
    """How the device stores the matrices of decoder layers that LoRA leaves frozen. dtype: in
    model.dtype. int8, fp8: one byte per value and a factor per 128 values. A layer is dequantised
    and merged with its adapters when a pass comes to it; the engine gets the same bits."""
    experts: Literal["auto", "fused", "grouped", "sequential"] = setting("auto", needs="moe")
    """How experts run in training. fused: R3's own dispatch, with a loop that stays in the
    processor's cache on CPU, and grouped products and Triton kernels on CUDA. grouped: Megatron's
    dispatch and grouped products. sequential: Megatron's dispatch and loop. auto: fused if
    parallel.etp is 1, else grouped."""
    recompute: Literal["none", "selective", "moe", "full"] = setting(
        "none", resume=True, needs="training"
    )
    """Activations recomputed in the backward pass: none; selective: what is cheap to compute
    (norms, the experts' activations, the core of attention); those of the MoE layers; or all.
    Routes are replayed in the recomputation too."""
    fp32_head: bool = setting(False, needs="rounding")
    """Multiply hidden states and output weight in float32, in policy and engine; bfloat16 rounds
    every logit. Costs a float32 copy of the output weight in the policy's backward pass, which is
    several times slower on CUDA."""
    router_logits: Literal["float32", "engine"] = setting("float32", needs="moe rounded_router")
    """Precision of the policy's router logits. float32: as computed. engine: rounded to
    engine.dtype, as vLLM computes them. Replayed routes keep gate weights that differ by this
    rounding."""

    def shape(self) -> ModelShape:
        """Read the shape of the checkpoint; errors as in `ModelShape.read`."""
        from r3.models.shape import ModelShape  # takes longer than all else about settings

        return ModelShape.read(self.path)

    @property
    def is_relative(self) -> bool:
        """Whether it names a folder from the working folder."""
        return not is_hub(self.path) and not Path(self.path).is_absolute()

    def problem(self, rule: str, fix: str) -> Problem:
        """A problem with the checkpoint."""
        return Problem("model.path", self.path, rule, fix)


def model_problem(path: str | Path, rule: str, fix: str) -> ConfigError:
    """The error of a model's tokenizer or chat template."""
    return ConfigError([ModelConfig(path=str(path)).problem(rule, fix)])


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: W + scale * B A replaces W; A and B are trained (arXiv 2106.09685)."""

    rank: int = setting(0, ge=0, fix="16; 0 trains all parameters")
    """Rank of the adapters. The other parameters keep their initial values. 0: no adapters, all
    parameters are trained."""
    alpha: float = setting(32.0, gt=0, fix="32")
    """The product B A is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    targets: tuple[Literal["attention", "experts", "shared", "dense", "router", "head"], ...] = (
        "attention",
        "experts",
        "shared",
        "dense",
    )
    """Matrices with adapters, of those that the model has: projections of attention, experts,
    shared experts, MLPs of dense layers, routers, output layer."""
    expert_rank: int = setting(
        0, ge=0, fix="0 takes lora.rank", needs="lora.rank lora.targets=experts moe"
    )
    """Rank of the adapters of experts. 0: lora.rank. lora.rank divided by the experts per token
    gives a token as many adapted dimensions as elsewhere."""
    start: str = setting("", path=True)
    """Folder of a PEFT adapter of the same model, ranks and targets to start from; the reference
    policy has it too. Empty: B starts at 0."""
    dropout: float = setting(
        0.0,
        ge=0,
        le=0,
        why="the engine samples without it, so probabilities would not match",
        fix="0",
    )
    """Dropout of adapters, which R3 does not have."""

    def rank_of(self, target: str) -> int:
        """Rank of the adapters of a target."""
        return (self.expert_rank if target == "experts" else 0) or self.rank

    def scale(self, rank: int) -> float:
        """What the product of adapters of a rank is multiplied by."""
        return self.alpha / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How policy and engine are sharded over the ranks. The remaining factor is data parallel."""

    tp: int = setting(1, ge=1)
    """Tensor parallel size."""
    ep: int = setting(1, ge=1)
    """Expert parallel size."""
    etp: int = setting(0, ge=0)
    """Tensor parallel size inside experts. 0: same as tp."""
    pp: int = setting(1, ge=1)
    """Pipeline parallel size."""
    vpp: int = setting(1, ge=1)
    """Model chunks per pipeline stage. Above 1 Megatron's interleaved schedule runs, with smaller
    bubbles."""
    pp_layers: tuple[int, ...] = ()
    """Layers of each of the pp * vpp chunks, in the order of the model. Empty: equal sizes, or one
    layer more in the first chunks."""
    cp: int = setting(1, ge=1)
    """Context parallel size."""
    engine_tp: int = setting(1, ge=1, needs="sampling")
    """Tensor parallel size of the engine."""

    @property
    def experts_tp(self) -> int:
        """Tensor-parallel ranks of experts."""
        return self.etp or self.tp

    @property
    def megatron(self) -> dict[str, int]:
        """The layout of the policy under Megatron's names."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.experts_tp,
        }

    @property
    def expert_shards(self) -> int:
        """Parts that the experts of a layer are divided into."""
        return self.experts_tp * self.ep

    @property
    def in_words(self) -> str:
        """The sizes of the policy in one line."""
        return f"tp {self.tp} ep {self.ep} pp {self.pp} cp {self.cp}"

    def engines(self, world_size: int) -> int:
        """Number of engines."""
        return world_size // self.engine_tp

    def data_ranks(self, world_size: int) -> int:
        """Ranks that train on different rollouts."""
        return world_size // (self.tp * self.cp * self.pp)

    def replicas(self, world_size: int) -> tuple[int, int]:
        """Ranks with the same dense parameters, and ranks with the same experts."""
        of_stage = world_size // self.pp
        return of_stage // self.tp, max(1, of_stage // self.expert_shards)

    def place(self, rank: int, world_size: int) -> dict[str, int]:
        """Number of a rank on every axis, in Megatron's order.

        tp varies fastest, then cp, dp, pp; for experts etp, ep, expert_dp, pp.
        """
        stage, within = divmod(rank, world_size // self.pp)
        return {
            "pp": stage,
            "dp": within // (self.tp * self.cp),
            "cp": within // self.tp % self.cp,
            "tp": within % self.tp,
            "expert_dp": within // self.expert_shards,
            "ep": within // self.experts_tp % self.ep,
            "etp": within % self.experts_tp,
            "engine": rank // self.engine_tp,
        }

    def stages(self, num_layers: int) -> list[tuple[range, ...]]:
        """The layers of every chunk of every pipeline stage; errors as in `pieces`."""
        pieces = self.pieces(num_layers)
        return [pieces[stage :: self.pp] for stage in range(self.pp)]

    def pieces(self, num_layers: int) -> tuple[range, ...]:
        """Layers of the pp * vpp chunks of the pipeline; chunk i is on stage i % pp.

        Without `pp_layers` the first chunks have one layer more where sizes cannot be equal: the
        last chunk has the output layer.

        Args:
            num_layers: decoder layers of the model.

        Returns:
            One range of layer numbers per chunk, in the order of the model.

        Raises:
            ValueError: `pp_layers` does not fit the model.
        """
        count = self.pp * self.vpp
        least, rest = divmod(num_layers, count)
        sizes = self.pp_layers or tuple(least + (i < rest) for i in range(count))
        if len(sizes) != count or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"{sizes} are not {count} positive numbers that add up to {num_layers} layers"
            )
        ends = list(accumulate(sizes))
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @property
    def smallest_world(self) -> int:
        """Fewest ranks that these sizes fit on."""
        return max(1, lcm(self.tp * self.cp, self.expert_shards) * self.pp)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The vLLM engine inside every rank."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the engine's weights and arithmetic."""
    kv_cache_gib: float = setting(
        0.0, ge=0, le=100_000, fix="0 takes what the device has free", resume=True
    )
    """Size of the KV cache in GiB. 0: what memory_fraction leaves (GPU only)."""
    memory_fraction: float = setting(
        0.6, gt=0, lt=1, resume=True, needs="sampling engine.kv_cache_gib=0.0"
    )
    """Fraction of device memory for weights and KV cache when kv_cache_gib is 0 (GPU only)."""
    max_num_seqs: int = setting(256, ge=1, le=8192, resume=True)
    """Maximum conversations decoded at the same time."""
    max_model_len: int = setting(0, ge=0)
    """Maximum tokens per conversation. 0: what prompts and rollout.max_response_tokens need, at
    most the context of the model."""
    sleep_level: Literal[1, 2] = setting(2, resume=True)
    """GPU only, while the policy trains. 1: the engine's weights move to host memory. 2: they are
    dropped, and the next weight sync restores them."""
    async_scheduling: bool = setting(True, resume=True)
    """Let vLLM prepare the next batch while one runs, where it can. Switch it off to find out
    whether it causes a problem."""
