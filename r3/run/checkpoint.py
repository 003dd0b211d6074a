"""Checkpoints: written completely or not at all, resumed bit for bit, readable under other layouts.

A checkpoint has weights, optimizer state, the step (data order, sampling seeds and learning rate
are functions of it), random states and suspended conversations (r3/rollout/partial.py). Tensors go
through Megatron's sharded state and torch's distributed checkpoint writer, so a run may resume with
other parallel sizes.

Upstream faults that this module works around (Megatron-Core 0.16.1 with torch's AdamW):
  - `load_state_dict` gives every parameter the same `step` tensor, which AdamW then advances once
    per parameter: wrong from the second update on, without an error. Here tensors are loaded one
    optimizer at a time, and every parameter gets its own counter.
  - The fully reshardable load asks for a `step` that the save does not write (KeyError).
  - Megatron's file writer forks processes, which takes seconds and is unsafe beside an engine.
    torch's own writer uses threads.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from r3.models.hf_checkpoint import replace_folder
from r3.policy import Policy
from r3.policy.memory import chained
from r3.run.resume import Found, step_folders
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh


def save(
    checkpoints: Path,
    policy: Policy,
    device: Device,
    mesh: Mesh,
    *,
    step: int,
    keep: int,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint in one rename and point `latest` at it. All ranks must call.

    Args:
        checkpoints: folder of the run's checkpoints.
        policy: with its training memory onloaded.
        device: this rank's device.
        mesh: the layout of the ranks.
        step: training steps behind this state; the folder is `step_000010` for 10.
        keep: newest checkpoints to keep; 0 = all.
        files: further files of this rank, by names that no other rank uses.

    Returns:
        The folder of the checkpoint.
    """
    assert policy.is_onloaded, (
        f"rank {device.rank}: a checkpoint needs the optimizer state in memory"
    )
    folder = checkpoints / f"step_{step:06d}"
    partial = checkpoints / f".{folder.name}.partial"
    if device.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.world.barrier()
    started = time.time()
    _write_sharded(partial, _sharded_state(policy, mesh, loading=False))
    torch.save(_random_state(), partial / f"random_{device.rank:05d}.pt")
    for name, content in (files or {}).items():
        (partial / name).write_bytes(content)
    mesh.world.barrier()
    if device.rank == 0:
        facts = {
            "step": step,
            "update_number": policy.update_number,
            "optimizer_step": _optimizer_step(policy),
            "world_size": device.world_size,
            "seconds": round(time.time() - started, 3),
        }
        (partial / "r3.json").write_text(json.dumps(facts, indent=2))
        replace_folder(partial, folder)
        link = checkpoints / ".latest.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, checkpoints / "latest")
        if keep:
            for _, old in step_folders(checkpoints)[:-keep]:
                shutil.rmtree(old)
    mesh.world.barrier()
    return folder


def load(
    found: Found, policy: Policy, device: Device, mesh: Mesh, *, weights_only: bool = False
) -> None:
    """Load a checkpoint into the policy and the random generators. All ranks must call.

    Restores the weights, both Adam moments, their step and (in half precision) the float32 main
    parameters. Random states are restored only if this rank existed when the checkpoint was saved.

    Args:
        found: the checkpoint.
        policy: with its training memory onloaded.
        device: this rank's device.
        mesh: the layout of the ranks; it may differ from that of the save.
        weights_only: load the weights alone, for a policy that will not be trained.
    """
    from megatron.core import dist_checkpointing

    assert policy.is_onloaded, f"rank {device.rank}: loading needs the optimizer state in memory"
    facts = json.loads((found.folder / "r3.json").read_text())
    if not weights_only:
        _fill_adam_state(policy)
    wanted = _sharded_state(policy, mesh, loading=True, optimizer=not weights_only)
    state = dist_checkpointing.load(wanted, str(found.folder))
    for name, chunk in _named_chunks(policy):
        chunk.load_state_dict(state[name], strict=False)
    if weights_only:
        return
    with _step_free_load():
        for i, optimizer in enumerate(chained(policy.optimizer)):
            optimizer.load_parameter_state_from_fully_reshardable(state["optimizer"][str(i)])
            for parameter, values in optimizer.optimizer.state.items():
                # One tensor per parameter, on its device: the fused AdamW needs it there.
                values["step"] = torch.tensor(
                    float(facts["optimizer_step"]), device=parameter.device
                )
    policy.update_number = facts["update_number"]
    randoms = found.folder / f"random_{device.rank:05d}.pt"
    if randoms.exists():
        # R3's own file; the states of Python and numpy are not tensors.
        kept = torch.load(randoms, weights_only=False)
        torch.set_rng_state(kept["torch"])
        np.random.set_state(kept["numpy"])
        random.setstate(kept["python"])


def _named_chunks(policy: Policy) -> list[tuple[str, Any]]:
    return [
        ("model" if len(policy.chunks) == 1 else f"model{i}", chunk)
        for i, chunk in enumerate(policy.chunks)
    ]


def _sharded_state(
    policy: Policy, mesh: Mesh, *, loading: bool, optimizer: bool = True
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mesh.megatron.dp_cp,
    }
    state: dict[str, Any] = {}
    for name, chunk in _named_chunks(policy):
        sharded = chunk.sharded_state_dict(metadata=metadata)
        # Placeholders of TransformerEngine: always None here, and they differ between the two kinds
        # of experts.
        state[name] = {key: value for key, value in sharded.items() if "_extra_state" not in key}
    if not optimizer:
        return state
    of_model = state if len(policy.chunks) > 1 else state["model"]
    state["optimizer"] = {
        str(i): each.sharded_param_state_fully_reshardable(of_model, loading, metadata)
        for i, each in enumerate(chained(policy.optimizer))
    }
    return state


def _write_sharded(folder: Path, state: dict[str, Any]) -> None:
    """Write sharded state with torch's threaded writer, as `dist_checkpointing.load` reads it."""
    from megatron.core.dist_checkpointing.serialization import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

    sharded, common = save_preprocess(state, True)
    sharded, *_ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    dcp.save(
        mcore_to_pyt_state_dict(sharded, False),
        storage_writer=dcp.FileSystemWriter(folder, thread_count=1, single_file_per_rank=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(common, folder / "common.pt")
        backends = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (folder / "metadata.json").write_text(json.dumps(backends))


def _optimizer_step(policy: Policy) -> int:
    for optimizer in chained(policy.optimizer):
        for values in optimizer.optimizer.state.values():
            return int(values["step"])
    return 0


def _fill_adam_state(policy: Policy) -> None:
    """Create the state of torch's AdamW, which has none before its first step, to load into it."""
    for optimizer in chained(policy.optimizer):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.optimizer.state[parameter]:
                    optimizer.optimizer.state[parameter].update(
                        step=torch.zeros((), device=parameter.device),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


@contextmanager
def _step_free_load() -> Iterator[None]:
    """Inside, loading optimizer tensors does not need the `step` that the save does not write."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
        current = self._get_main_param_and_optimizer_states(parameter)
        if "step" in current and "step" not in tensors:
            tensors = {**tensors, "step": current["step"]}
        return original(self, parameter, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
