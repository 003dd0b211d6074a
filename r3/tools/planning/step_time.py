"""Seconds per phase of a step, estimated as work over the peak rates of a device.

What one H100 reaches in training a MoE model, and of its link to the host, was measured. The rest,
and everything between devices, is assumed: use the seconds to rank layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from r3.config import Config
from r3.models.shape import BYTES_OF, ModelShape
from r3.tools.planning.memory_plan import (
    memory,
    optimizer_bytes,
    params_per_rank,
    sequence_bytes,
    teacher_bytes,
)

RANKS_PER_MACHINE = 8


@dataclass(frozen=True)
class Gpu:
    """Memory and peak rates of a GPU, from its vendor's data sheet.

    Attributes:
        name: whose rates these are.
        gib: device memory.
        tflops: dense bfloat16 arithmetic, 1e12 per second.
        memory_gbs: device memory, 1e9 bytes per second.
        link_gbs: to other devices of the machine, one direction.
        host_gbs: to host memory, one direction.
        network_gbs: to other machines, per device, one direction.
    """

    name: str
    gib: float
    tflops: float
    memory_gbs: float
    link_gbs: float
    host_gbs: float
    network_gbs: float


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 40, 312, 1555, 300, 32, 25),
        Gpu("a100-80", 80, 312, 2039, 300, 32, 25),
        Gpu("h100", 80, 989, 3350, 450, 64, 50),
        Gpu("h200", 141, 989, 4800, 450, 64, 50),
        Gpu("b200", 180, 2250, 8000, 900, 64, 50),
    )
}
DEFAULT_GPU = GPUS["h100"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a device's peak rates.

    Attributes:
        moe_training: measured on one H100: 79,700 tokens/s forward and backward of six layers of
            Qwen3-30B-A3B, micro-batches of 16k tokens, output layer in bfloat16. The experts alone
            reach 0.44 (431 TFLOP/s).
        host: measured there: 51 GiB/s each way, registered memory.
        dense_training: assumed, as the others.
        scoring: of a forward pass alone, relative to training.
        decoding: of memory bandwidth.
        links: of links between devices and of the network.
    """

    moe_training: float = 0.33
    host: float = 0.85
    dense_training: float = 0.35
    scoring: float = 1.3
    decoding: float = 0.5
    links: float = 0.5

    def __str__(self) -> str:
        return (
            f"Measured on one H100: training of MoE models {self.moe_training:.0%} of peak "
            f"arithmetic, link to the host {self.host:.0%}. Assumed, not measured: dense models "
            f"{self.dense_training:.0%}, decoding {self.decoding:.0%} of memory bandwidth, links "
            f"{self.links:.0%}."
        )


EFFICIENCY = Efficiency()
_REDUCE_S = 15e-6  # latency of one all-reduce of an engine


def step_seconds(config: Config, shape: ModelShape, world_size: int, gpu: Gpu) -> dict[str, float]:
    """Phase -> seconds of one step whose prompts and responses all have their maximum length."""
    train = train_seconds(config, shape, world_size, gpu)
    if config.train.objective == "sft":  # nothing is generated, and nothing put away
        return {"train": train}
    return {
        "generate": generate_seconds(config, shape, world_size, gpu),
        "train": train,
        "sync": sync_seconds(config, shape, world_size, gpu),
        "offload": offload_seconds(config, shape, world_size, gpu),
    }


def offload_seconds(config: Config, shape: ModelShape, world_size: int, gpu: Gpu) -> float:
    """Seconds to take the optimizer's state to the host and back, as often as it goes."""
    often = {"kept": 0, "resident": 1, "streamed": config.train.updates_of_step}
    times = often[config.train.optimizer]
    moved = 2 * times * optimizer_bytes(config, shape, world_size)
    return moved / _per_s(gpu.host_gbs, EFFICIENCY.host)


def _per_s(gbs: float, share: float = EFFICIENCY.links) -> float:
    """Bytes per second that are reached of a link's peak."""
    return gbs * 1e9 * share


def active_params(shape: ModelShape) -> float:
    """Parameters that one token is multiplied with: all but the embedding and unchosen experts."""
    unchosen = shape.num_expert_params * (1 - shape.topk / (shape.num_experts or 1))
    embedding = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    return shape.num_params - unchosen - embedding


def forward_flops(shape: ModelShape, tokens: float) -> float:
    """Operations per token of a forward pass over a sequence of `tokens`.

    2 per active parameter; 2 * tokens * query width per layer for causal attention.
    """
    attention = 2 * tokens * shape.num_heads * shape.head_dim * shape.num_layers
    return 2 * active_params(shape) + attention


def generate_seconds(config: Config, shape: ModelShape, world_size: int, gpu: Gpu) -> float:
    """Seconds to decode all responses, conversations in flight as the KV cache allows.

    One token of S conversations reads the weights once (of the experts, those that S tokens choose
    if they choose at random) and S half-filled caches, or takes 2 operations per active parameter
    and token, whichever is slower. An engine of several ranks adds two all-reduces per layer.
    """
    tp, rollout = config.parallel.engine_tp, config.rollout
    cache = memory(config, shape, world_size, gpu.gib)["GENERATE"]["KV cache"]
    longest = config.longest_sequence(shape.max_position_embeddings)
    half_filled = 1 - rollout.max_response_tokens / longest / 2
    rollouts = rollout.prompts_per_step * rollout.group_size * tp / world_size
    per_sequence = sequence_bytes(config, shape) * half_filled
    in_flight = min(rollouts, config.engine.max_num_seqs, max(1.0, cache // per_sequence))
    idle = (1 - shape.topk / shape.num_experts) ** in_flight if shape.num_experts else 0.0
    read = (shape.num_params - shape.num_expert_params * idle) * BYTES_OF[config.engine.dtype] / tp
    read += in_flight * per_sequence
    token_s = max(
        read / (gpu.memory_gbs * 1e9 * EFFICIENCY.decoding),
        2 * active_params(shape) * in_flight / tp / (gpu.tflops * 1e12 * EFFICIENCY.decoding),
    )
    token_s += 2 * shape.num_layers * _REDUCE_S * (tp > 1)
    return rollout.max_response_tokens * math.ceil(rollouts / in_flight) * token_s


def passes(config: Config, shape: ModelShape) -> tuple[float, float]:
    """(forward passes without gradients, cost of an update in forward passes) per token.

    See `r3.policy.updates.train_on` for the first. An update is a forward and a backward of twice
    its cost, and what is recomputed: all, the MoE layers' share of the parameters, or attention's
    share of the operations at the longest sequence. Each epoch updates all tokens.
    """
    algo, updates = config.algo, config.train.updates_per_step
    mode = config.replay.mode if shape.moe_layers else "off"
    if mode == "r2" or (algo.kl_coef and algo.kl_in == "reward"):
        scored = 1.0
    else:
        scored = 0.0 if algo.correction == "bypass" else (updates - 1) / updates
    routed = shape.num_expert_params * shape.topk / (shape.num_experts or 1)
    attention = 1 - forward_flops(shape, 0) / forward_flops(
        shape, config.longest_sequence(shape.max_position_embeddings)
    )
    again = {
        "none": 0.0,
        "selective": attention,
        "moe": routed / active_params(shape),
        "full": 1.0,
    }
    # A teacher counts as much as its weights are larger than the policy's.
    own = sum(params_per_rank(config, shape)) * BYTES_OF[config.model.dtype]
    for path in dict.fromkeys(algo.teacher):
        scored += teacher_bytes(config, path) / own
    once = 3 + again[config.model.recompute]
    return scored + bool(algo.kl_coef), once * config.train.epochs_per_step


def train_seconds(config: Config, shape: ModelShape, world_size: int, gpu: Gpu) -> float:
    """Seconds of all passes and updates of a step.

    Arithmetic is spread over all ranks. Added to it, without overlap: sequence parallelism (4
    exchanges of the hidden states per layer and pass), dispatch of tokens to experts (2), keys and
    values of context parallelism, gradients and new weights of data parallelism, the pipeline's
    bubble, and its wait for the last stage.
    """
    parallel, size = config.parallel, BYTES_OF[config.model.dtype]
    tp, cp, pp, etp = parallel.tp, parallel.cp, parallel.pp, parallel.etp or parallel.tp
    longest = config.longest_sequence(shape.max_position_embeddings)
    tokens = config.rollout.prompts_per_step * config.rollout.group_size * longest
    scored, updated = passes(config, shape)
    training = EFFICIENCY.moe_training if shape.moe_layers else EFFICIENCY.dense_training
    flops = tokens * forward_flops(shape, longest) / world_size
    peak = gpu.tflops * 1e12 * training
    arithmetic = flops * (scored / EFFICIENCY.scoring + updated) / peak
    # The last stage has the output layer too, and the others wait for it.
    head = shape.vocab_size * shape.hidden_size / active_params(shape)
    arithmetic *= 1 + (pp - 1) * head

    def link(ranks: int) -> float:
        inside = ranks <= RANKS_PER_MACHINE
        return _per_s(gpu.link_gbs if inside else gpu.network_gbs)

    # Hidden states and keys that a rank exchanges in one pass. A backward exchanges as much.
    rank_tokens = tokens * tp * cp * pp / world_size / cp
    hidden = rank_tokens * shape.hidden_size * size / pp
    keys = 2 * shape.num_kv_heads * shape.head_dim / shape.hidden_size
    exchange = shape.num_layers * hidden * 4 * (tp - 1) / tp / link(tp)
    exchange += shape.num_layers * hidden * keys * (cp - 1) / link(tp * cp)
    experts = etp * parallel.ep
    moe = len(shape.moe_layers) * hidden / tp * shape.topk
    exchange += moe * 2 * (1 - 1 / experts) / link(experts)
    again = config.model.recompute in ("moe", "full")
    exchange *= scored + (2 + again) * config.train.epochs_per_step

    stage_ranks = world_size // pp
    own = sum(params_per_rank(config, shape))
    reduced = config.train.updates_of_step * own * (4 + size) / link(stage_ranks)
    micro_batches = tokens * tp * cp * pp / world_size / config.train.micro_batch_tokens
    micro_batches = max(1.0, micro_batches / config.train.updates_per_step)
    bubble = 1 + (pp - 1) / (micro_batches * parallel.vpp)
    return (arithmetic + exchange) * bubble + reduced * (stage_ranks > tp * cp or experts > 1)


def sync_seconds(config: Config, shape: ModelShape, world_size: int, gpu: Gpu) -> float:
    """Seconds to bring the full model to every engine: a rank reads its part of the engine's.

    Shards of other ranks come over the machine's links; with more machines than replicas of the
    policy, over the network.
    """
    parts = shape.num_params * BYTES_OF[config.model.dtype] / config.parallel.engine_tp
    replicas = world_size / max(1, config.parallel.smallest_world)
    machines = world_size / RANKS_PER_MACHINE
    return parts / _per_s(gpu.link_gbs if machines <= max(1, replicas) else gpu.network_gbs)
