"""What the engine does with a family's weights, on every rank: real vLLM, real Megatron."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from r3.engine import Engine
from r3.handover.memory import State
from r3.handover.weights import export, prove_sync
from r3.runtime.device import Device
from tests.e2e.cases import World, signature
from tests.tiny import tiny_config


def pushed_family(device: Device, *, model: str, out: str) -> dict[str, Any]:
    """Push moved weights, prove them token by token, and compare with an engine freshly loaded from
    their export.
    """
    world = World(device, tiny_config(model))
    world.sync(0)
    prompts = world.task.prompts.prompts[:4]
    proofs = [prove_sync(world.engine, world.policy, prompts, world.config, world.mesh)]
    before = signature(world.collect(0).rollouts)
    world.residency.move(State.TRAIN)
    world.perturb()
    world.sync(1)
    proofs.append(prove_sync(world.engine, world.policy, prompts, world.config, world.mesh))
    answers = world.collect(1).rollouts
    pushed = signature(answers)
    folder = Path(out) / "export"
    export(folder, world.stream, world.policy, device, world.mesh, like=model, step=1)
    config = replace(world.config, model=replace(world.config.model, path=str(folder)))
    fresh = Engine(
        config,
        device,
        world.task.shape,
        world.task.tokenizer,
        max_model_len=world.task.max_model_len,
    )
    fresh.wake("weights")
    fresh.wake("kv_cache")
    fresh.policy_version, fresh._stale_cache = (
        1,
        False,
    )  # it was loaded from the files, not pushed to
    return {
        "moved": before != pushed,
        "equal": pushed == signature(world.collect(1, engine=fresh).rollouts),
        "proofs": proofs,
        "routes": list(answers[0].routed_experts.shape),
    }
