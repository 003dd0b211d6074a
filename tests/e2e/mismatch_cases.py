"""Experiment E5: the same tokens scored with replayed and with live routes, batch by batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from r3.runtime.device import Device
from r3.sync import State
from r3.types import MicroBatch
from tests.engines import World
from tests.families import family_checkpoint
from tests.policies import figures_of
from tests.tiny import tiny_config

TOPK, EXPERT_FFN = 4, 64


def near_tie_checkpoint(
    folder: Path, *, dense: bool = False, head: float = 4.0, experts: float = 4.0
) -> Path:
    """Write a random MoE of 16 experts, top 4, with routers near ties, or its dense twin.

    A random model has near ties but flat logits, which hide every mismatch: `head` scales its
    logits and `experts` what the experts add to the residual stream, so that live routing in
    bfloat16 costs a k3 of 1e-3 to 1e-2. Weights are rounded to
    bfloat16: a float32 policy then holds the very weights that a bfloat16 engine does.
    """
    family_checkpoint(
        folder,
        "qwen3" if dense else "qwen3_moe",
        num_hidden_layers=4,
        head_dim=32,
        intermediate_size=TOPK * EXPERT_FFN,
        max_position_embeddings=512,
        **{}
        if dense
        else dict(num_experts=16, num_experts_per_tok=TOPK, moe_intermediate_size=EXPERT_FFN),
    )
    # four experts weigh a quarter each, a dense layer is all of them with weight one
    scales = {"lm_head.weight": head, "down_proj.weight": experts / (TOPK if dense else 1)}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            scale = next((s for ending, s in scales.items() if name.endswith(ending)), 1.0)
            tensors[name] = (tensor * scale).to(torch.bfloat16)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def paired(
    device: Device,
    *,
    model: str,
    policy_dtype: str,
    engine_dtype: str,
    batches: int,
    prompts: int = 4,
    group: int = 4,
    max_tokens: int = 24,
    router_logits: str = "float32",
) -> list[SimpleNamespace]:
    """Score sampled batches with replayed and with live routes; no update is made.

    Returns:
        By batch: the mismatch of engine and policy with `live` and with `replay`ed routes, loss
        tokens, the share of slots in which live routes differ from captured ones, and of tokens
        with such a slot. A dense model has `live` alone.
    """
    config = tiny_config(
        model,
        model={"dtype": policy_dtype, "router_logits": router_logits},
        engine={"dtype": engine_dtype},
        rollout={
            "prompts_per_step": prompts,
            "group_size": group,
            "max_response_tokens": max_tokens,
        },
    )
    world = World(device, config)
    world.sync(0)
    rounds = [world.collect(0, step=step) for step in range(batches)]
    world.residency.move(State.TRAIN)
    rows = []
    for collected in rounds:
        batch = world.batch_of(collected, 4096)
        flat = batch
        if not world.engine.capture:
            rows.append(SimpleNamespace(live=figures_of(world.policy.score(flat, mode="live"))))
            continue
        live = world.policy.score(flat, mode="record")  # routes live, and keeps the routes
        slots, tokens = _disagreement(flat, live.ledger.recorded)
        rows.append(
            SimpleNamespace(
                live=figures_of(live),
                replay=figures_of(world.policy.score(flat, mode="replay")),
                tokens=batch[0].num_loss_tokens,
                slots_differ=slots,
                tokens_differ=tokens,
            )
        )
    return rows


def _disagreement(
    micro_batches: tuple[MicroBatch, ...], chosen: tuple[torch.Tensor, ...]
) -> tuple[float, float]:
    """Shares of (token, layer) slots, and of tokens in any layer, routed to other experts."""
    differs = [
        (live_NLK.sort(-1).values != micro_batch.routed_experts_NLK.long().sort(-1).values).any(-1)[
            micro_batch.captured_N
        ]
        for micro_batch, live_NLK in zip(micro_batches, chosen, strict=True)
    ]
    slots = torch.cat(differs)
    return float(slots.float().mean()), float(slots.any(-1).float().mean())
