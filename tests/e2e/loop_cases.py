"""R3's loops for an engine's experts and attention on CPU beside vLLM's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from r3.kernels import sampled_attention, sampled_experts
from r3.runtime.device import Device
from tests.engines import World
from tests.tiny import tiny_config

# Experts, of a token, hidden size, width: as in `tiny`, many small ones, one width above a tile
EXPERTS = ((8, 2, 128, 64), (64, 8, 256, 128), (4, 1, 96, 160))

# Heads, key heads, size of a head, tokens of a block, longest conversation: also a number of query
# heads per key head for which vLLM divides them, and a conversation of the greatest length
ATTENTION = (
    (8, 4, 32, 32, 300),
    (4, 4, 64, 32, 200),
    (6, 2, 96, 128, 500),
    (16, 1, 128, 64, sampled_attention.MOST_TOKENS),
)


def _difference(ours: torch.Tensor, vllms: torch.Tensor) -> float:
    """Largest difference, as a part of the largest number of its row; 0 if all bits are equal."""
    if torch.equal(ours.view(torch.uint8), vllms.view(torch.uint8)):
        return 0.0
    two = vllms.double()
    parts = (ours.double() - two).abs() / two.abs().amax(-1, keepdim=True)
    return max(parts.max().item(), 1e-300)  # zeros of different signs


def experts(_device: Device) -> dict[str, float]:
    """Differences between results, by type, sizes and number of tokens."""
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for E, K, D, F in EXPERTS:
            random = torch.Generator().manual_seed(E)
            w13, w2 = (
                cpu_prepack_moe_weight((torch.randn(size, generator=random) / 3).to(dtype), "vec")
                for size in ((E, 2 * F, D), (E, D, F))
            )
            for N in (1, 5, 32, 300):
                # Large numbers too, for which the activation is 0 or infinite
                scale = 10.0 ** torch.randint(-2, 3, (N, 1), generator=random)
                tokens = (torch.randn(N, D, generator=random) * scale).to(dtype)
                gates = torch.rand(N, K, generator=random)
                chosen = torch.stack([torch.randperm(E, generator=random)[:K] for _ in range(N)])
                vllms, layer = torch.empty_like(tokens), (gates, chosen.int())
                cpu_fused_moe(vllms, tokens, w13, w2, None, None, *layer, "silu", "vec")
                ours = sampled_experts.experts(tokens, w13, w2, *layer)
                name = f"{dtype}, {E} experts, {N} tokens"
                found[name] = _difference(ours, vllms)
                # One step to the next number is a difference.
                ours.view(torch.int16)[0, 0] += 1
                assert _difference(ours, vllms) > 0
    return found


def attention(_device: Device) -> dict[str, float]:
    """Differences between results, by type and sizes; caches are equal bit for bit."""
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for H, G, D, block, longest in ATTENTION:
            random = torch.Generator().manual_seed(D)
            N, width = 9, -(-longest // block)
            lengths = torch.randint(1, longest + 1, (N,), generator=random).int()
            lengths[:4] = torch.tensor([1, 32, 33, longest])
            cache = torch.randn(N * width, G, block, 2 * D, generator=random).to(dtype)
            table = torch.randperm(N * width, generator=random).view(N, width).int()
            last = lengths.long() - 1
            block_of_N = table.long().gather(1, last[:, None] // block).squeeze(1)
            slots = block_of_N * block + last % block
            # Large numbers too, for which one token takes all of the weight
            tokens = (
                torch.randn(N, (H + 2 * G) * D, generator=random)
                * torch.arange(1, 2 * N, 2)[:, None]
            )
            rows = tokens.to(dtype).split([H * D, G * D, G * D], dim=1)
            query, key, value = (each.view(N, -1, D) for each in rows)
            vllms_cache, where = cache.clone(), (slots, table, lengths)
            vllms = _attention_of_vllm(query, key, value, vllms_cache, *where)
            ours = sampled_attention.attend(query, key, value, cache, *where, D**-0.5)
            assert torch.equal(cache.view(torch.uint8), vllms_cache.view(torch.uint8))
            found[f"{dtype}, {H} heads of {D}, {longest} tokens"] = _difference(ours, vllms)
            ours.view(torch.int16)[0, 0, 0] += 1
            assert _difference(ours, vllms) > 0
    return found


def _attention_of_vllm(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    from vllm._custom_ops import (
        cpu_attention_with_kv_cache,
        cpu_attn_get_scheduler_metadata,
        cpu_attn_reshape_and_cache,
    )

    N, H, D = query.shape
    starts = torch.arange(N + 1, dtype=torch.int32)
    keys, values = cache.view(*cache.shape[:2], -1, D).chunk(2, dim=2)
    plan = cpu_attn_get_scheduler_metadata(
        num_reqs=N,
        num_heads=H,
        num_kv_heads=key.shape[1],
        head_dim=D,
        seq_lens=lengths,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
    )
    cpu_attn_reshape_and_cache(key, value, keys, values, slots, "vec")
    out, extras = torch.empty_like(query, memory_format=torch.contiguous_format), (0.0, plan, None)
    of_cache = starts, lengths, D**-0.5, True, None, -1, table
    cpu_attention_with_kv_cache(query, keys, values, out, *of_cache, *extras)
    return out


def calls_while_sampling(
    device: Device, dtype: str = "float32", most_tokens: int = sampled_attention.MOST_TOKENS
) -> tuple[int, int]:
    """How often an engine calls the loops for experts and attention while it samples a round.

    Args:
        most_tokens: of a conversation whose attention the loop computes.
    """
    world = World(device, tiny_config(model={"dtype": dtype}, engine={"dtype": dtype}))
    world.sync(0)
    places, calls = ((sampled_experts, "experts"), (sampled_attention, "attend")), []
    loops = [getattr(*place) for place in places]

    def counted(loop: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*values: Any) -> torch.Tensor:
            calls.append(loop)
            return loop(*values)

        return call

    for place, loop in zip(places, loops, strict=True):
        setattr(*place, counted(loop))
    before, sampled_attention.MOST_TOKENS = sampled_attention.MOST_TOKENS, most_tokens
    try:
        world.collect(0)
    finally:
        sampled_attention.MOST_TOKENS = before
        for place, loop in zip(places, loops, strict=True):
            setattr(*place, loop)
    of_experts, of_attention = map(calls.count, loops)
    return of_experts, of_attention
