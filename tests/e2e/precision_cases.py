"""Engine and policy in bfloat16, with and without a float32 output layer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from r3.engine.build import require_head_type
from r3.runtime.device import Device
from r3.sync import State
from tests.engines import World, net_of
from tests.errors import message_of
from tests.policies import figures_of
from tests.tiny import tiny_config


def head(device: Device, *, fp32: bool, model: str = "") -> SimpleNamespace:
    """Push changed weights; compare the output layers of engine and policy.

    Returns:
        Output layers of engine and policy.
        refusal: message about an engine whose head has the other type.
        types: types of the engine's logits.
        rounded: whether all of them are bfloat16 numbers.
        tokens: sampled tokens.
        policy_error: largest difference of the policy's log-probabilities from float64 products.
        figures: mismatch of engine and policy.
    """
    config = tiny_config(
        model,
        model={"dtype": "bfloat16", "fp32_head": fp32},
        engine={"dtype": "bfloat16"},
        rollout={"prompts_per_step": 16},
    )
    world = World(device, config)
    world.perturb()
    world.sync(0)
    types: set[str] = set()
    rounded: list[bool] = []

    def watch(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        types.add(str(logits.dtype))
        rounded.append(torch.equal(logits.float(), logits.bfloat16().float()))

    net_of(world.engine).logits_processor.register_forward_hook(watch)
    collected = world.collect(0)
    world.residency.move(State.TRAIN)
    batch = world.batch_of(collected, 1024)
    policy = world.policy
    hidden: list[torch.Tensor] = []
    policy.chunks[0].decoder.final_layernorm.register_forward_hook(
        lambda _module, _inputs, states: hidden.append(states[:, 0].double())
    )
    scores = policy.score(batch, mode="replay")
    weight = policy.chunks[0].output_layer.weight.double()
    exact_N = torch.cat(
        [
            (states @ weight.t())
            .log_softmax(-1)
            .gather(-1, micro_batch.targets_N[:, None].to(states.device))[:, 0]
            for states, micro_batch in zip(hidden, batch, strict=True)
        ]
    )
    other = replace(config, model=replace(config.model, fp32_head=not fp32))
    return SimpleNamespace(
        refusal=message_of(lambda: require_head_type(world.engine.llm, other), AssertionError),
        types=sorted(types),
        rounded=all(rounded),
        tokens=float(torch.cat(scores.loss_mask).sum()),
        policy_error=float((torch.cat(scores.logprobs) - exact_N).abs().max()),
        figures=figures_of(scores),
    )
