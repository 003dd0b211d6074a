"""The tensors of a model: names and shapes in the checkpoint, Megatron's names, who has what.

Everything follows from `ModelSizes`, without torch. Loading, weight sync and export use the rules;
a weight sync has a plan of which rank reads which shard from whom.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Literal, TypeVar

from r3.models.sizes import LatentAttention, ModelSizes

Kind = Literal["replicated", "column", "row", "qkv", "gated"]
"""How a Megatron tensor is made of HF tensors and sharded over tensor-parallel ranks:

replicated  the same on all ranks
column      sharded along dim 0
row         sharded along the last dim
qkv         q, k and v interleaved by key-value group, then sharded along dim 0
gated       gate over up, each sharded along dim 0 (every rank has a part of both)
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """The HF tensors that make one Megatron tensor: name -> shape, in the order they are joined."""

    kind: Kind
    hf: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """All rules of one model.

    Attributes:
        top: full Megatron name -> rule with full HF names, for tensors outside the layers.
        layers: for each layer, suffix after `decoder.layers.N.` -> rule with suffixes after
            `model.layers.N.`, without experts. Buffers that belong to the checkpoint (expert
            biases) are here as well.
        expert: suffix after the expert's number -> rule; `{e}` stands for that number.
    """

    top: Mapping[str, Rule]
    layers: Sequence[Mapping[str, Rule]]
    expert: Mapping[str, Rule]


@lru_cache(maxsize=16)
def conversion_rules(shape: ModelSizes) -> Rules:
    """Return the rules for every tensor that Megatron builds for this model."""
    hidden, names = shape.hidden_size, shape.moe_names
    embedding = Rule("column", {"model.embed_tokens.weight": (shape.vocab_size, hidden)})
    head = Rule("column", {"lm_head.weight": (shape.vocab_size, hidden)})
    top = {
        "embedding.word_embeddings.weight": embedding,
        # With tied embeddings the last pipeline stage has a copy of the embedding.
        "output_layer.weight": embedding if shape.tied else head,
        "decoder.final_layernorm.weight": _whole("model.norm.weight", hidden),
    }
    attention = _latent_attention(shape, shape.latent) if shape.latent else _attention(shape)
    delta = {
        # `r3.backends.delta` names its parameters so.
        f"self_attention.{name.replace('.', '_')}": _whole(f"linear_attn.{name}", *size)
        for name, size in (shape.delta.tensor_shapes(hidden) if shape.delta else {}).items()
    }
    dense = _mlp("mlp.", "mlp", shape.ffn_size, hidden)

    moe = {"mlp.router.weight": _whole(f"{names.router}.weight", shape.num_experts, hidden)}
    if shape.has_biases:
        moe["mlp.router.bias"] = _whole(f"{names.router}.bias", shape.num_experts)
    if names.router_bias:
        moe["mlp.router.expert_bias"] = _whole(names.router_bias, shape.num_experts)
    if shape.shared_ffn_size:
        moe |= _mlp("mlp.shared_experts.", names.shared_expert, shape.shared_ffn_size, hidden)
    if names.shared_gate:
        moe["mlp.shared_experts.gate_weight"] = _whole(f"{names.shared_gate}.weight", 1, hidden)
    expert = _mlp("", names.expert, shape.moe_ffn_size, hidden, names.gate_up_down)
    if shape.has_biases:
        gate, up, down = (f"{names.expert}.{part}.bias" for part in names.gate_up_down)
        size = (shape.moe_ffn_size,)
        expert["linear_fc1.bias"] = Rule("gated", {gate: size, up: size})
        expert["linear_fc2.bias"] = _whole(down, hidden)

    layers = [
        {
            "input_layernorm.weight": _whole("input_layernorm.weight", hidden),
            **(delta if number in shape.delta_layers else attention),
            "pre_mlp_layernorm.weight": _whole("post_attention_layernorm.weight", hidden),
            **(moe if number in shape.moe_layers else dense),
        }
        for number in range(shape.num_layers)
    ]
    return Rules(top=top, layers=layers, expert=expert)


def _whole(name: str, *size: int) -> Rule:
    return Rule("replicated", {name: size})


def _mlp(
    ours: str,
    theirs: str,
    size: int,
    hidden: int,
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Rule]:
    gate, up, down = (f"{theirs}.{part}.weight" for part in gate_up_down)
    return {
        f"{ours}linear_fc1.weight": Rule("gated", {gate: (size, hidden), up: (size, hidden)}),
        f"{ours}linear_fc2.weight": Rule("row", {down: (hidden, size)}),
    }


def _attention(shape: ModelSizes) -> dict[str, Rule]:
    hidden, ours, theirs = shape.hidden_size, "self_attention", "self_attn"
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    widths = {"q": (2 if shape.output_gate else 1) * queries, "k": keys, "v": keys}
    weights = {f"{theirs}.{x}_proj.weight": (width, hidden) for x, width in widths.items()}
    biases = {f"{theirs}.{x}_proj.bias": (width,) for x, width in widths.items()}
    rules = {f"{ours}.linear_qkv.weight": Rule("qkv", weights)}
    if shape.qkv_bias:
        rules[f"{ours}.linear_qkv.bias"] = Rule("qkv", biases)
    rules[f"{ours}.linear_proj.weight"] = Rule(
        "row", {f"{theirs}.o_proj.weight": (hidden, queries)}
    )
    if shape.has_biases:
        rules[f"{ours}.linear_proj.bias"] = _whole(f"{theirs}.o_proj.bias", hidden)
    if shape.sinks:
        sinks = Rule("column", {f"{theirs}.sinks": (shape.num_heads,)})
        rules[f"{ours}.core_attention.sinks"] = sinks
    if shape.qk_norm != "none":
        for x, width in (("q", queries), ("k", keys)):
            size = width if shape.qk_norm == "all" else shape.head_dim
            rules[f"{ours}.{x}_layernorm.weight"] = _whole(f"{theirs}.{x}_norm.weight", size)
    return rules


def _latent_attention(shape: ModelSizes, latent: LatentAttention) -> dict[str, Rule]:
    hidden, heads, query_rank = shape.hidden_size, shape.num_heads, latent.query_rank
    queries = heads * (latent.nope_size + latent.rope_size)
    values = heads * (latent.nope_size + latent.value_size)
    table: list[tuple[str, Kind, str, tuple[int, ...]]] = [
        ("linear_q_proj", "column", "q_proj", (queries, hidden))
    ]
    if query_rank:
        table = [
            ("linear_q_down_proj", "replicated", "q_a_proj", (query_rank, hidden)),
            ("q_layernorm", "replicated", "q_a_layernorm", (query_rank,)),
            ("linear_q_up_proj", "column", "q_b_proj", (queries, query_rank)),
        ]
    compressed = (latent.kv_rank + latent.rope_size, hidden)
    table += [
        ("linear_kv_down_proj", "replicated", "kv_a_proj_with_mqa", compressed),
        ("kv_layernorm", "replicated", "kv_a_layernorm", (latent.kv_rank,)),
        ("linear_kv_up_proj", "column", "kv_b_proj", (values, latent.kv_rank)),
        ("linear_proj", "row", "o_proj", (hidden, heads * latent.value_size)),
    ]
    return {
        f"self_attention.{ours}.weight": Rule(kind, {f"self_attn.{theirs}.weight": size})
        for ours, kind, theirs, size in table
    }


ShardId = tuple[str, int]
"""A tensor's name and the number of its shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Neighbouring experts of a layer, and one of their tensors: what lies together everywhere.

    Attributes:
        layer: number of the decoder layer.
        first, count: the experts.
        part: the tensor, a key of `Rules.expert`. All experts' tensors are stacked: gate over up
            `[n, 2F, D]`, down `[n, D, F]`, biases `[n, 2F]` and `[n, D]`.
    """

    layer: int
    first: int
    count: int
    part: str

    def names(self, shape: ModelSizes) -> tuple[str, ...]:
        """HF tensors, expert by expert."""
        experts, prefix = range(self.first, self.first + self.count), f"model.layers.{self.layer}."
        parts = conversion_rules(shape).expert[self.part].hf
        return tuple(prefix + name.format(e=e) for e in experts for name in parts)

    @property
    def name(self) -> str:
        """Megatron's, with a range in the place of the expert's number."""
        last = self.first + self.count - 1
        return f"decoder.layers.{self.layer}.mlp.experts.{self.first}-{last}.{self.part}"

    @classmethod
    def within(
        cls, shape: ModelSizes, layer: int, part: str, experts: range, item_size: int
    ) -> Iterator[Experts]:
        """Cut a rank's experts of a layer so that a full tensor stays below `_SHARD_BYTES`."""
        sizes = conversion_rules(shape).expert[part].hf.values()
        count = max(1, _SHARD_BYTES // (sum(map(math.prod, sizes)) * item_size))
        for i in range(0, len(experts), count):
            own = experts[i : i + count]
            yield cls(layer=layer, first=own[0], count=len(own), part=part)


_SHARD_BYTES = 1 << 28
"""A reader allocates that much where ranks share the rows of experts, or on another machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's shard of one Megatron tensor, or of that tensor of neighbouring experts.

    Attributes:
        name: Megatron's global name.
        hf: the HF tensors it is made of, expert by expert.
        kind: how the full tensor is sharded.
        index, count: this is shard `index` of `count`.
        shape: shape of the shard.
        rows: rows of the joined HF tensors, of one expert, without padding of the vocabulary.
        item_size: bytes per value.
        layer: number of the decoder layer; -1 = it is in none.
        experts: whose tensors lie along the first dimension; None: it is not a tensor of experts.
    """

    name: str
    hf: tuple[str, ...]
    kind: Kind
    index: int
    count: int
    shape: tuple[int, ...]
    rows: int
    item_size: int
    layer: int = -1
    experts: Experts | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return math.prod(self.shape) * self.item_size

    @property
    def parts(self) -> tuple[str, ...]:
        """The HF tensors of the first expert; without experts, all."""
        return self.hf[: len(self.hf) // (self.experts.count if self.experts else 1)]


S = TypeVar("S", bound=Shard)


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
    def of(
        cls,
        tensors: dict[str, S],
        holders: dict[ShardId, dict[int, S]],
        hosts: Sequence[str],
        reader: int,
    ) -> SyncPlan[S]:
        """Plan the reads of rank `reader`, given what `collect` returned, and every rank's machine.

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


def collect(shards: Sequence[Sequence[S]]) -> tuple[dict[str, S], dict[ShardId, dict[int, S]]]:
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
    order = dict(sorted(kept.items(), key=lambda item: item[1].layer))
    wanted = [(name, index) for name, shard in order.items() for index in range(shard.count)]
    return order, {shard_id: holders[shard_id] for shard_id in wanted}
