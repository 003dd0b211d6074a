"""What a policy keeps of a step, on real ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from r3.config import Config
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from tests.policies import (
    batches_of,
    experts_as_on_cuda,
    one_update,
    policy_of,
    tensors_with,
    train_step,
)
from tests.tiny import tiny_config

# Their sums are no dimension of the model.
LENGTHS = (37, 53, 41, 67, 43, 61, 47, 59)


def kept(device: Device, ep: int, settings: list[dict[str, dict[str, Any]]]) -> None:
    """Require that no tensor with a dimension of a micro-batch's tokens is reachable after a step.

    With each of several settings. All ranks must call.
    """
    mesh = build_mesh(device, tiny_config(parallel={"ep": ep}).parallel)
    for sections in settings:
        model = sections.get("model", {})
        model["experts"] = experts_as_on_cuda(model.get("experts", "auto"))
        always = {"model": model, "train": {"updates_per_step": 2}, "parallel": {"ep": ep}}
        _keeps_nothing(device, mesh, tiny_config(**sections | always))


def _keeps_nothing(device: Device, mesh: Mesh, config: Config) -> None:
    policy = policy_of(device, mesh, config)

    def trained() -> set[int]:
        batches = batches_of(mesh, policy.shape, LENGTHS, num_updates=2)
        reported: dict[str, Any] = {}
        train_step(policy, batches, config, report=reported.update)
        return {one.num_tokens for batch in batches for one in batch}

    counts = sorted(trained())
    assert tensors_with(counts) == []
    column = torch.ones(8, counts[0])[:, 0]
    assert any(shape.startswith("(8,)") for shape in tensors_with(counts)), "a slice of one shows"
    assert len(column) == 8  # it lives until here


def fragments(device: Device, path: str) -> list[float]:
    """What the device cannot get back after each of five steps, in GiB."""
    config = tiny_config(path, **{"model": {"dtype": "bfloat16"}})
    mesh = build_mesh(device, config.parallel)
    policy = policy_of(device, mesh, config)
    found = []
    for _ in range(5):
        (batch,) = batches_of(mesh, policy.shape, LENGTHS)
        one_update(policy, batch, total_updates=5)
        policy.offload()
        found.append(device.fragmented_gib())
        policy.onload()
    return found


def alive_afterwards(device: Device) -> dict[str, list[bool]]:
    """Whether model and optimizer outlive their last reference, by whether the policy was closed.

    Each policy has trained a step.
    """
    mesh = build_mesh(device, tiny_config().parallel)
    return {name: _alive(device, mesh, close=name == "closed") for name in ("closed", "kept")}


def _alive(device: Device, mesh: Mesh, *, close: bool) -> list[bool]:
    policy = policy_of(device, mesh, tiny_config())
    batches = batches_of(mesh, policy.shape, LENGTHS[:4])
    train_step(policy, batches, policy.config, report=lambda _metrics: None)
    found = [weakref.ref(each) for each in (policy.wrapped[0], policy.optimizer)]
    if close:
        policy.close()
    del policy, batches
    gc.collect()
    return [each() is not None for each in found]
