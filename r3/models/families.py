"""The model families: what each architecture adds to the common keys of config.json.

To add a family, write one function that returns fields of `ModelShape`, and one line in `FAMILIES`.
Everything else follows from the shape: tensor names and sizes (r3/models/shape.py), Megatron's
settings (r3/policy/transformer_config.py) and the conversion of weights (r3/models/tensors.py). A
family with a part that no other one has (a new router, a new attention) needs a field of
`ModelShape` too, and that part in r3/layers/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from r3.models.hf_config import HfConfig, ShapeError


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of DeepSeek's multi-head latent attention (arXiv 2405.04434).

    Keys and values of all heads are computed from one small vector per token.

    Attributes:
        query_rank: size of the compressed query; 0 = queries are projected directly.
        kv_rank: size of the vector that keys and values come from.
        nope_size: dimensions of a query or key head without rotary position.
        rope_size: dimensions of a query or key head with rotary position.
        value_size: dimensions of a value head.
    """

    query_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Sizes of gated delta layers (arXiv 2412.06464).

    Attributes:
        key_heads, value_heads: each key head serves `value_heads / key_heads` value heads.
        key_size, value_size: dimensions of a head.
        taps: tokens that the convolution sees.
        interleaved: the projection has the rows of a key head together (Qwen3-Next); otherwise q, k
            and v, the gate, beta and decay have projections of their own (Qwen3.5).
        state_dtype: in which vLLM keeps the state between tokens; empty = in the engine's.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    interleaved: bool
    state_dtype: Literal["", "float32", "bfloat16"] = ""

    @property
    def keys(self) -> int:
        """Dimensions of all key heads."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Dimensions of all value heads."""
        return self.value_heads * self.value_size

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a layer's tensors, after `linear_attn.`."""
        mixed = 2 * self.keys + self.values
        widths = {"qkv": mixed, "z": self.values, "b": self.value_heads, "a": self.value_heads}
        if self.interleaved:
            widths = {"qkvz": mixed + self.values, "ba": 2 * self.value_heads}
        return {
            "A_log": (self.value_heads,),
            "dt_bias": (self.value_heads,),
            "conv1d.weight": (mixed, 1, self.taps),
            **{f"in_proj_{name}.weight": (width, hidden) for name, width in widths.items()},
            "norm.weight": (self.value_size,),
            "out_proj.weight": (hidden, self.values),
        }


@dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """Activation of gpt-oss: (u + offset) g sigmoid(slope g), of gate g and up u.

    Attributes:
        limit: g is at most this, u between this and its negative.
    """

    limit: float
    slope: float
    offset: float


@dataclass(frozen=True, kw_only=True)
class MoeNames:
    """Tensor names of a MoE layer, after `model.layers.N.`.

    `{e}` is the number of the expert. An empty name: the family has no such tensor. They are names
    that vLLM loads. Some checkpoints have others, or one tensor for all experts (`stacked`).

    Attributes:
        stacked: name in the checkpoint -> the tensors that it joins, if it differs from them: for
            experts, those of one of them, joined along the first dimension. A router's bias is a
            row there.
        alternates: experts are joined as [experts, inputs, outputs], and the outputs of the joined
            tensors alternate.
        may_be_stacked: the same for tensors that only some checkpoints join. Exports do not.
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{e}"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: str = "mlp.shared_experts"
    shared_gate: str = ""
    router_bias: str = ""
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    alternates: bool = False
    may_be_stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        model_type: as in config.json.
        aliases: other values of model_type for the same keys.
        fields: reads the fields of `ModelShape` that are not common to all families.
        norm_eps, rope_theta, partial_rotary_factor: values where config.json has none. transformers
            and vLLM have the same defaults.
        implied: keys that have one value in this family. transformers' class has no other, so
            `save_pretrained` leaves them out; vLLM must be told.
        wrapper: architecture of published checkpoints that have it as `text_config`.
        engine: architecture that vLLM has in its place. `GLM4_MOE` only.
        reads: keys that `fields` reads and that are refused in other families.
        ffn_key: has the width of dense layers.
        models: models of this family that people train.
        proved: keys of `PROOFS`. A test compares them with what the tests cover.
    """

    model_type: str
    models: str
    fields: Callable[[HfConfig], dict[str, Any]]
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    reads: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()
    ffn_key: str = "intermediate_size"
    implied: Mapping[str, Any] = field(default_factory=dict)
    wrapper: str = ""
    engine: str = ""
    proved: tuple[str, ...] = ("policy", "engine")


GLM4_MOE = "Glm4MoeForCausalLM"

PROOFS = {
    "policy": "logits, gradients and export equal those of transformers, under tp, pp, ep and cp",
    "engine": "weights reach vLLM bit for bit; captured routes are those of transformers' routers",
    "runs": "the accuracy of complete runs rises",
}
"""What is tested for a family, on small random checkpoints and on the embedded model."""


def _llama(hf: HfConfig) -> dict[str, Any]:
    """Llama (arXiv 2302.13971, 2307.09288): the plain dense decoder."""
    # vLLM follows these, which other families with this class have.
    hf.refuse("bias", "qkv_bias")
    hf.only("logit_scale", 1.0)
    return {}


def _qwen2(hf: HfConfig) -> dict[str, Any]:
    """Qwen2 (arXiv 2407.10671): biases on queries, keys and values."""
    hf.refuse("qk_norm")
    return {"qkv_bias": True}


def _qwen3(_hf: HfConfig) -> dict[str, Any]:
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


def _qwen3_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen3-MoE (arXiv 2505.09388): softmax router, no shared expert."""
    hf.refuse("shared_expert_intermediate_size")
    return _qwen3(hf) | _qwen_moe(hf)


def _qwen2_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen2-MoE (arXiv 2407.10671): one shared expert behind a sigmoid gate."""
    return _qwen_moe(hf) | dict(
        qkv_bias=bool(hf.values.get("qkv_bias", True)),
        shared_ffn_size=hf.number("shared_expert_intermediate_size"),
        moe_names=MoeNames(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
    )


def _qwen3_next(hf: HfConfig) -> dict[str, Any]:
    """Qwen3-Next: gated delta layers with one layer of gated attention in four."""
    return _qwen2_moe(hf) | _hybrid(hf, interleaved=True) | {"qkv_bias": False}


def _qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    """The text model of Qwen3.5 and 3.6: as Qwen3-Next, experts in every layer."""
    hf.only("norm_topk_prob", True)
    hf.only("decoder_sparse_step", 1)
    hf.refuse("mlp_only_layers")
    moe = _qwen2_moe(hf) | {"norm_topk_prob": True, "qkv_bias": False}
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


def _qwen3_5(hf: HfConfig) -> dict[str, Any]:
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


def _olmoe(hf: HfConfig) -> dict[str, Any]:
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


def _mixtral(hf: HfConfig) -> dict[str, Any]:
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


def _minimax_m2(hf: HfConfig) -> dict[str, Any]:
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


def _ernie4_5_moe(hf: HfConfig) -> dict[str, Any]:
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
            router_bias=bias,
            stacked=(("mlp.moe_statics.e_score_correction_bias", (bias,)),),
        ),
        num_mtp_layers=hf.number("num_nextn_predict_layers", default=0, least=0),
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


def _bailing_moe_v2(hf: HfConfig) -> dict[str, Any]:
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


def _granitemoe(hf: HfConfig) -> dict[str, Any]:
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


def _gpt_oss(hf: HfConfig) -> dict[str, Any]:
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


def _deepseek_v3(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3 (arXiv 2412.19437) and Moonlight: latent attention and this router."""
    # 2.5 is the default of transformers, which vLLM reads too.
    scale = hf.real("routed_scaling_factor", default=2.5)
    return _sigmoid_moe(hf) | _latent_attention(hf) | {"router_scale": scale}


def _sparse_mla(hf: HfConfig) -> dict[str, Any]:
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
    return _deepseek_v3(hf) | dict(index_topk=index_topk, max_position_embeddings=longest)


def _glm4_moe(hf: HfConfig) -> dict[str, Any]:
    """GLM-4.5 to GLM-4.7 (arXiv 2508.06471): half of each head is rotated, DeepSeek-V3's router.

    Queries, keys and values have biases. The larger models normalise queries and keys per head.
    """
    return _sigmoid_moe(hf) | dict(
        qkv_bias=bool(hf.values.get("attention_bias", False)),
        qk_norm="head" if hf.values.get("use_qk_norm", False) else "none",
        engine_router_fp32=True,
    )


def _solar_open(hf: HfConfig) -> dict[str, Any]:
    """Solar-Open: GLM-4.5's experts in every layer, Llama's attention."""
    hf.only("first_k_dense_replace", 0)
    hf.refuse("use_qk_norm")
    return _sigmoid_moe(hf, dense=0, groups=1) | {"engine_router_fp32": True}


def _dots1(hf: HfConfig) -> dict[str, Any]:
    """dots.llm1 (arXiv 2506.05767): Qwen3's attention, DeepSeek-V3's router without groups."""
    return _sigmoid_moe(hf, dense=0, groups=1) | {"qk_norm": "head", "engine_router_fp32": True}


def _glm4_moe_lite(hf: HfConfig) -> dict[str, Any]:
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


FAMILIES: dict[str, Family] = {
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        fields=_qwen3_moe,
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        proved=("policy", "engine", "runs"),
    ),
    "Qwen3ForCausalLM": Family(model_type="qwen3", fields=_qwen3, models="Qwen3, dense"),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe", fields=_qwen2_moe, models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", fields=_qwen2, models="Qwen2 and Qwen2.5, dense"
    ),
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next",
        fields=_qwen3_next,
        models="Qwen3-Next-80B-A3B",
        partial_rotary_factor=0.25,
        reads=frozenset({"layer_types", "partial_rotary_factor"}),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        model_type="qwen3_5_moe_text",
        fields=_qwen3_5_moe,
        models="text models of Qwen3.5-35B-A3B and 3.6",
        wrapper="Qwen3_5MoeForConditionalGeneration",
        ffn_key="moe_intermediate_size",  # it has no dense layer
        partial_rotary_factor=0.25,
        reads=frozenset({"layer_types", "partial_rotary_factor"}),
    ),
    "Qwen3_5ForCausalLM": Family(
        model_type="qwen3_5_text",
        fields=_qwen3_5,
        models="text models of Qwen3.5-4B, 9B and 27B, Qwen3.6-27B, dense",
        wrapper="Qwen3_5ForConditionalGeneration",
        partial_rotary_factor=0.25,
        reads=frozenset({"layer_types", "partial_rotary_factor"}),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe", fields=_olmoe, models="OLMoE-1B-7B", norm_eps=1e-5
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral", fields=_mixtral, models="Mixtral", norm_eps=1e-5, rope_theta=1e6
    ),
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3",
        fields=_deepseek_v3,
        models="Moonlight-16B-A3B, DeepSeek-V3, Kimi-K2, text model of Kimi-K2.5",
        aliases=("kimi_k2",),
        wrapper="KimiK25ForConditionalGeneration",
        # vLLM takes softmax without biases where they are absent.
        implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "DeepseekV32ForCausalLM": Family(
        model_type="deepseek_v32",
        fields=_sparse_mla,
        models="DeepSeek-V3.2, conversations of at most 2,048 tokens",
        reads=frozenset({"layer_types"}),
        implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "GlmMoeDsaForCausalLM": Family(
        model_type="glm_moe_dsa",
        fields=_sparse_mla,
        models="GLM-5, 5.1 and 5.2, conversations of at most 2,048 tokens",
        norm_eps=1e-5,
        reads=frozenset({"layer_types"}),
        implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        fields=_glm4_moe,
        models="GLM-4.5-Air, GLM-4.5, GLM-4.6, GLM-4.7",
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    ),
    "SolarOpenForCausalLM": Family(
        model_type="solar_open",
        fields=_solar_open,
        models="Solar-Open-100B",
        norm_eps=1e-5,
        rope_theta=1e6,
        ffn_key="moe_intermediate_size",  # it has no dense layer
        engine=GLM4_MOE,
    ),
    "Dots1ForCausalLM": Family(
        model_type="dots1", fields=_dots1, models="dots.llm1", engine=GLM4_MOE
    ),
    "Glm4MoeLiteForCausalLM": Family(
        model_type="glm4_moe_lite",
        fields=_glm4_moe_lite,
        models="GLM-4.7-Flash",
        norm_eps=1e-5,
    ),
    "BailingMoeV2ForCausalLM": Family(
        model_type="bailing_moe",
        aliases=("bailing_moe_v2",),
        fields=_bailing_moe_v2,
        models="Ling-mini-2.0, Ring-mini-2.0, Ling-flash-2.0, Ring-flash-2.0",
        rope_theta=600000.0,
        reads=frozenset({"partial_rotary_factor"}),
        implied={
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "use_qk_norm": True,
            "use_rmsnorm": True,
        },
    ),
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe",
        fields=_granitemoe,
        models="Granite 3.0 and 3.1, 1B-A400M and 3B-A800M",
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        fields=_gpt_oss,
        models="gpt-oss-20b and 120b",
        norm_eps=1e-5,
        rope_theta=150000.0,
        reads=frozenset({"attention_bias", "layer_types"}),
    ),
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2",
        fields=_minimax_m2,
        models="MiniMax-M2",
        rope_theta=5e6,
        reads=frozenset({"partial_rotary_factor"}),
        implied={"scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        model_type="ernie4_5_moe",
        fields=_ernie4_5_moe,
        models="ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B",
        norm_eps=1e-5,
        rope_theta=500000.0,
    ),
    "LlamaForCausalLM": Family(
        model_type="llama", fields=_llama, models="Llama 2 and 3, and models of their layout"
    ),
}
"""Architecture, as in config.json -> its family."""


REFUSED = {
    "NemotronHForCausalLM": (
        "R3 has no Mamba-2 layers, no experts without a gate, no layers of attention or MLP alone"
    ),
}
"""Architectures that people train and R3 does not build: what is missing."""


def text_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text model in that of a model that has others beside it.

    Raises:
        ShapeError: there is none.
    """
    architectures = values.get("architectures")
    for name, family in FAMILIES.items():
        if family.wrapper and architectures == [family.wrapper]:
            text = values.get("text_config")
            if not isinstance(text, Mapping):
                raise ShapeError(f"key text_config must be the text model's keys, got {text!r}")
            whole = {key: values[key] for key in _OF_THE_WHOLE if key in values}
            return {**whole, **text, "architectures": [name]}
    return values


# Keys that such a config.json has outside of the section.
_OF_THE_WHOLE = ("quantization_config", "tie_word_embeddings", "transformers_version")


def implied_keys(architecture: str) -> Mapping[str, Any]:
    """Keys that config.json may lack, with the value that they have then."""
    return FAMILIES[architecture].implied if architecture in FAMILIES else {}
