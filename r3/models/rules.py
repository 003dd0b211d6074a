"""Conversion of weights: the Hugging Face tensors of each Megatron tensor, and its sharding.

The tables follow from `ModelShape` alone. Loading, weight sync and export all use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from r3.models.shape import ModelShape

Kind = Literal["replicated", "column", "row", "qkv", "gated"]
"""How a Megatron tensor is made of HF tensors and sharded over tensor-parallel ranks:

replicated  the same on all ranks
column      sharded along dim 0
row         sharded along the last dim
qkv         q, k and v interleaved by key-value group, then sharded along dim 0
gated       gate over up, each sharded along dim 0 (every rank has a part of both)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The HF tensors that make one Megatron tensor, in the order they are joined."""

    hf: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """All rules of one model.

    Attributes:
        top: full Megatron name -> rule with full HF names, for tensors outside the layers.
        layer: suffix after `decoder.layers.N.` -> rule with suffixes after `model.layers.N.`.
            Buffers that belong to the checkpoint (expert biases) are here as well.
        expert: suffix after the expert's number -> rule; `{e}` stands for that number.
    """

    top: Mapping[str, Rule]
    layer: Mapping[str, Rule]
    expert: Mapping[str, Rule]


def conversion_rules(shape: ModelShape) -> Rules:
    """Return the rules for every tensor that Megatron builds for this model."""
    layer = {
        "input_layernorm.weight": _rule("replicated", "input_layernorm.weight"),
        "pre_mlp_layernorm.weight": _rule("replicated", "post_attention_layernorm.weight"),
        "mlp.linear_fc1.weight": _rule("gated", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.linear_fc2.weight": _rule("row", "mlp.down_proj.weight"),
    }
    layer |= _LATENT_ATTENTION if shape.latent else _attention(shape)
    for name in shape.delta.tensor_shapes(shape.hidden_size) if shape.delta else ():
        # `r3.layers.delta` names its parameters so.
        ours = f"self_attention.{name.replace('.', '_')}"
        layer[ours] = _rule("replicated", f"linear_attn.{name}")
    embedding = _rule("column", "model.embed_tokens.weight")
    top = {
        "embedding.word_embeddings.weight": embedding,
        # With tied embeddings the last pipeline stage has a copy of the embedding.
        "output_layer.weight": embedding if shape.tied else _rule("column", "lm_head.weight"),
        "decoder.final_layernorm.weight": _rule("replicated", "model.norm.weight"),
    }
    if not shape.moe_layers:
        return Rules(top=top, layer=layer, expert={})

    names = shape.moe_names
    gate, up, down = (f"{names.expert}.{part}.weight" for part in names.gate_up_down)
    expert = {
        "linear_fc1.weight": _rule("gated", gate, up),
        "linear_fc2.weight": _rule("row", down),
    }
    if shape.has_biases:
        gate, up, down = (f"{names.expert}.{part}.bias" for part in names.gate_up_down)
        expert |= {
            "linear_fc1.bias": _rule("gated", gate, up),
            "linear_fc2.bias": _rule("replicated", down),
        }
        layer["mlp.router.bias"] = _rule("replicated", f"{names.router}.bias")
    layer["mlp.router.weight"] = _rule("replicated", f"{names.router}.weight")
    if names.router_bias:
        layer["mlp.router.expert_bias"] = _rule("replicated", names.router_bias)
    if shape.shared_ffn_size:
        gate, up, down = (
            f"{names.shared_expert}.{part}_proj.weight" for part in ("gate", "up", "down")
        )
        layer["mlp.shared_experts.linear_fc1.weight"] = _rule("gated", gate, up)
        layer["mlp.shared_experts.linear_fc2.weight"] = _rule("row", down)
    if names.shared_gate:
        shared_gate = _rule("replicated", f"{names.shared_gate}.weight")
        layer["mlp.shared_experts.gate_weight"] = shared_gate
    return Rules(top=top, layer=layer, expert=expert)


def _rule(kind: Kind, *hf: str) -> Rule:
    return Rule(hf=hf, kind=kind)


def _attention(shape: ModelShape) -> dict[str, Rule]:
    weights, biases = ([f"self_attn.{x}_proj.{part}" for x in "qkv"] for part in ("weight", "bias"))
    rules = {
        "self_attention.linear_qkv.weight": _rule("qkv", *weights),
        "self_attention.linear_proj.weight": _rule("row", "self_attn.o_proj.weight"),
    }
    if shape.qkv_bias:
        rules["self_attention.linear_qkv.bias"] = _rule("qkv", *biases)
    if shape.has_biases:
        output = _rule("replicated", "self_attn.o_proj.bias")
        rules["self_attention.linear_proj.bias"] = output
    if shape.sinks:
        rules["self_attention.core_attention.sinks"] = _rule("column", "self_attn.sinks")
    if shape.qk_norm != "none":
        for x in "qk":
            norm = _rule("replicated", f"self_attn.{x}_norm.weight")
            rules[f"self_attention.{x}_layernorm.weight"] = norm
    return rules


_LATENT_ATTENTION: dict[str, Rule] = {
    "self_attention.linear_q_proj.weight": _rule("column", "self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": _rule("replicated", "self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": _rule("replicated", "self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": _rule("column", "self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": _rule(
        "replicated", "self_attn.kv_a_proj_with_mqa.weight"
    ),
    "self_attention.kv_layernorm.weight": _rule("replicated", "self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": _rule("column", "self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": _rule("row", "self_attn.o_proj.weight"),
}
