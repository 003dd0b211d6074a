"""One step on real rollouts: routes, mismatch, memory, and what is sampled in several layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from r3.routing import Mode
from r3.runtime.device import Device
from r3.sync import State
from tests.engines import World
from tests.memory import bytes_of
from tests.policies import figures_of, one_update, read_back, routing_map
from tests.tiny import tiny_config


def step_routes(device: Device, *, ep: int, dtype: str = "float32") -> SimpleNamespace:
    """Sample, distribute, pack and train on real rollouts; read the routers back.

    Returns:
        Routes of one training step.
        proof: largest log-probability difference in the proof of the weight sync.
        slots: captured (token, layer) slots.
        wrong: slots whose token went to other experts than captured.
        k3: of the same tokens with "replay" and with "live" routes.
        abs_max: largest log-probability difference of a trained token.
    """
    config = tiny_config(
        parallel={"ep": ep},
        rollout={"prompts_per_step": 8},
        model={"dtype": dtype},
        engine={"dtype": dtype},
    )
    world = World(device, config)
    world.sync(0)
    proof = world.proof()
    collected = world.collect(0)
    world.residency.move(State.TRAIN)
    batch = world.batch_of(collected, 700)
    policy = world.policy
    with read_back(policy) as used:
        metrics = policy.forward_backward(batch)
    modes: tuple[Mode, ...] = ("replay", "live")
    k3 = {mode: figures_of(policy.score(batch, mode=mode))["k3"] for mode in modes}
    slots = wrong = 0
    for i, micro_batch in enumerate(batch):
        captured = micro_batch.captured_N
        for position, layer in enumerate(policy.shape.moe_layers):
            routes_NK = micro_batch.routed_experts_NLK[captured, position]
            given = routing_map(routes_NK, policy.shape.num_experts)
            slots += len(given)
            wrong += int((used[layer][i][captured] != given).any(-1).sum())
    return SimpleNamespace(
        proof=proof, slots=slots, wrong=wrong, k3=k3, abs_max=metrics["mismatch/abs_max"].value
    )


def sampled(device: Device, *, ep: int, **engine: Any) -> dict[str, str]:
    """Return "step, prompt, sample" -> tokens of two steps."""
    world = World(device, tiny_config(parallel={"ep": ep}, engine=engine))
    world.sync(0)
    tokens = {}
    for step in (1, 2):
        for rollout in world.collect(0, step=step).rollouts:
            name = f"{step} {rollout.prompt_id} {rollout.sample_index}"
            tokens[name] = str(rollout.tokens_T.tolist())
    return tokens


def memory_moves(device: Device, *, dtype: str) -> SimpleNamespace:
    """Measure memory in each state, and compare the optimizer state before and after.

    Returns:
        Memory of the states, and whether the moves restore everything bit for bit.
    """
    config = tiny_config(engine={"kv_cache_gib": 0.5, "dtype": dtype}, model={"dtype": dtype})
    world = World(device, config)
    policy = world.policy
    random_state = torch.get_rng_state()
    world.sync(0)
    for storage in world.engine._sleeper._cache._storages():
        bytes_of(storage).fill_(0)  # only what is written takes memory
    generate_gib = device.used_gib()
    gradient_bytes = sum(
        buffer.untyped_storage().nbytes() for buffer in policy.memory.gradient_buffers()
    )
    collected = world.collect(0)
    neutral = torch.equal(random_state, torch.get_rng_state())
    world.residency.move(State.TRAIN)
    asleep_gib = device.used_gib()
    one_update(policy, world.batch_of(collected, 512), total_updates=4)
    kept = {key: tensor.clone() for key, tensor in policy.memory.optimizer_tensors()}
    world.sync(1)
    in_generate = sum(
        tensor.untyped_storage().nbytes() for _, tensor in policy.memory.optimizer_tensors()
    )
    world.residency.move(State.TRAIN)
    back = all(torch.equal(kept[key], tensor) for key, tensor in policy.memory.optimizer_tensors())
    return SimpleNamespace(
        generate_gib=generate_gib,
        asleep_gib=asleep_gib,
        gradient_bytes_in_generate=gradient_bytes,
        optimizer_bytes_in_generate=in_generate,
        optimizer_tensors=len(kept),
        restored=back,
        random_state_kept=neutral,
    )
