"""Faults in a dump, an engine or a policy, and what the engine as an oracle says of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3.engine.proof import compare
from r3.runtime.device import Device
from r3.tools.mismatch.forced import forced_decoding, sides
from r3.tools.proof import sample_single_turn
from r3.types import Rollout
from tests.engines import World, net_of, rope_wrong_beyond
from tests.tiny import tiny_config

LENGTHS = (10, 10, 60, 60, 300, 700, 1300)  # of prompts; two rollouts each
CONTEXT = 256  # beyond it the rope factor is wrong


def dumped(world: World) -> list[Rollout]:
    """Rollouts of prompts of all lengths, as a step dumps them."""
    prompts, text = [], chain.from_iterable(p.tokens_T for p in world.task.prompts.prompts)
    for number, length in enumerate((*LENGTHS, *LENGTHS)):
        first, own = world.task.prompts.prompts[0], tuple(islice(text, length))
        prompts.append(replace(first, id=f"long:{number}", tokens_T=own))
    return sample_single_turn(
        world.engine,
        prompts,
        seeds=range(len(prompts)),
        policy_version=world.engine.policy_version,
        max_tokens=80,
        ends=False,
    )


def planted(
    device: Device, *, model: str, dtype: str = "float32", bias: bool = False
) -> SimpleNamespace:
    """Compare the three sides of one dump, sound and with each fault.

    Returns:
        Findings by planted fault.
        again: largest difference of log-probabilities of engine and dump in it.
        same_routes: whether the engine chose the dump's experts in it.
    """
    half = {"dtype": dtype}
    config = tiny_config(
        model,
        model=half,
        engine=half | {"max_model_len": 1400, "kv_cache_gib": 0.25},
        train={"micro_batch_tokens": 1536},
    )
    world = World(device, config)
    if bias:
        random = torch.Generator().manual_seed(0)
        for slot in world.policy.slots:
            if slot.name.endswith("expert_bias"):
                slot.tensor.copy_(0.2 * torch.randn(slot.tensor.shape, generator=random))
    world.sync(0)
    rollouts = dumped(world)
    net = net_of(world.engine)
    asked: list[Any] = []

    def said(dump: Sequence[Rollout] = rollouts, temperature: float = 1.0) -> list[str]:
        world.engine.reset_cache()
        forced = forced_decoding(world.engine, dump, world.mesh, temperature=temperature)
        found = sides(world.policy, dump, forced, world.mesh, tokens=1536)
        asked.append(found)
        return found.findings(exact=dtype == "float32")

    findings = {"sound": said()}
    sound = asked[0]
    if bias:
        for module in net.modules():
            if getattr(module, "e_score_correction_bias", None) is not None:
                exact = module.e_score_correction_bias.data
                exact.copy_(exact.mul(32).round().div(32))
        findings["rounded bias"] = said()
        different = compare(
            world.engine.llm, world.stream.read_blocks(), world.task.shape
        ).different
        findings["rounded bias, by bytes"] = list(different)
    else:
        late = np.roll(rollouts[2].routed_experts, 1, axis=0)
        shifted = [*rollouts[:2], replace(rollouts[2], routed_experts=late), *rollouts[3:]]
        findings["shifted"] = said(shifted)
        findings["temperature"] = said(temperature=0.6)
        with rope_wrong_beyond(CONTEXT, world.engine):
            findings["rope"] = said()
        stacked = [m for m in net.modules() if type(m).__name__ == "RoutedExperts"][1]
        for weight in (stacked.w13_weight.data, stacked.w2_weight.data):
            weight[[0, 3]] = weight[[3, 0]].clone()
        findings["experts"] = said()
    return SimpleNamespace(
        findings=findings,
        again=float(abs(sound.dump_delta_N).max()),
        same_routes=bool((sound.engine_NLK == sound.dump_NLK).all()),
    )
