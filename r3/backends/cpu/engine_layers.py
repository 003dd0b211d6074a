"""Replace norms and rotary embeddings of vLLM that are inexact on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch


def replace_layers(modules: Sequence[Any]) -> None:
    """Replace rotary embeddings and norms of a built engine."""
    rotate_slices_in_torch(modules)
    rotate_to_nearest(modules)
    normalise_in_one_call(modules)


@cache
def cuts_off() -> bool:
    """Whether vLLM's kernels cut results off where they should round to the nearest bfloat16.

    Its build for processors without AVX-512 does. One kernel is asked here. Those for rotations,
    experts and attention were measured and did the same.
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
