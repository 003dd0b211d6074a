"""How many values a rank has: of the model, adapted, quantised, trained; the largest tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from r3 import extras
from r3.config import Config
from r3.models.shape import ModelShape


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
    others = shape.num_params - shape.num_expert_params
    return _on_a_rank(config, shape, others, shape.num_expert_params)


def _on_a_rank(config: Config, shape: ModelShape, others: int, experts: int) -> tuple[int, int]:
    parallel = config.parallel
    stages = [
        {layer for piece in pieces for layer in piece}
        for pieces in parallel.stages(shape.num_layers)
    ]
    share = max(len(stage) for stage in stages) / shape.num_layers
    moe_share = max(len(stage.intersection(shape.moe_layers)) for stage in stages) / (
        len(shape.moe_layers) or 1
    )
    return int(others * share / parallel.tp), int(experts * moe_share / parallel.expert_shards)


def adapted_per_rank(config: Config, shape: ModelShape) -> tuple[int, int]:
    """(other, expert) parameters on such a rank that have adapters and a base on the host."""
    names = extras.adapter_plan().ranks_of(config, shape).keys() - _quantised(config, shape)
    others, experts = _by_experts({name: math.prod(shape.tensor_shapes[name]) for name in names})
    return _on_a_rank(config, shape, others, experts)


def quantised_per_rank(config: Config, shape: ModelShape) -> tuple[int, int, int]:
    """(other, expert) parameters on such a rank that have a quantised base; those of a layer."""
    sizes = {name: math.prod(shape.tensor_shapes[name]) for name in _quantised(config, shape)}
    layers: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        layers.setdefault(name.split(".")[2], {})[name] = size
    parallel = config.parallel
    largest = max(
        (
            others // parallel.tp + experts // parallel.expert_shards
            for others, experts in map(_by_experts, layers.values())
        ),
        default=0,
    )
    return *_on_a_rank(config, shape, *_by_experts(sizes)), largest


def _quantised(config: Config, shape: ModelShape) -> set[str]:
    return extras.adapter_plan().quantised_tensors(shape) if config.quantises_base else set()


def trained_per_rank(config: Config, shape: ModelShape) -> tuple[int, int]:
    """(other, expert) parameters on such a rank that an optimizer has: all, or the adapters'.

    One factor of a pair is whole on every rank of tp; here both are.
    """
    if not config.uses_lora:
        return params_per_rank(config, shape)
    ranks = extras.adapter_plan().ranks_of(config, shape)
    others, experts = _by_experts(
        {name: rank * sum(shape.tensor_shapes[name]) for name, rank in ranks.items()}
    )
    parallel = config.parallel
    others, experts = _on_a_rank(config, shape, others, experts)
    return others * parallel.tp, experts * parallel.experts_tp


def _by_experts(values: Mapping[str, int]) -> tuple[int, int]:
    """Sums of values outside of routed experts and of them, by names in the checkpoint."""
    experts = sum(value for name, value in values.items() if ".experts." in name)
    return sum(values.values()) - experts, experts


def largest_shard(config: Config, shape: ModelShape, world_size: int) -> float:
    """Values in the largest piece of a tensor that a rank's optimizer has.

    That is the stacked experts of a layer or a matrix, or all that the rank has if that is less.
    """
    others, experts = trained_per_rank(config, shape)
    dense_dp, expert_dp = config.parallel.replicas(world_size)
    return max(
        min(stacked_experts(config, shape), experts / expert_dp),
        min(largest_tensor(shape) / config.parallel.tp, others / dense_dp),
    )


def stacked_experts(config: Config, shape: ModelShape) -> float:
    """Values in the larger tensor of a layer's experts on a rank."""
    values = 2 * shape.hidden_size * shape.moe_ffn_size * shape.num_experts
    return values / config.parallel.expert_shards


def largest_tensor(shape: ModelShape) -> int:
    """Values in the largest tensor outside of the experts, as Megatron joins them."""
    keys = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    dense = 2 * shape.ffn_size * (len(shape.moe_layers) < shape.num_layers)
    rows = max(shape.vocab_size, keys, dense, 2 * shape.shared_ffn_size)
    return rows * shape.hidden_size
