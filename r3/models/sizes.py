"""Sizes and architecture of a model, from which its tensors follow (`r3.models.tensors`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from r3.models.families import ClampedGate, DeltaSizes, LatentAttention, MoeNames
from r3.models.hf_config import RopeScaling


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
