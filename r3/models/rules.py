"""The tensors of a model: names and shapes in the checkpoint, Megatron's names, and conversion.

The tables follow from `ModelSizes` alone. Sizes, loading, weight sync and export all use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from r3.models.families import LatentAttention
from r3.models.sizes import ModelSizes

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
        # `r3.layers.delta` names its parameters so.
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
