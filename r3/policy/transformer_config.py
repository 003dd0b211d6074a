"""Megatron's TransformerConfig of a model and a layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from r3.config import Config
from r3.models.shape import ModelShape
from r3.models.tensors import conversion_rules

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm"],
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def transformer_config(config: Config, shape: ModelShape) -> TransformerConfig:
    """Return Megatron's config of this model and layout."""
    kind = MLATransformerConfig if shape.latent else TransformerConfig
    return kind(**megatron_settings(config, shape))


def megatron_settings(config: Config, shape: ModelShape) -> dict[str, Any]:
    """Return the keyword arguments of Megatron's TransformerConfig.

    Fixed on purpose: no dropout; router scores, softmax and combine in float32; dropless all-to-all
    dispatch; no load-balancing loss (it would use the router's own top-k, not the replayed one); no
    fused router (it returns before it asks for replayed routes). `calculate_per_token_loss` leaves
    normalisation to R3: data-parallel ranks sum, and the loss already has the global denominator.
    """
    return _layout_settings(config, shape) | _model_settings(shape)


def _layout_settings(config: Config, shape: ModelShape) -> dict[str, Any]:
    """Precision, parallelism and kernels: what does not depend on the family."""
    parallel, dtype = config.parallel, DTYPES[config.model.dtype]
    sizes = parallel.megatron
    has_stages = sizes["pipeline_model_parallel_size"] > 1
    settings: dict[str, Any] = dict(
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        # Packed micro-batches differ in length; `KnownShapes` has the shapes.
        variable_seq_lengths=has_stages,
        # For dense models too: Megatron's default, allgather, refuses variable lengths.
        moe_token_dispatcher_type="alltoall",
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        # Every tensor is loaded from the checkpoint.
        perform_initialization=False,
        **sizes,
        sequence_parallel=sizes["tensor_model_parallel_size"] > 1,
        **_RECOMPUTE[config.model.recompute],
    )
    if has_stages:
        pieces = [["decoder"] * len(layers) for layers in parallel.pieces(shape.num_layers)]
        pieces[0].insert(0, "embedding")
        pieces[-1].append("loss")
        settings["pipeline_model_parallel_layout"] = pieces
        # By default Megatron synchronises the device after every exchange, against a race in the
        # batched sends of old torch versions. The exchange is waited for in either case.
        settings["batch_p2p_sync"] = False
    if parallel.vpp > 1:
        # With two stages, next and previous are one rank: batched sends to it pass each other and
        # give wrong results without an error. Megatron-LM's command line sets this; the library
        # does not.
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return settings


def _model_settings(shape: ModelShape) -> dict[str, Any]:
    """Sizes and architecture of the model."""
    settings: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=shape.has_biases,
        add_qkv_bias=shape.qkv_bias,
        softmax_type="learnable" if shape.sinks else "vanilla",
        qk_layernorm=shape.qk_norm != "none",
        attention_output_gate=shape.output_gate,
    )
    first, *others = conversion_rules(shape).layers
    if any(layer != first for layer in others):
        # A checkpoint keeps the tensors of each layer apart. By default it stacks those of all.
        settings["hetereogenous_dist_checkpoint"] = True
    if gate := shape.clamped_gate:
        settings |= dict(
            activation_func=partial(_scaled_silu, slope=gate.slope),
            activation_func_clamp_value=gate.limit,
            glu_linear_offset=gate.offset,
        )
    if latent := shape.latent:
        settings |= dict(
            multi_latent_attention=True,
            qk_layernorm=True,
            q_lora_rank=latent.query_rank or None,
            kv_lora_rank=latent.kv_rank,
            qk_head_dim=latent.nope_size,
            qk_pos_emb_head_dim=latent.rope_size,
            v_head_dim=latent.value_size,
            kv_channels=latent.value_size,
            rope_type="rope",
            rotary_base=shape.rope_theta,
            rotary_percent=1.0,
        )
    if not shape.moe_layers:
        return settings
    settings |= dict(
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.topk,
        moe_ffn_hidden_size=shape.moe_ffn_size,
        moe_router_score_function=shape.router_score,
        # Renormalising the top k after a softmax over all experts is a softmax over the k logits.
        moe_router_pre_softmax=shape.router_score == "softmax" and not shape.norm_topk_prob,
        moe_router_topk_scaling_factor=None if shape.router_scale == 1 else shape.router_scale,
        moe_aux_loss_coeff=0.0,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        # Routers ask for their routes; r3.routing.replay decides who answers.
        moe_enable_routing_replay=True,
    )
    if len(shape.moe_layers) < shape.num_layers:
        is_moe = [int(layer in shape.moe_layers) for layer in range(shape.num_layers)]
        settings["moe_layer_freq"] = is_moe
    if shape.shared_ffn_size:
        settings["moe_shared_expert_intermediate_size"] = shape.shared_ffn_size
        settings["moe_shared_expert_gate"] = bool(shape.moe_names.shared_gate)
    if shape.moe_names.router_bias and shape.router_score == "sigmoid":
        # Megatron would shift the biases after every update to balance the load, away from those
        # that the engine routes with.
        settings |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
    if shape.topk_groups < shape.expert_groups:
        settings["moe_router_num_groups"] = shape.expert_groups
        settings["moe_router_group_topk"] = shape.topk_groups
    return settings


def _scaled_silu(x: torch.Tensor, slope: float) -> torch.Tensor:
    return x * torch.sigmoid(x * slope)
