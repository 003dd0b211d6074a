"""Families that are dense, or whose routers choose by softmax: one function each.

A function reads what its family adds to the common keys of config.json, and returns fields of
`ModelShape`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3.models.hf_config import HfConfig, ShapeError
from r3.models.sizes import ClampedGate, DeltaSizes, MoeNames


def llama(hf: HfConfig) -> dict[str, Any]:
    """Llama (arXiv 2302.13971, 2307.09288): the plain dense decoder."""
    # vLLM follows these, which other families with this class have.
    hf.refuse("bias", "qkv_bias")
    hf.only("logit_scale", 1.0)
    return {}


def qwen2(hf: HfConfig) -> dict[str, Any]:
    """Qwen2 (arXiv 2407.10671): biases on queries, keys and values."""
    hf.refuse("qk_norm")
    return {"qkv_bias": True}


def qwen3(_hf: HfConfig) -> dict[str, Any]:
    """Qwen3 (arXiv 2505.09388): queries and keys are normalised per head."""
    return {"qk_norm": "head"}


def _qwen_moe(hf: HfConfig) -> dict[str, Any]:
    hf.only("scoring_func", "softmax")
    dense, every = (
        hf.values.get("mlp_only_layers") or (),
        hf.number("decoder_sparse_step", default=1),
    )
    num_layers = hf.number("num_hidden_layers")
    return dict(
        num_experts=hf.number("num_local_experts", "num_experts"),
        topk=hf.number("num_experts_per_tok"),
        moe_ffn_size=hf.number("moe_intermediate_size"),
        # The default of transformers: save_pretrained may leave the key out.
        norm_topk_prob=bool(hf.values.get("norm_topk_prob", False)),
        moe_layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0),
    )


def qwen3_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen3-MoE (arXiv 2505.09388): softmax router, no shared expert."""
    hf.refuse("shared_expert_intermediate_size")
    return qwen3(hf) | _qwen_moe(hf)


def qwen2_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen2-MoE (arXiv 2407.10671): one shared expert behind a sigmoid gate."""
    return _qwen_moe(hf) | dict(
        qkv_bias=bool(hf.values.get("qkv_bias", True)),
        shared_ffn_size=hf.number("shared_expert_intermediate_size"),
        moe_names=MoeNames(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
    )


def qwen3_next(hf: HfConfig) -> dict[str, Any]:
    """Qwen3-Next: gated delta layers with one layer of gated attention in four."""
    return qwen2_moe(hf) | _hybrid(hf, interleaved=True) | {"qkv_bias": False}


def qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    """The text model of Qwen3.5 and 3.6: as Qwen3-Next, experts in every layer."""
    hf.only("norm_topk_prob", True)
    hf.only("decoder_sparse_step", 1)
    hf.refuse("mlp_only_layers")
    moe = qwen2_moe(hf) | {"norm_topk_prob": True, "qkv_bias": False}
    gate, up, down = (f"mlp.experts.{{e}}.{part}_proj.weight" for part in ("gate", "up", "down"))
    fused = (("mlp.experts.gate_up_proj", (gate, up)), ("mlp.experts.down_proj", (down,)))
    return (
        moe
        | _hybrid(hf, interleaved=False)
        | dict(
            moe_names=replace(moe["moe_names"], may_be_stacked=fused),
            num_mtp_layers=hf.number("mtp_num_hidden_layers", default=0, least=0),
        )
    )


def qwen3_5(hf: HfConfig) -> dict[str, Any]:
    """The text model of Qwen3.5 and later ones, dense: as Qwen3-Next without experts."""
    mtp = hf.number("mtp_num_hidden_layers", default=0, least=0)
    return _hybrid(hf, interleaved=False) | {"num_mtp_layers": mtp}


def _hybrid(hf: HfConfig, *, interleaved: bool) -> dict[str, Any]:
    hf.only("attn_output_gate", True)
    state_dtype = hf.values.get("mamba_ssm_dtype") if not interleaved else None  # Qwen3.5's
    if state_dtype not in (None, "float32", "bfloat16"):
        raise ShapeError(f"mamba_ssm_dtype {state_dtype!r} must be float32 or bfloat16")
    num_layers = hf.number("num_hidden_layers")
    every = hf.number("full_attention_interval", default=4)
    kinds = hf.values.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)
    ]
    known = {"full_attention", "linear_attention"}
    if len(kinds) != num_layers or not known.issuperset(kinds):
        raise ShapeError(
            f"layer_types {kinds} must name full_attention or linear_attention for each of the "
            f"{num_layers} layers"
        )
    sizes = DeltaSizes(
        key_heads=hf.number("linear_num_key_heads"),
        value_heads=hf.number("linear_num_value_heads"),
        key_size=hf.number("linear_key_head_dim"),
        value_size=hf.number("linear_value_head_dim"),
        taps=hf.number("linear_conv_kernel_dim"),
        interleaved=interleaved,
        state_dtype=state_dtype or "",
    )
    if sizes.value_heads % sizes.key_heads:
        raise ShapeError(
            f"linear_num_value_heads {sizes.value_heads} is no multiple of "
            f"linear_num_key_heads {sizes.key_heads}"
        )
    return dict(
        qk_norm="head",
        centred_norms=True,
        output_gate=True,
        delta=sizes,
        delta_layers=tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
    )


def olmoe(hf: HfConfig) -> dict[str, Any]:
    """OLMoE (arXiv 2409.02060): q and k normalised over all heads together, plain gates."""
    # vLLM has both values as constants (the second one for the norms of q and k).
    hf.only("norm_topk_prob", False)
    hf.only("rms_norm_eps", 1e-5)
    hf.only("scoring_func", "softmax")
    hf.refuse("sliding_window")
    return dict(
        qk_norm="all",
        num_experts=hf.number("num_local_experts", "num_experts"),
        topk=hf.number("num_experts_per_tok"),
        moe_ffn_size=hf.number("intermediate_size"),
        norm_topk_prob=False,
        moe_layers=tuple(range(hf.number("num_hidden_layers"))),
    )


def mixtral(hf: HfConfig) -> dict[str, Any]:
    """Mixtral (arXiv 2401.04088): gates always renormalised, its own names for the MoE tensors."""
    hf.refuse("sliding_window")
    hf.only("scoring_func", "softmax")
    return dict(
        num_experts=hf.number("num_local_experts"),
        topk=hf.number("num_experts_per_tok"),
        moe_ffn_size=hf.number("intermediate_size"),
        moe_layers=tuple(range(hf.number("num_hidden_layers"))),
        moe_names=MoeNames(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{e}",
            gate_up_down=("w1", "w3", "w2"),
        ),
    )


def ernie4_5_moe(hf: HfConfig) -> dict[str, Any]:
    """ERNIE 4.5: softmax router whose biases move the choice of experts, not their gates."""
    hf.only("use_moe", True)
    hf.only("use_bias", False)  # vLLM and transformers differ in what has one
    hf.only("moe_norm_min", 1e-12)  # vLLM has none
    num_layers, moe_ffn_size = hf.number("num_hidden_layers"), hf.number("moe_intermediate_size")
    first = hf.number("moe_layer_start_index", default=1, least=0)
    last = hf.number("moe_layer_end_index", default=-1, least=-1) % num_layers
    every = hf.number("moe_layer_interval", default=1)
    bias = "mlp.gate.e_score_correction_bias"
    return dict(
        tied=bool(hf.values.get("tie_word_embeddings", True)),
        interleaved_rope=True,
        num_experts=hf.number("moe_num_experts"),
        topk=hf.number("moe_k"),
        moe_ffn_size=moe_ffn_size,
        shared_ffn_size=moe_ffn_size * hf.number("moe_num_shared_experts", default=2, least=0),
        engine_router_fp32=True,
        moe_layers=tuple(i for i in range(first, last + 1) if (i + 1) % every == 0),
        moe_names=MoeNames(
            router_bias=bias, stacked=(("mlp.moe_statics.e_score_correction_bias", (bias,)),)
        ),
        num_mtp_layers=hf.number("num_nextn_predict_layers", default=0, least=0),
    )


def granitemoe(hf: HfConfig) -> dict[str, Any]:
    """Granite-MoE 3.0 and 3.1: multipliers, and one tensor for the experts of a layer."""
    moe, expert = "block_sparse_moe", "block_sparse_moe.experts.{e}"
    gate, up, down = (f"{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return dict(
        embedding_multiplier=hf.real("embedding_multiplier", default=1.0),
        attention_multiplier=hf.real("attention_multiplier", default=1.0),
        residual_multiplier=hf.real("residual_multiplier", default=1.0),
        logits_scaling=hf.real("logits_scaling", default=1.0),
        num_experts=hf.number("num_local_experts"),
        topk=hf.number("num_experts_per_tok"),
        moe_ffn_size=hf.number("intermediate_size"),
        moe_layers=tuple(range(hf.number("num_hidden_layers"))),
        moe_names=MoeNames(
            router=f"{moe}.gate",
            expert=expert,
            stacked=(
                (f"{moe}.router.layer.weight", (f"{moe}.gate.weight",)),
                (f"{moe}.input_linear.weight", (gate, up)),
                (f"{moe}.output_linear.weight", (down,)),
            ),
        ),
    )


def gpt_oss(hf: HfConfig) -> dict[str, Any]:
    """gpt-oss (arXiv 2508.10925): sinks, a window in every second layer, biases, clamped gates."""
    # vLLM has these as constants.
    hf.only("attention_bias", True)
    hf.only("swiglu_limit", 7.0)
    hf.only("swiglu_alpha", 1.702)
    hf.rope.refuse("attention_factor", "mscale", "mscale_all_dim")
    if hf.rope.values.get("rope_type") != "yarn":
        raise ShapeError("rope_parameters must be given, with rope_type 'yarn'")
    layers = range(hf.number("num_hidden_layers"))
    kinds = [("sliding" if i % 2 == 0 else "full") + "_attention" for i in layers]
    hf.only("layer_types", kinds)
    parts, expert = ("gate_proj", "up_proj", "down_proj"), "mlp.experts.{e}"
    weights, biases = ([f"{expert}.{x}.{kind}" for x in parts] for kind in ("weight", "bias"))
    return dict(
        qkv_bias=True,
        has_biases=True,
        sinks=True,
        window=hf.number("sliding_window"),
        window_layers=tuple(layers[::2]),
        clamped_gate=ClampedGate(limit=7.0, slope=1.702, offset=1.0),
        num_experts=hf.number("num_local_experts"),
        topk=hf.number("num_experts_per_tok"),
        moe_ffn_size=hf.number("intermediate_size"),
        moe_layers=tuple(layers),
        moe_names=MoeNames(
            router="mlp.router",
            alternates=True,
            stacked=(
                ("mlp.experts.gate_up_proj", tuple(weights[:2])),
                ("mlp.experts.gate_up_proj_bias", tuple(biases[:2])),
                ("mlp.experts.down_proj", tuple(weights[2:])),
                ("mlp.experts.down_proj_bias", tuple(biases[2:])),
            ),
        ),
    )
