"""Experiment E5: the same tokens of one engine scored by the policy with replayed and with live
routes, batch by batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from r3.handover.rollouts import PackingSpec, distribute
from r3.metrics.mismatch import mismatch
from r3.policy import TokenScores
from r3.rollout.scored import gather_rewards, score_all
from r3.runtime.device import Device
from r3.types import MicroBatch
from tests.e2e.cases import World
from tests.families import family_checkpoint
from tests.tiny import tiny_config

TOPK, EXPERT_FFN = 4, 64


def near_tie_checkpoint(
    folder: Path, *, dense: bool = False, head: float = 4.0, experts: float = 4.0
) -> Path:
    """A random MoE of 16 experts, top 4, whose routers often stand near a tie, or its dense twin of
    the same active size.

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


def figures_of(scores: TokenScores) -> dict[str, float]:
    """The mismatch panel of one pass."""
    columns = (scores.logprobs, scores.rollout_logprobs, scores.loss_mask)
    parts = mismatch(*(torch.cat(column) for column in columns))
    return {name: type(part).reduce([part]) for name, part in parts.items()}


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
) -> dict[str, Any]:
    """Per batch: figures with routes replayed and live, and how many slots and tokens the two
    routers decide differently.

    The learning rate is nought, as it were: no update is made. Rows of a dense model have figures
    of live routing only.
    """
    config = tiny_config(
        model,
        model={"dtype": policy_dtype},
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
    world.residency.move(world.residency.state.TRAIN)
    rows = []
    for answers in rounds:
        scored = score_all(answers, gather_rewards(answers, world.mesh.world, config), config)
        (batch,), _ = distribute(
            scored,
            world.mesh,
            world.task.shape,
            PackingSpec(micro_batch_tokens=4096, captured=world.engine.capture),
        )
        flat = batch.micro_batches
        if not world.engine.capture:
            rows.append({"live": figures_of(world.policy.score(flat, mode="live"))})
            continue
        live = world.policy.score(flat, mode="record")  # routes live, and keeps what it chose
        rows.append(
            {
                "replay": figures_of(world.policy.score(flat, mode="replay")),
                "live": figures_of(live),
                "tokens": batch.num_loss_tokens,
            }
            | _disagreement(flat, live.ledger.recorded)
        )
    return {"rows": rows}


def _disagreement(
    micro_batches: tuple[MicroBatch, ...], chosen: tuple[torch.Tensor, ...]
) -> dict[str, float]:
    """Shares of (token, layer) slots, and of tokens in any layer, where a live pass chose other
    experts than the engine.
    """
    differs = [
        (live_NLK.sort(-1).values != micro_batch.routed_experts_NLK.long().sort(-1).values).any(-1)[
            micro_batch.captured_N
        ]
        for micro_batch, live_NLK in zip(micro_batches, chosen, strict=True)
    ]
    slots = torch.cat(differs)
    return {
        "slots_differ": float(slots.float().mean()),
        "tokens_differ": float(slots.any(-1).float().mean()),
    }
