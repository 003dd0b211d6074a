"""Replace layers of vLLM on CPU that are inexact there, or that add overhead around their kernel.

Experts and attention that are exactly as assumed here call R3's kernels (`r3.kernels`), without the
Python between a layer and its kernel: an eighth of the time of a step of a small model in vLLM
(0.30). All others stay as they are in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, cast

import torch

from r3.kernels import sampled_attention, sampled_experts, tiles
from r3.kernels.prepare import prepare
from r3.kernels.switch import is_on


def replace_layers(modules: Sequence[Any]) -> None:
    """Replace layers of a built engine: rotations, norms, experts and attention."""
    rotate_slices_in_torch(modules)
    rotate_to_nearest(modules)
    normalise_in_one_call(modules)
    ways = (plain_experts(), direct_experts), (plain_attention(), direct_attention)
    for facts, direct in ways:
        for module in modules:
            if has_facts(module, facts):
                module.forward = direct(module)


def has_facts(module: Any, facts: Mapping[str, object]) -> bool:
    """Whether a module has these attributes; `__class__` is the first of them."""
    return all(attrgetter(path)(module) == wanted for path, wanted in facts.items())


def plain_experts() -> dict[str, object]:
    """Return attributes of MoE layers for which vLLM does just what `direct_experts` does."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        MoEPrepareAndFinalizeNoDPEPModular,
    )
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    return {
        "__class__": MoERunner,
        "routed_input_transform": None,
        "routed_output_transform": None,
        "shared_expert_gate": None,  # vLLM would join its weight with the router's
        "moe_config.moe_parallel_config.tp_size": 1,
        "moe_config.moe_parallel_config.ep_size": 1,
        "moe_config.moe_parallel_config.dp_size": 1,
        "moe_config.moe_parallel_config.pcp_size": 1,
        "moe_config.moe_parallel_config.sp_size": 1,
        # The class by its module: vLLM 0.26 has neither.
        "router.__module__": "vllm.model_executor.layers.fused_moe.router.cpu_router",
        "router.eplb_state": None,
        "routed_experts.apply_router_weight_on_input": False,
        "routed_experts.quant_method.__class__": UnquantizedFusedMoEMethod,
        "routed_experts.quant_method.unquantized_backend": UnquantizedMoeBackend.CPU,
        "routed_experts.quant_method.moe_kernel.prepare_finalize.__class__": (
            MoEPrepareAndFinalizeNoDPEPModular
        ),
        "routed_experts.quant_method.moe_kernel.fused_experts._use_zentorch": False,
    }


def direct_experts(runner: Any) -> Callable[..., torch.Tensor]:
    """Return `MoERunner.forward` of a layer without what it does for other layers.

    With one thread, `sampled_experts` computes what vLLM's portable kernel would. Where it cannot,
    the layer stays vLLM's.
    """
    experts, router, gate = runner.routed_experts, runner.router, runner.gate
    kernel = experts.quant_method.moe_kernel.fused_experts
    is_plain = (experts.activation.value, kernel.isa) == ("silu", "vec")
    has_bias = kernel.w1_bias is not None or kernel.w2_bias is not None
    dtype = experts.w13_weight.dtype
    is_own = is_on("sampled_experts") and is_plain and not has_bias and tiles.can_compute(dtype)
    if not is_own:
        return cast("Callable[..., torch.Tensor]", runner.forward)
    prepare(dtype)
    shared = runner.shared_experts and runner.shared_experts._layer
    scale = runner.routed_scaling_factor

    def forward(
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if gate is not None:
            router_logits, _ = gate(hidden_states)
        of_shared = shared(hidden_states) if shared else None
        weights, ids = router.select_experts(hidden_states, router_logits, input_ids=input_ids)
        w13, w2 = experts.w13_weight, experts.w2_weight  # replaced by every weight sync
        output = sampled_experts.experts(hidden_states, w13, w2, weights, ids)
        if scale != 1.0:
            output *= scale
        return output if of_shared is None else of_shared + output

    return forward


def plain_attention() -> dict[str, object]:
    """Return attributes of attention layers for which vLLM does just what `direct_attention` does.

    `refuse_unfit` excludes what concerns all layers: transferred caches, half batches.
    """
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    return {
        "__class__": Attention,
        "query_quant": None,
        "kv_sharing_target_layer_name": None,
        "impl.__class__": CPUAttentionBackendImpl,
        "impl.attn_type": "decoder",
    }


# Attributes of attention layers for which `sampled_attention` computes what vLLM's kernel does.
_NO_EXTRAS = {
    "isa": "vec",
    "impl.kv_cache_dtype": "auto",
    "impl.alibi_slopes": None,
    "impl.sliding_window": -1,
    "impl.logits_soft_cap": 0,
    "impl.sinks": None,
}


def direct_attention(layer: Any) -> Callable[..., torch.Tensor]:
    """Return `Attention.forward` of a layer that R3 computes where it can, and vLLM elsewhere.

    With one thread, `sampled_attention` computes steps that have no prompt. Where registers are not
    wide (`tiles.IS_WIDE`), vLLM's kernels have other bits, and `sampled_attention` computes prompts
    and long conversations too: a token must have the same bits in a prompt and as a sample.
    """
    from vllm.forward_context import get_forward_context

    vllms, impl, name = layer.forward, layer.impl, layer.layer_name
    is_own = (
        is_on("sampled_attention")
        and has_facts(layer, _NO_EXTRAS)
        and tiles.can_compute(layer.dtype)
        and layer.head_size == layer.head_size_v
    )
    if not is_own:
        return cast("Callable[..., torch.Tensor]", vllms)
    prepare(layer.dtype)
    of_query = -1, layer.num_heads, layer.head_size
    of_key = -1, layer.num_kv_heads, layer.head_size

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        context, rows = get_forward_context(), len(query)
        batch = context.attn_metadata and context.attn_metadata[name]  # None in a trial run
        if batch is None or batch.num_actual_tokens != rows or more:
            return vllms(query, key, value, **more)
        is_short = batch.max_seq_len <= sampled_attention.MOST_TOKENS
        is_causal = batch.causal and batch.dynamic_causal is None
        slots = context.slot_mapping[name]
        tensors = query.view(of_query), key.view(of_key), value.view(of_key), layer.kv_cache
        where = batch.block_table, batch.seq_lens, impl.scale
        if batch.max_query_len == 1 and (is_short or not tiles.IS_WIDE):
            return sampled_attention.attend(*tensors, slots, *where).view(rows, -1)
        if is_causal and not tiles.IS_WIDE:
            starts = batch.query_start_loc
            return sampled_attention.attend_prompts(*tensors, slots, starts, *where).view(rows, -1)
        return vllms(query, key, value)

    return forward


@cache
def cuts_off() -> bool:
    """Whether vLLM's kernels cut results off where they should round to the nearest bfloat16.

    Its build for processors without wide registers (`tiles.IS_WIDE`) does. One kernel is asked
    here. Those for rotations, experts and attention were measured and did the same.
    """
    from vllm._custom_ops import rms_norm

    row = torch.arange(1.0, 65.0).bfloat16()
    found, exact = torch.empty_like(row), torch.empty(64)
    rms_norm(found, row, torch.ones_like(row), 1e-6)
    rms_norm(exact, row.float(), torch.ones(64), 1e-6)
    return not torch.equal(found, exact.bfloat16())


def rotate_to_nearest(modules: Iterable[Any]) -> None:
    """Let vLLM's kernel rotate positions in float32 where it would cut bfloat16 off."""
    from vllm._custom_ops import rotary_embedding
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def rotating(rotary: RotaryEmbedding) -> Callable[..., tuple[torch.Tensor, Any]]:
        vllms = rotary._forward_method

        def forward(
            positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, Any]:
            if query.dtype != torch.bfloat16:
                return vllms(positions, query, key)
            # Only the rows that are used: there is one for each position of the longest context.
            angles = rotary._match_cos_sin_cache_dtype(query)[positions].float()
            wide = query.float(), None if key is None else key.float()
            rows = torch.arange(len(positions))
            rotary_embedding(rows, *wide, rotary.head_size, angles, rotary.is_neox_style)
            for stored, exact in zip((query, key), wide, strict=True):
                if stored is not None:
                    stored.copy_(exact)
            return query, key

        return forward

    for module in modules:
        kernel = type(module).forward_cpu if isinstance(module, RotaryEmbedding) else None
        if kernel is RotaryEmbedding.forward_cpu and module.is_neox_style and cuts_off():
            module._forward_method = rotating(module)


def rotate_slices_in_torch(modules: Iterable[Any]) -> None:
    """Let torch rotate positions in latent attention, where vLLM 0.30's CPU kernel is wrong.

    Latent attention rotates a slice of each head, and the CPU kernel treats the slice as whole
    heads, without an error. The CUDA kernel reads strides (vLLM PR 18046); YaRN, which vLLM's own
    tests use, takes another path. Only latent attention rotates interleaved pairs.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for module in modules:
        if isinstance(module, RotaryEmbedding) and not module.is_neox_style:
            module._forward_method = module.forward_native


def normalise_in_one_call(modules: Iterable[torch.nn.Module]) -> None:
    """Let vLLM's CPU kernel compute norms, for which vLLM 0.30 makes six calls of torch or more.

    vLLM registers the kernel for GPUs only. Two things it does otherwise than the policy, and so
    they are done outside in bfloat16: it multiplies by the weight before it rounds, and in the
    variant with a residual it normalises the sum before that is rounded. In float32 neither
    changes a bit. The kernel also reads slices as if their rows followed each other, without an
    error. Where it would cut bfloat16 off (`cuts_off`), it computes in float32 and torch rounds.
    """
    from vllm._custom_ops import fused_add_rms_norm, rms_norm
    from vllm.model_executor.layers.layernorm import RMSNorm

    def normalising(norm: RMSNorm) -> Callable[..., Any]:
        ones = torch.ones_like(norm.weight)
        rounds = ones.dtype != torch.float32
        is_wide = ones.dtype == torch.bfloat16 and cuts_off()
        if is_wide:
            ones = ones.float()

        def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            if residual is not None:
                if not rounds and x.is_contiguous() and residual.is_contiguous():
                    fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
                    return x, residual  # written in place, as on GPUs
                x = residual = x + residual
            dtype = torch.float32 if is_wide else x.dtype
            normed, weight = torch.empty(x.shape, dtype=dtype), ones if rounds else norm.weight
            rms_norm(normed, x.to(dtype).contiguous(), weight, norm.variance_epsilon)
            if rounds:
                normed = normed.to(x.dtype).mul_(norm.weight)
            return normed if residual is None else (normed, residual)

        return forward

    for module in modules:
        # A class of its own, no weight and a part of the row have formulas of their own.
        plain = type(module) is RMSNorm and module.has_weight
        if plain and module.variance_size_override is None:
            module._forward_method = normalising(module)
