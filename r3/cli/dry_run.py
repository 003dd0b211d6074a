"""What a run would do and need, before it is launched: rank layout, batch plan, memory per phase. Pure arithmetic.

The figures are estimates from sizes: frameworks' own buffers, fragmentation and unbalanced routing come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from r3.cli.checks import BYTES_OF
from r3.config import Config, Problem, to_yaml
from r3.models.shape import ModelShape, ShapeError, checkpoint_tensors

PHASES = ("SYNC", "GENERATE", "TRAIN")
_SHOWN_RANKS = 16


def route_bytes_per_token(shape: ModelShape) -> int:
    """Bytes of one token's captured routes: L * K ids, in the smallest signed integer type that fits E ids and -1."""
    return len(shape.moe_layers) * shape.topk * (1 if shape.num_experts <= 128 else 2)


def params_per_rank(config: Config, shape: ModelShape) -> tuple[int, int]:
    """(other, expert) parameters that one rank holds: others / tp, experts / (etp * ep), of the fullest pipeline stage.

    A stage's share is its share of the layers, or of the MoE layers.
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
    """For every pipeline stage the layers of its pieces."""
    pieces = config.parallel.pieces(shape.num_layers)
    return [pieces[stage :: config.parallel.pp] for stage in range(config.parallel.pp)]


def activation_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """Bytes that one packed token takes at the height of a pass, between forward and backward; routing taken as balanced.

    What autograd keeps, with b bytes a value, D hidden, q and k query and key widths, h a head's, F the (expert's) feed-forward
    width, S that of the experts every token sees:

        norm        (4 + 2 b) D                    input in float32, normalised, output
        attention   norm + b (q + 2 k)             q k v as they are projected
                    (4 + b) (q + k)                before and after their own norm, where there is one
                    b (q + k + 4 h + 2 q)          rotated, with sines and cosines; output by sequence and as one
        dense MLP   norm + 4 b F                   gate and up, silu of gate, product
        MoE         norm + b K (D + 5 F) + 4 b S   tokens in the order of experts; gate and up, silu, product, times the gate
                    9 E + 24 K                     router's scores and choices
        backward    b (2 D + K (D + 4 F))          gradients of one layer on their way

    recompute none keeps all layers; moe keeps all but the MoE layers' insides, and one of those; full keeps b D a layer and
    one whole layer. What the output layer takes is in `head_bytes`.
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
    """Bytes that the output layer takes on the last pipeline stage beside its weight: the larger of its two passes.

    With N the tokens of a micro-batch, C those of a chunk, W = V / tp rows of the output weight on a rank, o the bytes of its
    product's operands (4 with model.fp32_head):

        forward     8 C W                        a chunk's logits and their powers, float32
        backward    C W (4 + o) + D W (4 + o)    logits again and their gradient, and the weight's: float32 sum, one chunk's
                                                 (in float32 logits turn into their gradient in place: 4 C W)
        both        b N D / cp                   hidden states of all tokens
                    4 D W                        the weight in float32, where it is not and model.fp32_head asks
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

    With p the parameters that a rank of the fullest stage holds (`params_per_rank`) and b the bytes of model.dtype:

        policy weights   p * b; once more for the frozen reference when algo.kl_coef > 0
        gradients        p * 4                        float32
        optimizer        all parameters / ranks * s    sharded over every rank that holds the same ones
                         s = 8 (two moments), 12 for bfloat16 (and a float32 copy of the weights)
        activations      micro_batch_tokens * activation_bytes_per_token / (tp * cp); a pipeline keeps pp micro-batches
                         of 1 / pp of the layers, an interleaved one (pp - 1) / (pp vpp) more
        output layer     head_bytes, on the last pipeline stage
        engine weights   all parameters * bytes of engine.dtype / engine_tp
        reward model     its checkpoint's parameters * bytes of reward.model_dtype, on the first rank of each engine
        KV cache         engine.kv_cache_gib; left out when that is 0, for then the engine takes what its share of the
                         device's memory leaves
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
    """Bytes of the reward model's weights; 0 without one, and where its folder cannot be read."""
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
    """Whether reward model, policy weights and engine fit a device of that size together, as they lie while generating."""
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
        f"its {reward:.1f} GiB, the policy's weights of {policy:.1f} GiB and the engine's {engine:.1f} GiB exceed the "
        f"device's {device_gib:.1f} GiB, and all of them lie there while conversations are generated"
    )
    fix = "a smaller --engine.memory_fraction or --engine.kv_cache_gib, or a smaller reward model"
    return [Problem("reward.model_path", config.reward.model_path, rule, fix)]


def kv_cache_demand(config: Config, shape: ModelShape, world_size: int) -> float:
    """Bytes of KV cache with which no conversation ever waits: all that a rank may have in flight, at their longest.

    2 * layers * kv heads * head dim * bytes of engine.dtype for each token, shared by the ranks of an engine.
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


def describe(config: Config, shape: ModelShape, world_size: int) -> str:
    """The whole plan as text, for `--dry-run`."""
    sections = {
        "config": to_yaml(config).rstrip(),
        "model": _model(shape),
        f"ranks ({world_size})": _layout(config, shape, world_size),
        "batch": _batch(config, shape, world_size),
        "memory per rank, GiB (estimate)": _memory(config, shape, world_size),
    }
    return "\n\n".join(f"{title}\n{_indent(text)}" for title, text in sections.items())


def _model(shape: ModelShape) -> str:
    kind = "dense"
    if shape.moe_layers:
        kind = f"{len(shape.moe_layers)} MoE layers of {shape.num_experts} experts, {shape.topk} a token"
    if shape.num_mtp_layers:
        kind += f" ({shape.num_mtp_layers} multi-token-prediction layers are left out)"
    return (
        f"{shape.architecture}: {_count(shape.num_params)} parameters, {shape.num_layers} layers, {kind}, "
        f"context {shape.max_position_embeddings}"
    )


def _layout(config: Config, shape: ModelShape, world_size: int) -> str:
    """Ranks in Megatron's order: tp runs fastest, then cp, dp, pp; for experts etp, ep, expert dp, pp."""
    parallel = config.parallel
    tp, cp, pp, ep, etp = (
        parallel.tp,
        parallel.cp,
        parallel.pp,
        parallel.ep,
        parallel.etp or parallel.tp,
    )
    dp, per_stage = world_size // (tp * cp * pp), world_size // pp
    engines = world_size // parallel.engine_tp
    pieces = stage_pieces(config, shape)
    rows: list[Sequence[str]] = [
        (
            "rank",
            "pp",
            "dp",
            "cp",
            "tp",
            "expert_dp",
            "ep",
            "etp",
            "layers",
            "experts",
            "engine",
            "prompts a step",
        )
    ]
    for rank in range(min(world_size, _SHOWN_RANKS)):
        stage, held = rank // per_stage, shape.num_experts // ep
        expert_rank = rank // etp % ep
        experts = (
            f"{expert_rank * held}..{(expert_rank + 1) * held - 1}" if shape.moe_layers else "-"
        )
        cells: tuple[object, ...] = (
            rank,
            stage,
            rank // (tp * cp) % dp,
            rank // tp % cp,
            rank % tp,
            rank // (etp * ep) % max(1, per_stage // (etp * ep)),
            expert_rank,
            rank % etp,
            ",".join(f"{piece[0]}..{piece[-1]}" for piece in pieces[stage]),
            experts,
            rank // parallel.engine_tp,
            config.rollout.prompts_per_step // engines,
        )
        rows.append([str(cell) for cell in cells])
    if world_size > _SHOWN_RANKS:
        rows.append([f"... and {world_size - _SHOWN_RANKS} more"])
    return _table(rows)


def _batch(config: Config, shape: ModelShape, world_size: int) -> str:
    rollout, train = config.rollout, config.train
    rollouts = rollout.prompts_per_step * rollout.group_size
    parallel = config.parallel
    data_ranks = world_size // (parallel.tp * parallel.cp * parallel.pp)
    engines = world_size // parallel.engine_tp
    per_update = math.ceil(rollouts / train.updates_per_step / data_ranks)
    longest = config.longest_sequence(shape.max_position_embeddings)
    prompt = longest - rollout.max_response_tokens
    route_bytes = route_bytes_per_token(shape)
    in_flight = min(rollouts // engines, config.engine.max_num_seqs)
    # A micro-batch holds whole sequences, so the longest ones fill it worst.
    micro_batches = math.ceil(per_update / (train.micro_batch_tokens // longest))
    updates = f"{train.updates_per_step} a step of {rollouts // train.updates_per_step} rollouts"
    lines = [
        f"prompts       {rollout.prompts_per_step} a step, {rollout.group_size} answers each: {rollouts} rollouts",
        f"rollouts      {rollouts // engines} on each engine, {in_flight} in flight",
        f"sequence      at most {prompt} prompt + {rollout.max_response_tokens} response = {longest} tokens",
        f"tokens        at most {rollouts * longest:,} a step, {rollouts // data_ranks * longest:,} on each data-parallel rank",
        f"updates       {updates}; {train.steps * train.updates_per_step} in {train.steps} steps",
        f"micro-batches at most {micro_batches} per update and rank, of {train.micro_batch_tokens} tokens",
    ]
    if config.replay.mode != "off" and route_bytes:
        total = rollouts // data_ranks * longest * route_bytes
        lines.append(
            f"routes        {route_bytes} bytes a token, at most {total / 2**20:,.1f} MiB on each rank's host"
        )
    return "\n".join(lines)


def _memory(config: Config, shape: ModelShape, world_size: int) -> str:
    phases = memory(config, shape, world_size)
    parts = list(dict.fromkeys(part for phase in PHASES for part in phases[phase]))
    rows: list[Sequence[str]] = [("", *PHASES)]
    rows += [(part, *(_gib(phases[phase].get(part, 0.0)) for phase in PHASES)) for part in parts]
    rows.append(("sum", *(_gib(sum(phases[phase].values())) for phase in PHASES)))
    share = config.engine.memory_fraction
    size = (
        "given"
        if config.engine.kv_cache_gib
        else f"engine weights and KV cache take {share:.0%} of the device (GPU)"
    )
    demand = _gib(kv_cache_demand(config, shape, world_size))
    return f"{_table(rows)}\nKV cache: {size}; {demand} would hold every conversation in flight at its longest"


def _gib(size: float) -> str:
    return f"{size / 2**30:.3f}" if 0 < size < 2**30 else f"{size / 2**30:.1f}" if size else "-"


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def _table(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows if len(row) > 1) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    )


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())
