"""Sampling masks from a real engine, replayed in the policy: for test_sampling_masks.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from r3.runtime.device import Device
from r3.sync import State
from r3.tools.passes import pass_figures
from r3.types import Rollout, SamplingMask
from tests.engines import World
from tests.families import engine_sizes, family_checkpoint
from tests.tiny import tiny_config


def with_ties(folder: Path) -> Path:
    """A random MoE whose tokens come in pairs with equal logits."""
    family_checkpoint(folder, "qwen3_moe", **engine_sizes("qwen3_moe"))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"][1::2] = tensors["lm_head.weight"][::2]
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


def moved(rollout: Rollout) -> Rollout:
    """The masks of the next sampled token, of the last one its own, with the drawn token added."""
    if (mask := rollout.sampling_mask) is None:
        return rollout
    sets = np.split(mask.token_ids, np.cumsum(mask.counts_T)[:-1])
    places = np.flatnonzero(rollout.loss_mask_T)
    later = [*places[1:], places[-1]]
    for place, of in list(zip(places, [sets[i] for i in later], strict=True)):
        sets[place] = np.union1d(of, rollout.tokens_T[place]).astype(np.int32)
    counts_T = np.array([len(each) for each in sets], np.int32)
    return replace(
        rollout, sampling_mask=SamplingMask(counts_T=counts_T, token_ids=np.concatenate(sets))
    )


def masked(device: Device, *, model: str = "", top_k: int = 20, **sections: Any) -> SimpleNamespace:
    """Sample a batch, and score it with the engine's masks, without, and with wrong ones.

    Returns:
        Mismatch of one batch whose tokens were sampled with top_p 0.9 and top_k.
        k3, abs_max: with the engine's masks.
        k3_dropped: without masks.
        k3_moved: with those of the next sampled token, and the drawn token added.
        gain: the most that a log-probability rises where masks are dropped.
        most, mean: tokens kept for a token.
        observed: tokens that were not sampled, after a sampled one.
        preemptions: of requests of the batch.
    """
    rollout = {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 24}
    sections["rollout"] = {"top_p": 0.9, "top_k": top_k, **rollout, **sections.get("rollout", {})}
    world = World(device, tiny_config(model, **sections))
    world.sync(0)
    collected = world.collect(0)
    world.residency.move(State.TRAIN)
    rollouts = collected.rollouts

    def scored(change: Callable[[Rollout], Rollout]) -> tuple[dict[str, float], torch.Tensor]:
        samples = [replace(each, rollout=change(each.rollout)) for each in collected.samples]
        batch = world.batch_of(replace(collected, samples=samples), 512)
        scores = world.policy.score(batch.micro_batches, mode="replay")
        masks = [each > 0 for each in scores.loss_mask]
        logprobs = [each[mask] for each, mask in zip(scores.logprobs, masks, strict=True)]
        own = torch.cat(logprobs) if logprobs else torch.zeros(0)
        return pass_figures(world.policy, scores), own

    right, logprobs = scored(lambda one: one)
    dropped, whole = scored(lambda one: replace(one, sampling_mask=None))
    wrong, _ = scored(moved)
    counts = [each.sampling_mask.counts_T for each in rollouts if each.sampling_mask]
    kept = np.concatenate([each[each > 0] for each in counts]) if counts else np.ones(1)
    first_of = [int(each.loss_mask_T.argmax()) for each in rollouts]
    return SimpleNamespace(
        k3=right["k3"],
        abs_max=right["abs_max"],
        k3_dropped=dropped["k3"],
        k3_moved=wrong["k3"],
        gain=float((whole - logprobs).max()) if len(whole) else 0.0,
        most=int(kept.max()),
        mean=float(kept.mean()),
        observed=sum(
            int((each.loss_mask_T[first:] == 0).sum())
            for each, first in zip(rollouts, first_of, strict=True)
        ),
        preemptions=collected.metrics["engine/preemptions"].value if rollouts else 0.0,
    )
