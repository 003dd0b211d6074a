"""What each rank has and reads in a weight sync, from sizes alone, for the table of a dry run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from r3.config import ParallelConfig
from r3.models.sizes import ModelSizes
from r3.models.tensors import Experts, Rule, Shard, SyncPlan, collect, conversion_rules


def planned_shards(
    shape: ModelSizes, parallel: ParallelConfig, world_size: int, rank: int, item_size: int
) -> list[Shard]:
    """List the shards that a rank of a policy has, from sizes alone.

    Args:
        shape: the model's.
        parallel: the layout.
        world_size: number of ranks.
        rank: the rank, in Megatron's order (tp varies fastest, then etp, ep; pp slowest).
        item_size: bytes per value of the policy's weights.
    """
    rules = conversion_rules(shape)
    place, stages = parallel.place(rank, world_size), parallel.stages(shape.num_layers)
    own = stages[place["pp"]]
    per_rank = shape.num_experts // parallel.ep
    first_expert = place["ep"] * per_rank
    shards: list[Shard] = []

    def add(name: str, rule: Rule, *, layer: int = -1, experts: Experts | None = None) -> None:
        axis, size = ("etp", parallel.experts_tp) if experts else ("tp", parallel.tp)
        sizes = list(rule.hf.values())
        is_sharded, first = rule.kind != "replicated", sizes[0]
        rows = sum(size[0] for size in sizes)
        count = size if is_sharded else 1
        if rule.kind == "row":
            local: tuple[int, ...] = (*first[:-1], first[-1] // count)
        else:
            local = (math.ceil(rows / count), *first[1:])  # a vocabulary is padded to the ranks
        prefix = f"model.layers.{layer}." if layer >= 0 else ""
        shards.append(
            Shard(
                name=name,
                hf=experts.names(shape) if experts else tuple(prefix + part for part in rule.hf),
                kind=rule.kind,
                index=place[axis] if is_sharded else 0,
                count=count,
                shape=(experts.count, *local) if experts else local,
                rows=rows,
                # Biases of routers are float32 in every policy.
                item_size=4 if name.endswith("expert_bias") else item_size,
                layer=layer,
                experts=experts,
            )
        )

    is_first, is_last = place["pp"] == 0, own is stages[-1]
    has_head = is_last and (not shape.tied or sum(map(len, stages)) > 1)
    top = {
        "embedding.word_embeddings.weight": is_first,
        "decoder.final_layernorm.weight": is_last,
        "output_layer.weight": has_head,
    }
    for name, rule in rules.top.items():
        if top[name]:
            add(name, rule)
    for layer in (layer for piece in own for layer in piece):
        for suffix, rule in rules.layers[layer].items():
            add(f"decoder.layers.{layer}.{suffix}", rule, layer=layer)
        for part, rule in rules.expert.items() if layer in shape.moe_layers else ():
            held = range(first_expert, first_expert + per_rank)
            for experts in Experts.within(shape, layer, part, held, item_size):
                add(experts.name, rule, layer=layer, experts=experts)
    return shards


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank reads in a weight sync: number of shards, and bytes.

    Attributes:
        local: from its own memory.
        peer: from other ranks' memory on its machine.
        network: from other machines.
    """

    local: tuple[int, int]
    peer: tuple[int, int]
    network: tuple[int, int]

    @classmethod
    def of(cls, plan: SyncPlan[Any]) -> Traffic:
        """What the reader of a plan reads."""
        read: dict[str, list[int]] = {"local": [], "peer": [], "network": []}
        for shard_id, source in plan.sources.items():
            if source == plan.reader:
                where = "local"
            else:
                where = "network" if shard_id in plan.crossing else "peer"
            read[where].append(plan.holders[shard_id][source].nbytes)
        return cls(**{where: (len(sizes), sum(sizes)) for where, sizes in read.items()})


def sync_plans(
    shape: ModelSizes,
    parallel: ParallelConfig,
    hosts: Sequence[str],
    readers: Sequence[int],
    item_size: int,
) -> Iterator[SyncPlan[Shard]]:
    """Yield the plan of each reader, from sizes alone.

    Args:
        shape: the model's.
        parallel: the policy's layout.
        hosts: machine of each rank.
        readers: ranks.
        item_size: bytes per value of the policy's weights.
    """
    made: dict[tuple[int, ...], list[Shard]] = {}  # data-parallel ranks have the same
    shards = []
    for rank in range(len(hosts)):
        place = parallel.place(rank, len(hosts))
        own = tuple(place[axis] for axis in ("pp", "tp", "ep", "etp"))
        if own not in made:
            made[own] = planned_shards(shape, parallel, len(hosts), rank, item_size)
        shards.append(made[own])
    tensors, holders = collect(shards)
    for reader in readers:
        yield SyncPlan.of(tensors, holders, hosts, reader)
