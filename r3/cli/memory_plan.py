"""The memory that a run needs per phase, estimated from sizes before it is launched.

Buffers of the frameworks, fragmentation and unbalanced routing come on top. Pure arithmetic.
"""

from __future__ import annotations

import math
from pathlib import Path

from r3.config import Config, Problem
from r3.models.shape import BYTES_OF, ModelShape, ShapeError, checkpoint_tensors

PHASES = ("SYNC", "GENERATE", "TRAIN")


def route_bytes_per_token(shape: ModelShape) -> int:
    """Bytes of one token's captured routes.

    L * K expert ids, in the smallest signed integer type that holds E ids and -1.
    """
    return len(shape.moe_layers) * shape.topk * (1 if shape.num_experts <= 128 else 2)


def params_per_rank(config: Config, shape: ModelShape) -> tuple[int, int]:
    """(other, expert) parameters on one rank of the fullest pipeline stage.

    Others are sharded by tp, experts by etp * ep. The share of a stage is its share of the layers,
    or of the MoE layers.
    """
    parallel = config.parallel
    stages = [
        {layer for piece in pieces for layer in piece} for pieces in stage_pieces(config, shape)
    ]
    share = max(len(stage) for stage in stages) / shape.num_layers
    moe_share = max(len(stage.intersection(shape.moe_layers)) for stage in stages) / (
        len(shape.moe_layers) or 1
    )
    others = (shape.num_params - shape.num_expert_params) * share / parallel.tp
    experts = shape.num_expert_params * moe_share / ((parallel.etp or parallel.tp) * parallel.ep)
    return int(others), int(experts)


def stage_pieces(config: Config, shape: ModelShape) -> list[tuple[range, ...]]:
    """The layers of every chunk of every pipeline stage."""
    pieces = config.parallel.pieces(shape.num_layers)
    return [pieces[stage :: config.parallel.pp] for stage in range(config.parallel.pp)]


def activation_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """Bytes per packed token at the peak of a pass, between forward and backward.

    Routing is taken as balanced. The table lists what autograd keeps, with b bytes per value, D the
    hidden size, q and k the query and key widths, h the width of a head, F the feed-forward width
    (of an expert), and S the width of the shared experts:

        norm        (4 + 2 b) D                    input in float32, normalised, output
        attention   norm + b (q + 2 k)             projected q, k, v
                    (4 + b) (q + k)                before and after the norm of q and k, if any
                    b (q + k + 4 h + 2 q)          rotated q and k, sines, cosines; output twice
        dense MLP   norm + 4 b F                   gate and up, silu of gate, product
        MoE         norm + b K (D + 5 F) + 4 b S   tokens sorted by expert; gate, up, silu, products
                    9 E + 24 K                     scores and choices of the router
        backward    b (2 D + K (D + 4 F))          gradients inside one layer

    recompute none keeps all layers. moe keeps all but the insides of the MoE layers, and one of
    those. full keeps b D per layer and one whole layer. `head_bytes` has the output layer.
    """
    size, recompute = BYTES_OF[config.model.dtype], config.model.recompute
    hidden, head = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head
    norm = (4 + 2 * size) * hidden
    attention = norm + size * (queries + 2 * keys) + size * (3 * queries + keys + 4 * head)
    if shape.qk_norm != "none":
        attention += (4 + size) * (queries + keys)
    dense = norm + 4 * size * shape.ffn_size
    routed = shape.topk * (hidden + 5 * shape.moe_ffn_size)
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
    if recompute == "full":
        kept = shape.num_layers * size * hidden + attention + largest
    else:
        layers = num_moe if recompute == "none" else min(num_moe, 1)
        kept = shape.num_layers * attention + num_moe * norm + num_dense * dense + layers * experts
    return kept + (4 + size) * hidden + backward  # the last norm; its output is in `head_bytes`


def head_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of the output layer on the last pipeline stage, its weight excluded.

    The larger of its two passes counts. N is the number of tokens of a micro-batch, C of a chunk,
    W = V / tp the rows of the output weight on a rank, and o the bytes per operand of its product
    (4 with model.fp32_head):

        forward     8 C W                        logits of a chunk and their exponentials, float32
        backward    C W (4 + o) + D W (4 + o)    logits and their gradient; gradient of the weight,
                                                 summed in float32, and that of one chunk
                                                 (float32 logits become their gradient: 4 C W)
        both        b N D / cp                   hidden states of all tokens
                    4 D W                        float32 copy of the weight for model.fp32_head
    """
    size, parallel = BYTES_OF[config.model.dtype], config.parallel
    operand = 4 if config.model.fp32_head else size
    tokens = config.train.micro_batch_tokens / parallel.cp
    logits = (
        min(config.train.logprob_chunk_tokens or tokens, tokens) * shape.vocab_size / parallel.tp
    )
    weight = shape.hidden_size * shape.vocab_size / parallel.tp
    backward = logits * (4 if operand == 4 else 4 + operand) + weight * (4 + operand)
    copy = 4 * weight if operand > size else 0.0
    return max(8 * logits, backward) + tokens * size * shape.hidden_size + copy


def memory(config: Config, shape: ModelShape, world_size: int) -> dict[str, dict[str, float]]:
    """Phase -> part -> bytes on one rank's device.

    p is the number of parameters on a rank of the fullest stage (`params_per_rank`), b the bytes
    per value of model.dtype:

        policy weights   p * b; twice with the reference policy, if algo.kl_coef > 0
        gradients        p * 4, float32
        optimizer        all parameters / ranks * s, sharded over all ranks with the same parameters
                         s = 8 (two moments); 12 for bfloat16 (and a float32 copy of the weights)
        activations      micro_batch_tokens * activation_bytes_per_token / (tp * cp). A pipeline
                         keeps pp micro-batches of 1 / pp of the layers, an interleaved one
                         (pp - 1) / (pp vpp) more
        output layer     head_bytes, on the last pipeline stage
        engine weights   all parameters * bytes per value of engine.dtype / engine_tp
        reward model     parameters of its checkpoint * bytes per value of reward.model_dtype, on
                         the first rank of each engine
        KV cache         engine.kv_cache_gib. Not counted if that is 0: the engine then takes what
                         its share of the device's memory leaves
    """
    others, experts = params_per_rank(config, shape)
    size = BYTES_OF[config.model.dtype]
    state = 8 if config.model.dtype == "float32" else 12
    weights = (others + experts) * size * (2 if config.algo.kl_coef else 1)
    engine = shape.num_params * BYTES_OF[config.engine.dtype] / config.parallel.engine_tp
    sharded = shape.num_params / world_size
    parallel = config.parallel
    tokens = config.train.micro_batch_tokens / (parallel.tp * parallel.cp)
    if parallel.vpp > 1:
        tokens *= 1 + (parallel.pp - 1) / (parallel.pp * parallel.vpp)
    return {
        "SYNC": {"policy weights": weights, "engine weights": engine},
        "GENERATE": {
            "policy weights": weights,
            "engine weights": engine,
            **({"reward model": reward} if (reward := reward_model_bytes(config)) else {}),
            "KV cache": config.engine.kv_cache_gib * 2**30,
        },
        "TRAIN": {
            "policy weights": weights,
            "gradients": (others + experts) * 4,
            "optimizer": sharded * state,
            "activations": tokens * activation_bytes_per_token(config, shape),
            "output layer": head_bytes(config, shape),
        },
    }


def reward_model_bytes(config: Config) -> float:
    """Bytes of the reward model's weights; 0 without one or if its folder cannot be read."""
    if "model" not in (*config.reward.function, *config.eval.function):
        return 0.0
    try:
        tensors = checkpoint_tensors(Path(config.reward.model_path))
    except (OSError, ShapeError):
        return 0.0
    return float(sum(map(math.prod, tensors.values())) * BYTES_OF[config.reward.model_dtype])


def reward_model_problems(
    config: Config, shape: ModelShape, world_size: int, device_gib: float
) -> list[Problem]:
    """Whether reward model, policy weights and engine fit on the device together.

    All of them are in memory while conversations are generated.

    Args:
        config: the settings.
        shape: the policy's.
        world_size: number of ranks.
        device_gib: memory of one device.
    """
    reward = reward_model_bytes(config) / 2**30
    if not reward:
        return []
    parts = memory(config, shape, world_size)["GENERATE"]
    policy = parts["policy weights"] / 2**30
    if config.engine.kv_cache_gib:
        engine = (parts["engine weights"] + parts["KV cache"]) / 2**30
    else:
        engine = config.engine.memory_fraction * device_gib
    if reward + policy + engine <= device_gib:
        return []
    rule = (
        f"its {reward:.1f} GiB, the policy's weights of {policy:.1f} GiB and the engine's "
        f"{engine:.1f} GiB exceed the device's {device_gib:.1f} GiB while conversations are "
        "generated"
    )
    fix = "lower engine.memory_fraction or engine.kv_cache_gib, or use a smaller reward model"
    return [Problem("reward.model_path", config.reward.model_path, rule, fix)]


def kv_cache_demand(config: Config, shape: ModelShape, world_size: int) -> float:
    """Bytes of KV cache that hold all conversations of a rank in flight at their maximum length.

    2 * layers * kv heads * head dim * bytes per value of engine.dtype for each token, shared by the
    ranks of an engine.
    """
    rollouts = (
        config.rollout.prompts_per_step
        * config.rollout.group_size
        * config.parallel.engine_tp
        // world_size
    )
    tokens = min(config.engine.max_num_seqs, rollouts) * config.longest_sequence(
        shape.max_position_embeddings
    )
    return (
        float(tokens * shape.kv_values_per_token * BYTES_OF[config.engine.dtype])
        / config.parallel.engine_tp
    )
