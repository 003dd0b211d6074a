"""Sampling masks from a real engine, replayed in the policy: for test_sampling_masks.py."""

from __future__ import annotations

import hashlib
import json
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
from tests.families import engine_checkpoint
from tests.tiny import tiny_config

AGENT = '''
import hashlib, json, pathlib
import httpx
from r3.envs import serve

class Tokens:
    """Two turns of token ids, and a call that restricts nothing; writes what it got."""
    async def run(self, task, model):
        ids, kept = list(map(int, task.tokens_T)), [[] for _ in task.tokens_T]
        async with serve(model) as access, httpx.AsyncClient(timeout=300) as client:
            url = access.base_url.removesuffix("/v1") + "/inference/v1/generate"
            async def ask(train, **how):
                body = {"model": "policy", "token_ids": ids, "train": train}
                body |= {"sampling_params": {"max_tokens": 9, **how}}
                head = {"x-api-key": access.api_key}
                reply = await client.post(url, json=body, headers=head)
                return reply.raise_for_status().json()["choices"][0]
            for turn in range(2):
                choice = await ask(True)
                ids += [*choice["token_ids"], 7, 8]
                kept += [*choice["sampling_mask"], [], []]
            assert (await ask(False, top_k=0, top_p=1.0))["sampling_mask"] is None
        name = hashlib.md5(str(ids[:-2]).encode()).hexdigest()
        pathlib.Path(__file__).with_name(f"{name}.json").write_text(json.dumps(kept[:-2]))
        return 1.0
'''


def with_ties(folder: Path) -> Path:
    """A random MoE whose tokens come in pairs with equal logits."""
    engine_checkpoint(folder, "qwen3_moe")
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
        k3: with the engine's masks.
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
        scores = world.policy.score(batch, mode="replay")
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


Sets = list[list[int]]  # of each token, none of those that were not sampled


def sent(device: Device, *, folder: str) -> list[tuple[Sets, Sets]]:
    """The kept tokens of each rollout: what its client got, and what it is trained with."""
    (file := Path(folder) / "agent.py").write_text(AGENT)
    rollout = {"prompts_per_step": 4, "group_size": 2, "max_response_tokens": 24}
    rollout |= {"top_p": 0.9, "top_k": 20}
    world = World(device, tiny_config(env={"path": f"{file}:Tokens"}, rollout=rollout))
    world.sync(0)
    found = []
    for each in world.collect(0).rollouts:
        mask, tokens = each.sampling_mask, str(each.tokens_T.tolist())
        assert mask is not None
        own = [ids.tolist() for ids in np.split(mask.token_ids, np.cumsum(mask.counts_T)[:-1])]
        name = hashlib.md5(tokens.encode()).hexdigest()
        found.append((json.loads(file.with_name(f"{name}.json").read_text()), own))
    return found
