"""Sizes and architecture of a model, from which its tensors follow (`r3.models.tensors`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from r3.models.hf_config import RopeScaling


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
class Quantised:
    """How the matrices of a checkpoint are stored: `r3.quantised.formats`.

    Attributes:
        method: see there.
        group: int4: values of a row that share a factor; 0 = all of them.
        has_zero_points: int4: whether each group has a value that stands for zero.
    """

    method: Literal["fp8", "mxfp4", "int4"]
    group: int = 0
    has_zero_points: bool = False

    def __str__(self) -> str:
        return self.method


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes and architecture of a model. A dense model has 0 experts and no `moe_layers`.

    Attributes:
        rotary_size: dimensions of a query or key head with rotary position, the first ones.
        ffn_size: width of the dense MLP, in hidden units.
        tied: the output head is the embedding.
        embedding_multiplier: factor on embeddings.
        attention_multiplier: factor on attention scores; 0 = 1 / sqrt(head_dim).
        residual_multiplier: factor on what attention and MLP add to the residual stream.
        logits_scaling: logits are divided by it.
        qk_norm: queries and keys are not normalised, per head, or over all heads together.
        interleaved_rope: rotary position turns neighbours instead of values half a head apart.
        sinks: attention has one more logit per head, whose value is zero.
        window: tokens that a token of `window_layers` sees, itself included; 0 = no such layers.
        has_biases: output projections of attention, routers and experts have biases.
        clamped_gate: activation of experts, if it is not SiLU.
        latent: sizes of latent attention; None = ordinary (grouped-query) attention.
        topk: experts per token.
        moe_ffn_size: width of one routed expert.
        shared_ffn_size: width of the shared experts together, which see every token; 0 = none.
        norm_topk_prob: the gates of the chosen experts are normalised to sum 1.
        router_score: function that makes scores of the router's logits.
        router_scale: factor on the gates.
        engine_router_fp32: vLLM computes the router's logits in float32, whatever its data type is.
        expert_groups: the router first chooses the best `topk_groups` of so many groups of experts.
        moe_layers: numbers of the layers that have experts, from 0.
        centred_norms: norms multiply by 1 + weight, but for those in gated delta layers.
        output_gate: a sigmoid of a second projection, next to that of the queries, gates attention.
        delta: sizes of the gated delta layers.
        delta_layers: numbers of the layers that have one in the place of attention.
        renamed: name in the checkpoint -> the tensors that it joins, by rows, where a family has
            names of its own; `{n}` is the layer's number.
        index_topk: tokens up to which sparse attention sees all, so that it is plain attention: the
            longest conversation. Its indexers are kept as they are. 0 = no sparse attention.
        num_mtp_layers: multi-token-prediction layers, which R3 does not load, train or export.
        is_wrapped: config.json describes a model that also sees images, of which R3 does not load,
            train or export the vision model.
        quantised: how the checkpoint's matrices are stored; None = as they are.
        source: folder or hub name that the shape was read from, which has weights and tokenizer.
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_size: int
    ffn_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied: bool
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 0.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    qkv_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    interleaved_rope: bool = False
    sinks: bool = False
    window: int = 0
    window_layers: tuple[int, ...] = ()
    has_biases: bool = False
    clamped_gate: ClampedGate | None = None
    latent: LatentAttention | None = None
    num_experts: int = 0
    topk: int = 0
    moe_ffn_size: int = 0
    shared_ffn_size: int = 0
    norm_topk_prob: bool = True
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_scale: float = 1.0
    engine_router_fp32: bool = False
    expert_groups: int = 1
    topk_groups: int = 1
    moe_layers: tuple[int, ...] = ()
    centred_norms: bool = False
    output_gate: bool = False
    delta: DeltaSizes | None = None
    delta_layers: tuple[int, ...] = ()
    moe_names: MoeNames = field(default_factory=MoeNames)
    renamed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    index_topk: int = 0
    num_mtp_layers: int = 0
    is_wrapped: bool = False
    quantised: Quantised | None = None
    source: str = field(default="", compare=False, repr=False)
