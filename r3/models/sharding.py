"""Which rank has which shard of which tensor, and from which rank a weight sync reads it.

Sizes and names only, without torch: the same code plans the sync of a run and the table of a dry
run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from r3.config import ParallelConfig
from r3.models.rules import Kind, Rule, conversion_rules
from r3.models.shape import ModelShape

ShardId = tuple[str, int]
"""A tensor's name and the number of its shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's shard of one Megatron tensor.

    Attributes:
        name: Megatron's global name.
        hf: the HF tensors it is made of.
        kind: how the full tensor is sharded.
        index, count: this is shard `index` of `count`.
        shape: shape of the shard.
        rows: rows of the joined HF tensors, without padding of the vocabulary.
        item_size: bytes per value.
    """

    name: str
    hf: tuple[str, ...]
    kind: Kind
    index: int
    count: int
    shape: tuple[int, ...]
    rows: int
    item_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return math.prod(self.shape) * self.item_size


S = TypeVar("S", bound=Shard)


def planned_shards(
    shape: ModelShape, parallel: ParallelConfig, world_size: int, rank: int, item_size: int
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
    etp = parallel.etp or parallel.tp
    per_stage = world_size // parallel.pp
    stage, in_stage = divmod(rank, per_stage)
    pieces = parallel.pieces(shape.num_layers)
    own = [pieces[i] for i in range(stage, len(pieces), parallel.pp)]
    per_rank = shape.num_experts // parallel.ep
    first_expert = in_stage // etp % parallel.ep * per_rank
    found: list[Shard] = []

    def add(name: str, rule: Rule, prefix: str, size: int, *, expert: int | None = None) -> None:
        sizes = list(rule.hf.values())
        is_sharded, first = rule.kind != "replicated", sizes[0]
        rows = sum(each[0] for each in sizes)
        count = size if is_sharded else 1
        if rule.kind == "row":
            local: tuple[int, ...] = (*first[:-1], first[-1] // count)
        else:
            local = (math.ceil(rows / count), *first[1:])  # a vocabulary is padded to the ranks
        found.append(
            Shard(
                name=name,
                hf=tuple(prefix + part.format(e=expert) for part in rule.hf),
                kind=rule.kind,
                index=in_stage % size if is_sharded else 0,
                count=count,
                shape=local,
                rows=rows,
                # Biases of routers are float32 in every policy.
                item_size=4 if name.endswith("expert_bias") else item_size,
            )
        )

    is_first, is_last = stage == 0, stage == parallel.pp - 1
    has_head = is_last and (not shape.tied or len(pieces) > 1)
    top = {
        "embedding.word_embeddings.weight": is_first,
        "decoder.final_layernorm.weight": is_last,
        "output_layer.weight": has_head,
    }
    for name, rule in rules.top.items():
        if top[name]:
            add(name, rule, "", parallel.tp)
    for layer in (layer for piece in own for layer in piece):
        where, prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for suffix, rule in rules.layers[layer].items():
            add(where + suffix, rule, prefix, parallel.tp)
        if layer not in shape.moe_layers:
            continue
        for expert in range(first_expert, first_expert + per_rank):
            for suffix, rule in rules.expert.items():
                name = f"{where}mlp.experts.{expert}.{suffix}"
                add(name, rule, prefix, etp, expert=expert)
    return found


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


@dataclass(frozen=True, kw_only=True)
class SyncPlan(Generic[S]):
    """How one rank reads the whole model.

    Attributes:
        tensors: Megatron's name -> any shard of the tensor, in the order of reading.
        holders: shard -> rank -> that rank's shard.
        sources: shard -> rank that the reader takes it from.
        crossing: shards that all ranks send over the network together.
    """

    tensors: dict[str, S]
    holders: dict[ShardId, dict[int, S]]
    sources: dict[ShardId, int]
    crossing: set[ShardId]
    reader: int

    @classmethod
    def make(cls, shards: Sequence[Sequence[S]], hosts: Sequence[str], reader: int) -> SyncPlan[S]:
        """Plan the reads of rank `reader`.

        Args:
            shards: of every rank.
            hosts: machine of each rank.
            reader: the rank that reads.
        """
        return cls.of(*collect(shards), hosts, reader)

    @classmethod
    def of(
        cls,
        tensors: dict[str, S],
        holders: dict[ShardId, dict[int, S]],
        hosts: Sequence[str],
        reader: int,
    ) -> SyncPlan[S]:
        """Plan the reads of rank `reader`, given what `collect` returned.

        A shard's source is the reader itself, else a rank of its machine (readers spread over the
        replicas), else the lowest rank that has it. All ranks send together, from the lowest rank
        that has it, a shard that no rank of some machine has.
        """
        sources: dict[ShardId, int] = {}
        crossing: set[ShardId] = set()
        machines = set(hosts)
        for shard_id, ranks in holders.items():
            near = [rank for rank in ranks if hosts[rank] == hosts[reader]]
            if {hosts[rank] for rank in ranks} != machines:
                crossing.add(shard_id)
                sources[shard_id] = min(ranks)
            else:
                sources[shard_id] = reader if reader in ranks else near[reader % len(near)]
        return cls(
            tensors=tensors, holders=holders, sources=sources, crossing=crossing, reader=reader
        )

    @property
    def traffic(self) -> Traffic:
        """Shards and bytes that the rank reads, by where they are."""
        read: dict[str, list[int]] = {"local": [], "peer": [], "network": []}
        for shard_id, source in self.sources.items():
            if source == self.reader:
                where = "local"
            else:
                where = "network" if shard_id in self.crossing else "peer"
            read[where].append(self.holders[shard_id][source].nbytes)
        return Traffic(**{where: (len(sizes), sum(sizes)) for where, sizes in read.items()})


def collect(
    shards: Sequence[Sequence[S]],
) -> tuple[dict[str, S], dict[ShardId, dict[int, S]]]:
    """Return `tensors` and `holders` of a `SyncPlan`, given the shards of every rank."""
    holders: dict[ShardId, dict[int, S]] = {}
    tensors: dict[str, S] = {}
    for rank, own in enumerate(shards):
        for shard in own:
            holders.setdefault((shard.name, shard.index), {})[rank] = shard
            tensors.setdefault(shard.name, shard)
    for name, shard in tensors.items():
        lost = [index for index in range(shard.count) if (name, index) not in holders]
        assert not lost, f"no rank has shards {lost} of {shard.count} of {name}"
    # A tied embedding is on the last pipeline stage too, as the output layer: read once.
    first = {hf: name for name, shard in reversed(tensors.items()) for hf in shard.hf}
    kept = {name: shard for name, shard in tensors.items() if first[shard.hf[0]] == name}
    # Layer by layer, whatever rank has an expert: the engine keeps the parts of a module until it
    # is complete. In the order of ranks, it would keep the experts of all layers to the end.
    order = dict(sorted(kept.items(), key=lambda item: _layer_of(item[0])))
    wanted = [(name, index) for name, shard in order.items() for index in range(shard.count)]
    return order, {shard_id: holders[shard_id] for shard_id in wanted}


def _layer_of(name: str) -> int:
    """Return the decoder layer of a tensor by its global Megatron name; -1 = in no layer."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def sync_plans(
    shape: ModelShape,
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
    world_size, etp = len(hosts), parallel.etp or parallel.tp
    made: dict[tuple[int, ...], list[Shard]] = {}  # data-parallel ranks have the same
    shards = []
    for rank in range(world_size):
        stage, in_stage = divmod(rank, world_size // parallel.pp)
        place = (stage, in_stage % parallel.tp, in_stage % (etp * parallel.ep))
        if place not in made:
            made[place] = planned_shards(shape, parallel, world_size, rank, item_size)
        shards.append(made[place])
    tensors, holders = collect(shards)
    for reader in readers:
        yield SyncPlan.of(tensors, holders, hosts, reader)
