"""The memory that a run needs per phase, estimated from sizes before it is launched.

Fragmentation and unbalanced routing come on top (`RESERVE`). Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from r3 import extras
from r3.config import Config
from r3.models.files import checkpoint_tensors
from r3.models.shape import BYTES_OF, ModelShape, ShapeError
from r3.tools.planning.parameters import (
    adapted_per_rank,
    largest_shard,
    largest_tensor,
    params_per_rank,
    quantised_per_rank,
    route_bytes_per_token,
    stacked_experts,
    trained_per_rank,
)
from r3.tools.rows.sources import bytes_of

GIB = 2**30
PHASES = ("SYNC", "GENERATE", "TRAIN", "OPTIMIZER", "SAVE")
"""Weight sync; generation; forward and backward passes; optimizer step; writing a checkpoint."""

RESERVE = 0.05
"""Share of a device that a plan leaves free, for fragmentation and unbalanced routing."""

# Of the frameworks, on a GPU. Known from use of the same libraries; not measured with R3.
CONTEXT_BYTES = int(0.6 * GIB)  # CUDA context with its kernels, workspaces of cuBLAS
COMMUNICATOR_BYTES = int(0.35 * GIB)  # buffers of one NCCL communicator
CUDA_GRAPH_BYTES = int(1.0 * GIB)  # graphs of vLLM, which stay while it sleeps
PROCESS_BYTES = int(3.0 * GIB)  # host memory of Python with torch, vLLM and CUDA libraries

ROW_BYTES = 4  # per byte of a file of rows of 1 KB and tokens of 4 bytes (docs/data.md)

GATHERED_BYTES = 2 * 4 * (1 << 24)  # pieces of all ranks with the same parameters, and its own

STREAMED_VALUES = 1 << 25  # parameters of a part of a streamed optimizer

CERTAIN = (
    *("policy weights", "gradients", "optimizer"),
    *("engine weights", "reward model", "KV cache"),
)
"""Parts whose size is certain. A device that is smaller than these cannot work."""

HOST_CERTAIN = ("optimizer", "reference policy", "base weights", "engine weights")
"""The same of host memory. What a checkpoint needs depends on the ranks that write it."""


def activation_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """Bytes per packed token at the peak of a pass, between forward and backward.

    Routing is taken as balanced, and experts as grouped (fused ones keep less). The table lists
    what autograd keeps, with b bytes per value, D the hidden size, q and k the query and key
    widths, h the width of a head, F the feed-forward width (of an expert), and S the width of the
    shared experts:

        norm        2 b D                          input and output
        attention   norm + b (q + 2 k)             projected q, k, v
                    b (q + k + 4 r + 2 q)          rotated q and k; sines and cosines of latent
                                                   attention's r rotated values; output twice
        dense MLP   norm + 4 b F                   gate and up, silu of gate, product
        MoE         norm + b K (D + 5 F) + 4 b S   tokens sorted by expert; gate, up, silu, products
                    9 E + 24 K                     scores and choices of the router
        backward    b (2 D + K (D + 4 F))          gradients inside one layer

    recompute none keeps all layers. selective keeps b D of a norm, the output of attention once,
    and K 2 F of the experts' 5; one norm and K 3 F are computed again at a time. moe keeps all but
    the insides of the MoE layers, and one of those. full keeps b D per layer and one whole layer.
    `head_bytes` has the output layer.
    """
    size, recompute = BYTES_OF[config.model.dtype], config.model.recompute
    selective = recompute == "selective"
    hidden, rotated = shape.hidden_size, shape.latent.rope_size if shape.latent else 0
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    whole_norm = 2 * size * hidden
    norm = size * hidden if selective else whole_norm
    attention = norm + size * (queries + 2 * keys)
    attention += size * ((2 if selective else 3) * queries + keys + 4 * rotated)
    dense = norm + 4 * size * shape.ffn_size
    routed = shape.topk * (hidden + (2 if selective else 5) * shape.moe_ffn_size)
    experts = (
        size * (routed + 4 * shape.shared_ffn_size) + 9 * shape.num_experts + 24 * shape.topk
        if shape.moe_layers
        else 0
    )
    num_moe = len(shape.moe_layers)
    num_dense = shape.num_layers - num_moe
    largest = max([norm + experts] * bool(num_moe) + [dense] * bool(num_dense))
    widest = max(
        shape.topk * (hidden + 4 * shape.moe_ffn_size), 3 * shape.ffn_size * bool(num_dense)
    )
    backward = size * (2 * hidden + widest)
    if selective:
        backward += whole_norm + size * 3 * shape.topk * shape.moe_ffn_size * bool(num_moe)
    if recompute == "full":
        kept = shape.num_layers * size * hidden + attention + largest
    else:
        layers = min(num_moe, 1) if recompute == "moe" else num_moe
        kept = shape.num_layers * attention + num_moe * norm + num_dense * dense + layers * experts
    return kept + size * hidden + backward  # the last norm; its output is in `head_bytes`


def head_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of the output layer on the last pipeline stage, its weight excluded.

    The larger of its two passes counts. N is the number of tokens of a micro-batch, C of a chunk,
    W = V / tp the rows of the output weight on a rank, and o the bytes per operand of its product
    (4 with model.fp32_head):

        forward     8 C W                        logits of a chunk and their exponentials, float32
        backward    C W (4 + o) + D W (4 + o)    logits and their gradient; gradient of the weight,
                                                 summed in float32, and that of one chunk
                                                 (float32 logits become their gradient: 4 C W;
                                                 algo.entropy_coef needs 4 C W more)
        all at once 2 o C W + D W (4 + o)        logits that are kept, and their gradient
        both        b N D / cp                   hidden states of all tokens
                    4 D W                        float32 copy of the weight for model.fp32_head

    This is what plain torch needs. The kernels for CUDA need less, which is not measured.
    """
    size, parallel = BYTES_OF[config.model.dtype], config.parallel
    operand = 4 if config.model.fp32_head else size
    tokens = config.train.micro_batch_tokens / parallel.cp
    logits = (
        min(config.train.logprob_chunk_tokens or tokens, tokens) * shape.vocab_size / parallel.tp
    )
    weight = shape.hidden_size * shape.vocab_size / parallel.tp
    beside = 0 if operand == 4 else operand
    if config.algo.entropy_coef:
        beside = 4
    backward = logits * (4 + beside) + weight * (4 + operand)
    if config.train.logprob_chunk_tokens == 0:
        logits, backward = 0.0, logits * 2 * operand + weight * (4 + operand)
    copy = 4 * weight if operand > size else 0.0
    return max(8 * logits, backward) + tokens * size * shape.hidden_size + copy


def memory(
    config: Config, shape: ModelShape, world_size: int, device_gib: float | None = None
) -> dict[str, dict[str, float]]:
    """Phase -> part -> bytes on one rank's device.

    p is the number of parameters on a rank of the fullest stage (`params_per_rank`), b the bytes
    per value of model.dtype:

        policy weights   p * b. Quantised (model.base): a byte and 4 / 128 per value
        layer            model.base: the weights of one layer, dequantised and merged
        gradients        p * 4, float32
        optimizer        all parameters / ranks * s, sharded over all ranks with the same parameters
                         s = 8 (two moments); 12 for bfloat16 (and a float32 copy of the weights).
                         Kept, as a whole or in part: in all phases, and nothing on the host.
                         Streamed: all of it in SAVE, where the gradients make room; two parts of
                         32 million parameters, or the largest shard, in OPTIMIZER; else nothing
        adapters         float32, twice with lora.start and algo.kl_coef. Only they train: s = 8
        weight gradient  lora.rank: of one matrix, or of the experts of a layer, and in float32
        merging          lora.rank: the base of such a matrix, its product and sum in float32.
                         Of a quantised base in the passes, and in SYNC beside the merged one
        activations      micro_batch_tokens * activation_bytes_per_token / (tp * cp). A pipeline
                         keeps pp micro-batches of 1 / pp of the layers, an interleaved one
                         (pp - 1) / (pp vpp) more
        output layer     head_bytes, on the last pipeline stage
        sampling masks   rollout.top_k: 8 bytes per kept token of a micro-batch
        teacher          algo.teacher: weights of the largest one, less the activations, which
                         are not there while it scores
        clipping         the largest shard of a gradient, float32: clipping multiplies one at a time
        gathered state   of the optimizer, a piece at a time (r3/run/checkpoint.py)
        engine weights   all parameters * bytes per value of engine.dtype / engine_tp
        sync buffers     sync_buffer_bytes
        engine buffers   engine_buffer_bytes
        KV cache         engine.kv_cache_gib, or what engine.memory_fraction of the device leaves
                         beside weights and buffers of the engine. Not counted if neither is known
        reward model     parameters of its checkpoint * bytes per value of reward.model_dtype, on
                         the first rank of each engine
        frameworks       framework_bytes, in every phase

    Without an engine (`Config.uses_engine`) there is neither SYNC nor GENERATE.

    Args:
        config: the settings.
        shape: the model's.
        world_size: number of ranks.
        device_gib: memory of one device; None if it is not known.
    """
    others, experts = params_per_rank(config, shape)
    size = BYTES_OF[config.model.dtype]
    *quantised, of_layer = quantised_per_rank(config, shape)
    weights = (others + experts) * size
    if sum(quantised):  # one byte per value, and a factor per block
        weights -= sum(quantised) * (size - 1 - 4 / extras.adapter_plan().BLOCK)
    engine, buffers = engine_bytes(config, shape), engine_buffer_bytes(config, shape)
    optimizer, parallel = optimizer_bytes(config, shape, world_size), config.parallel
    tokens = config.train.micro_batch_tokens / (parallel.tp * parallel.cp)
    if parallel.vpp > 1:
        tokens *= 1 + (parallel.pp - 1) / (parallel.pp * parallel.vpp)
    always = {"frameworks": framework_bytes(config, world_size), "policy weights": weights}
    trained = sum(trained_per_rank(config, shape))
    gradients = {"gradients": trained * 4.0}
    merging: dict[str, float] = {}
    if config.uses_lora:
        always["adapters"] = trained * 4.0 * (2 if config.lora.start and config.algo.kl_coef else 1)
        largest = max(stacked_experts(config, shape), largest_tensor(shape) / parallel.tp)
        gradients["weight gradient"] = largest * (size + 4)
        merging = {"merging": largest * (size + 8)}
    shard = largest_shard(config, shape, world_size)
    staying = min(optimizer, config.train.kept_bytes)
    kept = {"optimizer": staying} if staying else {}
    if config.train.optimizer == "streamed":
        train = always | gradients | kept
        part = max(STREAMED_VALUES, shard) * _state_bytes(config)
        states = {"optimizer": min(optimizer, staying + 2 * part)}
        saving = always | {"optimizer": optimizer}
    else:
        train = always | gradients | {"optimizer": optimizer}
        states, saving = {}, train
    cache = config.engine.kv_cache_gib * GIB * config.uses_engine
    if device_gib and not cache and config.uses_engine:
        cache = max(0.0, config.engine.memory_fraction * device_gib * GIB - engine - buffers)
    passes = {
        "activations": tokens * activation_bytes_per_token(config, shape),
        "output layer": head_bytes(config, shape),
    }
    if kept_tokens := kept_per_token(config, shape):
        passes["sampling masks"] = 8.0 * kept_tokens * config.train.micro_batch_tokens / parallel.cp
    syncing = {}
    if of_layer:
        passes |= merging | {"layer": of_layer * float(size)}
        syncing = {"merging": merging["merging"] + largest * size}
    teacher = max((teacher_bytes(config, path) for path in config.algo.teacher), default=0.0)
    if (beyond := teacher - passes["activations"]) > 0:
        passes["teacher"] = beyond
    of_engine = {
        "SYNC": always
        | kept
        | syncing
        | {"engine weights": engine, "sync buffers": sync_buffer_bytes(config, shape)},
        "GENERATE": always
        | kept
        | {"engine weights": engine, "engine buffers": buffers}
        | ({"reward model": reward} if (reward := reward_model_bytes(config)) else {})
        | {"KV cache": cache},
    }
    return (of_engine if config.uses_engine else {}) | {
        "TRAIN": train | passes,
        "OPTIMIZER": train | states | {"clipping": shard * 4} | merging,
        "SAVE": saving | {"gathered state": float(GATHERED_BYTES)},
    }


def kept_per_token(config: Config, shape: ModelShape) -> int:
    """Most tokens that sampling keeps for one: `rollout.top_k`, without ties; 0: it keeps all."""
    return min(config.rollout.top_k, shape.vocab_size)


def engine_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of the engine's weights on a rank; 0 without an engine."""
    size = shape.num_params * BYTES_OF[config.engine.dtype] / config.parallel.engine_tp
    return size * config.uses_engine


@lru_cache
def _shape_of(folder: str) -> ModelShape | None:
    try:
        return ModelShape.read(folder)
    except (OSError, ShapeError):
        return None


def teacher_bytes(config: Config, path: str) -> float:
    """Bytes of a teacher's weights on a rank; 0 if its folder cannot be read."""
    if (shape := _shape_of(path)) is None:
        return 0.0
    own = config.of_teacher(is_dense=not shape.moe_layers)
    return float(sum(params_per_rank(own, shape)) * BYTES_OF[config.model.dtype])


def optimizer_bytes(config: Config, shape: ModelShape, world_size: int) -> float:
    """Bytes of a rank's optimizer state, sharded over all ranks with the same parameters."""
    if config.uses_lora:
        others, experts = trained_per_rank(config, shape)
        dense_dp, expert_dp = config.parallel.replicas(world_size)
        return (others / dense_dp + experts / expert_dp) * _state_bytes(config)
    return shape.num_params / world_size * _state_bytes(config)


def _state_bytes(config: Config) -> int:
    """Bytes of optimizer state per parameter."""
    return 8 if config.model.dtype == "float32" or config.uses_lora else 12


def framework_bytes(config: Config, world_size: int) -> float:
    """Bytes of the CUDA context, vLLM's CUDA graphs and NCCL's communicators.

    A communicator is counted for every axis of several ranks: all ranks, tp, cp, pp, etp * ep,
    data parallel (dense and expert) and engine_tp. Its buffers stay for the whole run.
    """
    parallel = config.parallel
    axes = (
        *(world_size, parallel.tp, parallel.cp, parallel.pp, parallel.engine_tp),
        parallel.expert_shards,
        *parallel.replicas(world_size),
    )
    graphs = CUDA_GRAPH_BYTES * config.uses_engine
    return CONTEXT_BYTES + graphs + COMMUNICATOR_BYTES * sum(size > 1 for size in axes)


def engine_buffer_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of vLLM's activations at its largest batch, which it profiles at start.

    T = 16384 tokens are vLLM's default on devices of 70 GiB or more. With e bytes per value, S
    sequences and the letters of `activation_bytes_per_token`:

        layer    e T (4 D + 2 q + 2 k) + e T K (3 F + D) / engine_tp (dense: 3 e T F / engine_tp)
        sampler  4 * 4 S V: float32 logits, their copy, probabilities, sorted
    """
    size, tp = BYTES_OF[config.engine.dtype], config.parallel.engine_tp
    attention = 4 * shape.hidden_size + 2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    routed = shape.topk * (3 * shape.moe_ffn_size + shape.hidden_size)
    dense = 3 * shape.ffn_size * (len(shape.moe_layers) < shape.num_layers)
    tokens = min(16384, config.engine.max_num_seqs * _longest(config, shape))
    sampler = 16 * config.engine.max_num_seqs * shape.vocab_size
    total = tokens * size * (attention + max(routed, dense) / tp) + sampler
    return total * config.uses_engine


def sync_buffer_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes that the weight sync adds while it runs.

    A tensor that is sharded over tp ranks is joined, and vLLM's reload builds a module anew before
    it copies it into place. Both hold one module at a time; the embedding is the largest. A tied
    embedding is kept to the end, for the output layer. Shards on the same machine are read through
    memory handles, without a copy.
    """
    largest, tp = largest_tensor(shape), config.parallel.tp
    joined = largest * BYTES_OF[config.model.dtype] * (tp > 1)
    module = largest * BYTES_OF[config.engine.dtype] / config.parallel.engine_tp
    return (joined + module) * config.uses_engine


def host_memory(config: Config, shape: ModelShape, world_size: int) -> dict[str, float]:
    """Part -> bytes of host memory of one rank. On CPU the parts of `memory` come on top.

        process             Python and its libraries
        optimizer           its state while the engine generates, or streamed, page-locked
        reference policy    algo.kl_coef > 0: its weights, and the policy's while it scores; with
                            adapters it is the base
        base weights        lora.rank: of the matrices with adapters, unless it is quantised
        teachers            algo.teacher: the weights of each
        engine weights      engine.sleep_level 1: while the policy trains
        rows                ROW_BYTES per byte of the files of data and held-out sets
        rollouts            those a data-parallel rank trains on, of maximum length: 24 bytes, the
                            routes and 4 bytes per kept token (rollout.top_k) per token
        checkpoint          while one is written or read: values and moments in float32 of what the
                            rank trains, and a copy of its weights, or of its adapters

    Args:
        config: the settings.
        shape: the model's.
        world_size: number of ranks.
    """
    weights = sum(params_per_rank(config, shape)) * BYTES_OF[config.model.dtype]
    rollouts = config.rollout.samples_per_step / config.parallel.data_ranks(world_size)
    engine = engine_bytes(config, shape)
    trained = sum(trained_per_rank(config, shape))
    base = sum(adapted_per_rank(config, shape)) * BYTES_OF[config.model.dtype]
    optimizer = optimizer_bytes(config, shape, world_size) * config.moves_optimizer
    parts = {
        "process": PROCESS_BYTES,
        "optimizer": max(0.0, optimizer - config.train.kept_bytes),
        "reference policy": 2 * weights * (config.algo.kl_coef > 0 and not config.uses_lora),
        "base weights": base,
        "teachers": sum(teacher_bytes(config, path) for path in dict.fromkeys(config.algo.teacher)),
        "engine weights": engine * (config.engine.sleep_level == 1),
        "rows": ROW_BYTES * sum(map(bytes_of, (*config.data.path, *config.eval.path))),
        "rollouts": rollouts
        * _longest(config, shape)
        * (24 + route_bytes_per_token(shape) + 4 * kept_per_token(config, shape)),
        "checkpoint": 12 * trained + (4 * trained if config.uses_lora else weights),
    }
    return {name: float(size) for name, size in parts.items() if size}


def cpu_memory(config: Config, shape: ModelShape, world_size: int) -> dict[str, float]:
    """Part -> bytes that a rank without a GPU has in TRAIN, of the parts that are certain.

    The engine's weights stay there, because the engine's sleep frees its KV cache alone.
    """
    phases = memory(config, shape, world_size)
    parts = phases["TRAIN"] | phases.get("SYNC", {})
    return {name: size for name, size in parts.items() if name in CERTAIN}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a plan fits devices of a size.

    Attributes:
        device_gib: memory of a device.
        parts: phase -> part -> bytes, as `memory` returns them.
        cached_sequences: sequences of maximum length that the KV cache of one engine holds.
    """

    device_gib: float
    parts: Mapping[str, Mapping[str, float]]
    cached_sequences: float

    @property
    def needs_gib(self) -> dict[str, float]:
        """Phase -> GiB that it needs on each rank."""
        return {phase: sum(parts.values()) / GIB for phase, parts in self.parts.items()}

    @property
    def usable_gib(self) -> float:
        """What a plan may use of a device."""
        return self.device_gib * (1 - RESERVE)

    @property
    def lacking_gib(self) -> dict[str, float]:
        """Phase -> GiB that it lacks, for those that do not fit."""
        return {
            phase: needs - self.usable_gib
            for phase, needs in self.needs_gib.items()
            if needs > self.usable_gib
        }

    @property
    def fits(self) -> bool:
        """Whether every phase fits, and the KV cache holds a sequence."""
        return not self.lacking_gib and self.cached_sequences >= 1


def fit(config: Config, shape: ModelShape, world_size: int, device_gib: float) -> Fit:
    """Compare the plan with devices of `device_gib`."""
    phases, cached = memory(config, shape, world_size, device_gib), math.inf
    if config.uses_engine:
        cached = phases["GENERATE"]["KV cache"] / sequence_bytes(config, shape)
    return Fit(device_gib=device_gib, parts=phases, cached_sequences=cached)


@lru_cache
def _reward_model_params(folder: str) -> int:
    try:
        return sum(map(math.prod, checkpoint_tensors(folder, only_weights=False).values()))
    except (OSError, ShapeError):
        return 0


def reward_model_bytes(config: Config) -> float:
    """Bytes of the reward model's weights; 0 without one or if its folder cannot be read."""
    if "model" not in config.reward_functions or not config.uses_engine:
        return 0.0
    params = _reward_model_params(config.reward.model_path)
    return float(params * BYTES_OF[config.reward.model_dtype])


def _longest(config: Config, shape: ModelShape) -> int:
    return config.longest_sequence(shape.max_position_embeddings)


def sequence_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of KV cache and state on each rank of an engine for a sequence of maximum length.

    Key-value heads are shared by the ranks of an engine; fewer heads than ranks are copied, and
    latent attention caches the same on every rank.
    """
    tp = config.parallel.engine_tp
    shards = 1 if shape.latent else min(tp, shape.num_kv_heads)
    values = shape.kv_values(_longest(config, shape)) / shards
    dtype = config.engine.dtype
    return values * BYTES_OF[dtype] + state_bytes(shape, dtype) / tp


def state_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes that gated delta layers keep in an engine for a conversation, whatever its length.

    Args:
        dtype: the engine's, that of the state too unless config.json has another one for it.
    """
    if shape.delta is None:
        return 0
    sizes = shape.delta
    state = sizes.value_heads * sizes.key_size * sizes.value_size
    convolution = (2 * sizes.keys + sizes.values) * (sizes.taps - 1)
    of_layer = state * BYTES_OF[sizes.state_dtype or dtype] + convolution * BYTES_OF[dtype]
    return len(shape.delta_layers) * of_layer


def kv_cache_demand(config: Config, shape: ModelShape, world_size: int) -> float:
    """Bytes of KV cache that hold all conversations of a rank in flight at their maximum length."""
    rollouts = config.rollout.samples_per_step // config.parallel.engines(world_size)
    limit = config.engine.max_num_seqs  # all that is known of evaluations, whose rows are not read
    return (limit if config.learns_rows else min(limit, rollouts)) * sequence_bytes(config, shape)
