"""Megatron's decoder layers with R3's norms, attention and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from r3 import extras
from r3.layers.attention import CausalAttention
from r3.layers.norms import CentredNorm, KeyHeadsNorm, LatentNorm, QueryHeadsNorm, RMSNorm
from r3.models.shape import ModelShape


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


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with the modules of its spec, under 0.19 as under 0.16.

    Without a query projection, 0.19 builds a projection of TransformerEngine in place of the spec's
    (`_resolve_qk_norm_config`). For packed sequences it pads values to the width of keys, and cuts
    the output as if heads were its last dimension (`_run_core_attention`); R3's attention takes
    values of their own width. 0.16 calls neither method.

    Source: megatron/core/transformer/multi_latent_attention.py of 0.19.2.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return dict(vars(submodules))

    def _run_core_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any = None,
        attn_mask_type: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        out: torch.Tensor = self.core_attention(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params, **options
        )
        return out


def _moe_parts(mlp: Any) -> Any:
    """The parts of a MoE layer's spec; None for a dense MLP.

    The spec is a ModuleSpec in 0.16 and a functools.partial in 0.19.
    """
    is_spec = isinstance(mlp, ModuleSpec)
    if (mlp.module if is_spec else mlp.func) is not MoELayer:
        return None
    return mlp.submodules if is_spec else mlp.keywords["submodules"]


def decoder_spec(
    config: Any,
    shape: ModelShape,
    *,
    experts: type[MegatronModule] | None,
    layers: Sequence[int],
    vp_stage: int | None,
) -> Any:
    """Return Megatron's local decoder spec with R3's norms, attention and, if asked, experts.

    Args:
        config: Megatron's TransformerConfig.
        shape: the model's.
        experts: class of a MoE layer's experts; None = Megatron's own.
        layers: numbers of this chunk's layers.
        vp_stage: number of the model chunk on this pipeline rank; None without virtual stages.
    """
    norm = CentredNorm if shape.centred_norms else RMSNorm
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = norm
    for layer in block.layer_specs:
        parts = layer.submodules
        if shape.residual_multiplier != 1:
            parts.self_attn_bda = parts.mlp_bda = _scaled_addition(shape.residual_multiplier)
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        attention = parts.self_attention.submodules
        attention.core_attention = (
            extras.attention().ContextParallelAttention
            if config.context_parallel_size > 1
            else CausalAttention
        )
        if shape.latent:
            # Replicated. Sharded by columns, as upstream, the gradient of k's rotary part is not
            # summed over tp.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            attention.q_layernorm = attention.kv_layernorm = LatentNorm
            parts.self_attention.module = LatentAttention
        elif shape.qk_norm == "all":
            attention.q_layernorm, attention.k_layernorm = QueryHeadsNorm, KeyHeadsNorm
        elif shape.qk_norm == "head":
            attention.q_layernorm = attention.k_layernorm = norm
        if experts and (moe := _moe_parts(parts.mlp)):
            moe.experts = experts
    for place, number in enumerate(layers):
        if number in shape.delta_layers:
            # A copy: layers of one kind share their spec.
            layer = block.layer_specs[place] = copy(block.layer_specs[place])
            mixer = ModuleSpec(module=extras.gated_delta(), params={"sizes": shape.delta})
            layer.submodules = replace(layer.submodules, self_attention=mixer)
    return block
