"""Megatron's decoder layers with R3's norms, attention and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from r3.layers.attention import CausalAttention
from r3.layers.norms import RMSNorm


def _scaled_addition(factor: float) -> Callable[..., Any]:
    """Return what adds `factor` times the output of attention or MLP to the residual stream.

    Source: megatron/core/fusions/fused_bias_dropout.py, without bias and dropout.
    """

    def add(
        output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, _dropout: float
    ) -> torch.Tensor:
        output, bias = output_with_bias
        assert bias is None, "output projections have no bias"
        return residual + output * factor

    return lambda _training, _fused: add


def decoder_spec(
    config: Any,
    *,
    experts: type[MegatronModule] | None,
    attention: type[CausalAttention] = CausalAttention,
    replaced: Mapping[str, type] | None = None,
    residual_multiplier: float = 1.0,
    norm: type[RMSNorm] = RMSNorm,
    mixers: Mapping[int, ModuleSpec] | None = None,
    vp_stage: int | None = None,
) -> Any:
    """Return Megatron's local decoder spec with R3's norm, attention and, if asked, experts.

    Args:
        config: Megatron's TransformerConfig.
        experts: class of a MoE layer's experts; None = Megatron's own.
        attention: class of the core attention.
        replaced: parts of self-attention, by field name, that are other modules in this model.
        residual_multiplier: factor on what attention and MLP add to the residual stream.
        norm: class of the norms.
        mixers: number of a layer among those of this chunk -> what it has instead of attention.
        vp_stage: number of the model chunk on this pipeline rank; None without virtual stages.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = norm
    for layer in block.layer_specs:
        parts = layer.submodules
        if residual_multiplier != 1:
            parts.self_attn_bda = parts.mlp_bda = _scaled_addition(residual_multiplier)
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        projections = parts.self_attention.submodules
        projections.core_attention = attention
        if config.qk_layernorm and not config.multi_latent_attention:
            projections.q_layernorm = projections.k_layernorm = norm
        for name, module in (replaced or {}).items():
            setattr(projections, name, module)
        # Megatron 0.16 describes the layer by a ModuleSpec, from 0.18 on by functools.partial.
        is_spec = isinstance(parts.mlp, ModuleSpec)
        if experts and (parts.mlp.module if is_spec else parts.mlp.func) is MoELayer:
            holder = parts.mlp.submodules if is_spec else parts.mlp.keywords["submodules"]
            holder.experts = ModuleSpec(module=experts) if is_spec else experts
    for number, mixer in (mixers or {}).items():
        # A copy: layers of one kind share their spec.
        layer = copy(block.layer_specs[number])
        layer.submodules = replace(layer.submodules, self_attention=mixer)
        block.layer_specs[number] = layer
    return block
