"""Pushed weights against an engine that loads the same weights from files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from r3.rollout import read_task
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from r3.sync import State
from r3.tools.planning.sync import Traffic
from tests.engines import World, engine_from_disk, one_round, signature
from tests.policies import export_policy
from tests.tiny import tiny_config


def push_equals_fresh_engine(
    device: Device,
    *,
    parallel: dict[str, int],
    out: str,
    model: str = "",
    hosts: list[str] | None = None,
) -> SimpleNamespace:
    """Push changed weights, and compare with an engine that loads the exported checkpoint.

    Returns:
        Whether two engines are the same, and how many shards this rank read from where.
        pushed: see `World.push_changed`.
        cached_equal: the pushed engine samples the same with every prompt in the prefix cache.
        stale: message of the proof of weights after one number changed in the last rank's engine.
        plan_stale: message of the proof after a push by a plan from before parameters of the engine
            were replaced and moved. A push of its own finds them.
    """
    world = World(device, tiny_config(model, parallel=parallel), hosts=hosts)
    world.sync(0)
    pushed, _ = world.push_changed(Path(out) / "export")
    again = signature(world.collect(1).rollouts)
    traffic = Traffic.of(world.stream.plan)
    if device.rank == device.world_size - 1:
        world.engine.llm.collective_rpc(_spoil)
    stale = world.proof_of_weights()
    return SimpleNamespace(
        pushed=pushed,
        cached_equal=again == pushed.sampled,
        stale=stale,
        plan_stale=_plan_stale(world),
        local_reads=traffic.local[0],
        peer_reads=traffic.peer[0],
        network_reads=traffic.network[0],
    )


def _plan_stale(world: World) -> str:
    """Replace parameters of the engine, push, and load once more by the plan of that push."""
    engine, stream = world.engine, world.stream
    engine.llm.collective_rpc(_replace)
    engine.load_weights(stream, policy_version=1)
    world.prove_weights()
    plan = engine._plan
    assert plan is not None
    engine.llm.collective_rpc(_replace)
    with torch.no_grad():
        plan.load(stream.read_blocks())
    return world.proof_of_weights()


def _replace(worker: Any) -> None:
    """Put another tensor in place of a parameter, and another memory under one."""
    first, second, *_ = worker.model_runner.get_model().model.layers
    zeros = torch.zeros_like(first.input_layernorm.weight)
    first.input_layernorm.weight = torch.nn.Parameter(zeros, requires_grad=False)
    second.input_layernorm.weight.data = second.input_layernorm.weight.data.clone().zero_()


def _spoil(worker: Any) -> None:
    norm = worker.model_runner.get_model().model.layers[1].input_layernorm.weight
    norm.data[3] = torch.nextafter(norm.data[3], torch.tensor(9.0, dtype=norm.dtype))


def pushed(device: Device, *, out: str, dtype: str) -> SimpleNamespace:
    """Sample before and after a push of changed weights; export these.

    Returns:
        Signatures before and after a push, and after each of two sleeps with
        another push; number of compared tensors.
    """
    world = World(device, tiny_config(model={"dtype": dtype}, engine={"dtype": dtype}))
    world.sync(0)
    before = signature(world.collect(0).rollouts)
    world.residency.move(State.TRAIN)
    world.perturb()
    world.sync(1)
    compared = world.prove_weights()
    after = signature(world.collect(1).rollouts)
    slept = []
    for _ in range(2):
        world.residency.move(State.TRAIN)
        world.sync(1)
        slept.append(signature(world.collect(1).rollouts))
    export_policy(Path(out), world.stream, world.policy)
    return SimpleNamespace(before=before, after=after, slept=slept, compared=compared)


def loaded(device: Device, *, model: str, dtype: str) -> list[str]:
    """Return what an engine samples that loads a checkpoint itself."""
    config = tiny_config(model, model={"dtype": dtype}, engine={"dtype": dtype})
    task = read_task(config)
    mesh = build_mesh(device, config.parallel)
    engine = engine_from_disk(config, device, task, policy_version=1)
    return signature(one_round(engine, task, mesh, config, 1, step=0).rollouts)
