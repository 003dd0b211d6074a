"""R3's loop for an engine's experts on CPU beside vLLM's kernel, on the same packed weights."""

from __future__ import annotations

import torch

from r3.engine import cpu_experts
from r3.runtime.device import Device
from tests.engines import World
from tests.tiny import tiny_config

# Experts, of a token, hidden size, width: as in `tiny`, many small ones, one width above a tile
SIZES = ((8, 2, 128, 64), (64, 8, 256, 128), (4, 1, 96, 160))


def same_bits(_device: Device) -> dict[str, bool]:
    """Whether results are equal bit for bit, by type, sizes and number of tokens."""
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    found: dict[str, bool] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for E, K, D, F in SIZES:
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
                ours = cpu_experts.experts(tokens, w13, w2, *layer)
                name = f"{dtype}, {E} experts, {N} tokens"
                found[name] = torch.equal(ours.view(torch.uint8), vllms.view(torch.uint8))
                # One step to the next number is a difference.
                ours.view(torch.int16)[0, 0] += 1
                assert not torch.equal(ours, vllms)
    return found


def calls_while_sampling(device: Device) -> int:
    """How often an engine calls the loop while it samples one round."""
    world, calls, loop = World(device, tiny_config()), 0, cpu_experts.experts
    world.sync(0)

    def counted(*tensors: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loop(*tensors)

    cpu_experts.experts = counted
    try:
        world.collect(0)
    finally:
        cpu_experts.experts = loop
    return calls
