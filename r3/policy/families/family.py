"""What a model family has to say: how its HF config becomes Megatron's, and which HF tensors make each Megatron tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["replicated", "column", "row", "qkv", "gated"]
"""How a Megatron tensor is cut over tensor parallel ranks and made of HF tensors:

replicated  the same everywhere
column      dim 0 is cut
row         the last dim is cut
qkv         q, k, v interleaved by key-value group, then dim 0 is cut
gated       gate over up, each cut along dim 0 (every rank holds its part of both)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A Megatron tensor of one layer: the HF names (without `model.layers.N.`) it is made of, and how it is cut."""

    hf: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        model_type, architecture: as in config.json.
        megatron: HF config -> keyword arguments of Megatron's TransformerConfig that differ from the common ones.
        layer: suffix after `decoder.layers.N.` -> Rule; buffers of the checkpoint (expert biases) stand here as well.
        expert: `linear_fc1.weight` and `linear_fc2.weight` of one expert -> Rule; `{e}` stands for the expert's number.
        top: tensors outside the layers, full Megatron name -> Rule with full HF names.
        attention: parts of Megatron's self-attention that are other modules than the common ones, by their field's name.
    """

    model_type: str
    architecture: str
    megatron: Callable[[Any], dict[str, Any]]
    layer: Mapping[str, Rule]
    expert: Mapping[str, Rule]
    top: Mapping[str, Rule]
    attention: Mapping[str, type] = field(default_factory=dict)


def rule(kind: Kind, *hf: str) -> Rule:
    """Short form for tables."""
    return Rule(hf=hf, kind=kind)


TOP: dict[str, Rule] = {
    "embedding.word_embeddings.weight": rule("column", "model.embed_tokens.weight"),
    "output_layer.weight": rule("column", "lm_head.weight"),
    "decoder.final_layernorm.weight": rule("replicated", "model.norm.weight"),
}

NORMS: dict[str, Rule] = {
    "input_layernorm.weight": rule("replicated", "input_layernorm.weight"),
    "pre_mlp_layernorm.weight": rule("replicated", "post_attention_layernorm.weight"),
}

ATTENTION: dict[str, Rule] = {
    "self_attention.linear_qkv.weight": rule("qkv", *(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_proj.weight": rule("row", "self_attn.o_proj.weight"),
}

QKV_BIAS: dict[str, Rule] = {
    "self_attention.linear_qkv.bias": rule("qkv", *(f"self_attn.{x}_proj.bias" for x in "qkv")),
}

QK_NORM: dict[str, Rule] = {
    "self_attention.q_layernorm.weight": rule("replicated", "self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": rule("replicated", "self_attn.k_norm.weight"),
}

DENSE_MLP: dict[str, Rule] = {
    "mlp.linear_fc1.weight": rule("gated", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": rule("row", "mlp.down_proj.weight"),
}

ROUTER: dict[str, Rule] = {"mlp.router.weight": rule("replicated", "mlp.gate.weight")}

EXPERT: dict[str, Rule] = {
    "linear_fc1.weight": rule(
        "gated", "mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"
    ),
    "linear_fc2.weight": rule("row", "mlp.experts.{e}.down_proj.weight"),
}


def shared_expert(hf_prefix: str) -> dict[str, Rule]:
    """The MLP that sees every token beside the routed experts."""
    gate_up = (f"{hf_prefix}.gate_proj.weight", f"{hf_prefix}.up_proj.weight")
    return {
        "mlp.shared_experts.linear_fc1.weight": rule("gated", *gate_up),
        "mlp.shared_experts.linear_fc2.weight": rule("row", f"{hf_prefix}.down_proj.weight"),
    }


def softmax_router(
    num_experts: int, topk: int, ffn_size: int, *, norm_topk_prob: bool
) -> dict[str, Any]:
    """Megatron's arguments for experts behind a softmax router.

    Renormalising the top k after a softmax over all experts is a softmax over the k logits.
    """
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn_size,
        "moe_router_pre_softmax": not norm_topk_prob,
    }


def sparse_layers(hf: Any) -> dict[str, Any]:
    """Megatron's argument for Qwen's choice of layers that have experts; none where all have."""
    routed = [
        int(layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0)
        for layer in range(hf.num_hidden_layers)
    ]
    return {} if all(routed) else {"moe_layer_freq": routed}
