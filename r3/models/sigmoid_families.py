"""Families whose routers choose by sigmoid, as that of DeepSeek-V3: one function each.

A function reads what its family adds to the common keys of config.json, and returns fields of
`ModelShape`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3.models.hf_config import HfConfig, ShapeError
from r3.models.sizes import LatentAttention, MoeNames


def _sigmoid_moe(
    hf: HfConfig, *, dense: int | None = None, groups: int | None = None
) -> dict[str, Any]:
    """DeepSeek-V3's MoE layers: sigmoid router with biases and groups, shared experts.

    The expert bias moves the choice of experts, not their gates. It is a float32 buffer that R3
    never changes. Multi-token-prediction layers are left out.

    Args:
        dense: dense layers where config.json has no number of them.
        groups: groups of experts where config.json has no number of them.
    """
    hf.only("scoring_func", "sigmoid", *(("noaux_tc",) if groups else ()))  # of dots.llm1
    hf.only("topk_method", "noaux_tc")
    hf.only("norm_topk_prob", True)
    hf.only("moe_layer_freq", 1)
    num_experts = hf.number("num_local_experts", "n_routed_experts", "num_experts")
    topk = hf.number("num_experts_per_tok")
    groups, chosen = (hf.number(name, default=groups) for name in ("n_group", "topk_group"))
    if num_experts % groups or chosen > groups:
        raise ShapeError(
            f"{num_experts} experts do not make n_group {groups} groups of which topk_group "
            f"{chosen} are chosen: n_group must divide the experts, topk_group must be <= n_group"
        )
    if chosen < groups and topk // chosen != 2:
        raise ShapeError(
            f"num_experts_per_tok {topk} // topk_group {chosen} must be 2, as in DeepSeek-V3: "
            "Megatron rates a group by that many of its best experts, transformers and vLLM by "
            "the best 2"
        )
    moe_ffn_size = hf.number("moe_intermediate_size")
    first = hf.number("first_k_dense_replace", default=dense, least=0)
    num_layers = hf.number("num_hidden_layers")
    return dict(
        num_experts=num_experts,
        topk=topk,
        moe_ffn_size=moe_ffn_size,
        shared_ffn_size=moe_ffn_size * hf.number("n_shared_experts", "num_shared_experts"),
        router_score="sigmoid",
        router_scale=hf.real("routed_scaling_factor", default=1.0),
        expert_groups=groups,
        topk_groups=chosen,
        moe_layers=tuple(range(first, num_layers)),
        moe_names=MoeNames(router_bias="mlp.gate.e_score_correction_bias"),
        num_mtp_layers=hf.number("num_mtp_layers", "num_nextn_predict_layers", default=0, least=0),
    )


def minimax_m2(hf: HfConfig) -> dict[str, Any]:
    """MiniMax-M2: norms of queries and keys over all heads, sigmoid router with biases, no groups.

    The published files give the rotated dimensions of a head instead of their share.
    """
    hf.only("use_qk_norm", True)
    hf.only("qk_norm_type", "per_layer")
    hf.refuse("shared_intermediate_size", "attn_window_size")
    hf.only("attn_type_list", [1] * hf.number("num_hidden_layers"))
    rotated = hf.number("rotary_dim")  # vLLM has no default
    share = rotated / hf.number("head_dim")
    HfConfig({**hf.values, **hf.rope.values}, hf.faults).only("partial_rotary_factor", share)
    return dict(
        rotary_size=rotated,
        qk_norm="all",
        num_experts=hf.number("num_local_experts"),
        topk=hf.number("num_experts_per_tok"),
        moe_ffn_size=hf.number("intermediate_size"),
        router_score="sigmoid",
        engine_router_fp32=True,
        moe_layers=tuple(range(hf.number("num_hidden_layers"))),
        moe_names=MoeNames(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{e}",
            gate_up_down=("w1", "w3", "w2"),
            router_bias="block_sparse_moe.e_score_correction_bias",
        ),
        num_mtp_layers=hf.number("num_mtp_modules", default=0, least=0),
    )


def _latent_attention(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek's latent attention."""
    _check_latent_rope(hf)
    hf.only("rope_interleave", True)
    hf.only("num_key_value_heads", hf.values.get("num_attention_heads"))
    latent = LatentAttention(
        query_rank=hf.number("q_lora_rank", default=0),
        kv_rank=hf.number("kv_lora_rank"),
        nope_size=hf.number("qk_nope_head_dim"),
        rope_size=hf.number("qk_rope_head_dim"),
        value_size=hf.number("v_head_dim"),
    )
    return dict(
        latent=latent,
        num_kv_heads=hf.number("num_attention_heads"),
        head_dim=latent.nope_size + latent.rope_size,
        rotary_size=latent.rope_size,
    )


def bailing_moe_v2(hf: HfConfig) -> dict[str, Any]:
    """Ling and Ring 2.0: the router of DeepSeek-V3, attention of Qwen3, names of their own."""
    hf.only("router_dtype", "fp32")
    hf.only("tie_word_embeddings", False)
    # vLLM follows the first of these.
    rotated = int(hf.number("head_dim") * hf.real("partial_rotary_factor", default=1.0))
    hf.only("rotary_dim", rotated)
    hf.only("moe_shared_expert_intermediate_size", hf.values.get("moe_intermediate_size"))
    hf.refuse("use_bias", "use_qkv_bias", "norm_head")
    moe = _sigmoid_moe(hf)
    theirs, ours = "model.layers.{n}.attention", "model.layers.{n}.self_attn"
    return moe | dict(
        qk_norm="head",
        moe_names=replace(moe["moe_names"], router_bias="mlp.gate.expert_bias"),
        renamed=(
            ("model.word_embeddings.weight", ("model.embed_tokens.weight",)),
            (
                f"{theirs}.query_key_value.weight",
                tuple(f"{ours}.{x}_proj.weight" for x in ("q", "k", "v")),
            ),
            (f"{theirs}.dense.weight", (f"{ours}.o_proj.weight",)),
            (f"{theirs}.query_layernorm.weight", (f"{ours}.q_norm.weight",)),
            (f"{theirs}.key_layernorm.weight", (f"{ours}.k_norm.weight",)),
        ),
    )


def deepseek_v3(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3 (arXiv 2412.19437) and Moonlight: latent attention and this router."""
    # 2.5 is the default of transformers, which vLLM reads too.
    scale = hf.real("routed_scaling_factor", default=2.5)
    return _sigmoid_moe(hf) | _latent_attention(hf) | {"router_scale": scale}


def sparse_mla(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5: attention sees the best `index_topk` tokens.

    A conversation that is no longer is seen whole, whatever the indexers choose. Longer ones are
    refused, as beyond the model's context.
    """
    layers = hf.number("num_hidden_layers")
    dense = hf.number("first_k_dense_replace", least=0)
    hf.only("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense))
    hf.only("layer_types", ["indexed_attention"] * layers)
    index_topk = hf.number("index_topk")
    longest = min(index_topk, hf.number("max_position_embeddings"))
    return deepseek_v3(hf) | dict(index_topk=index_topk, max_position_embeddings=longest)


def glm4_moe(hf: HfConfig) -> dict[str, Any]:
    """GLM-4.5 to GLM-4.7 (arXiv 2508.06471): half of each head is rotated, DeepSeek-V3's router.

    Queries, keys and values have biases. The larger models normalise queries and keys per head.
    """
    return _sigmoid_moe(hf) | dict(
        qkv_bias=bool(hf.values.get("attention_bias", False)),
        qk_norm="head" if hf.values.get("use_qk_norm", False) else "none",
        engine_router_fp32=True,
    )


def solar_open(hf: HfConfig) -> dict[str, Any]:
    """Solar-Open: GLM-4.5's experts in every layer, Llama's attention."""
    hf.only("first_k_dense_replace", 0)
    hf.refuse("use_qk_norm")
    return _sigmoid_moe(hf, dense=0, groups=1) | {"engine_router_fp32": True}


def dots1(hf: HfConfig) -> dict[str, Any]:
    """dots.llm1 (arXiv 2506.05767): Qwen3's attention, DeepSeek-V3's router without groups."""
    return _sigmoid_moe(hf, dense=0, groups=1) | {"qk_norm": "head", "engine_router_fp32": True}


def glm4_moe_lite(hf: HfConfig) -> dict[str, Any]:
    """GLM-4.7-Flash: DeepSeek-V3's attention and router in other sizes."""
    # vLLM counts the dense layers, transformers has a kind for each layer.
    dense = hf.number("first_k_dense_replace", least=0)
    kinds = ["dense"] * dense + ["sparse"] * (hf.number("num_hidden_layers") - dense)
    # Without the key, transformers takes one dense layer.
    hf.only("mlp_layer_types", kinds)
    if dense != 1 and hf.values.get("mlp_layer_types") is None:
        raise ShapeError(f"first_k_dense_replace {dense} needs mlp_layer_types in config.json")
    return _sigmoid_moe(hf) | _latent_attention(hf) | {"engine_router_fp32": True}


def _check_latent_rope(hf: HfConfig) -> None:
    """Refuse the parts of YaRN that vLLM does not implement for latent attention."""
    scaling = hf.rope_scaling()
    if scaling is None:
        return
    if scaling.kind != "yarn":
        raise ShapeError(
            f"rope_type {scaling.kind!r} is not supported with latent attention, "
            "only default and yarn are"
        )
    hf.rope.refuse("attention_factor")
    hf.rope.only("truncate", True)
    if scaling.attention_factor != 1.0:
        mscale, all_dim = (hf.rope.values.get(key) for key in ("mscale", "mscale_all_dim"))
        raise ShapeError(
            f"mscale {mscale!r} and mscale_all_dim {all_dim!r} must be given and equal, "
            "as in DeepSeek-V3: rotated and other parts of a head are scaled alike"
        )
