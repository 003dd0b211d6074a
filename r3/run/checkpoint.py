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
  - Gathering the optimizer's state takes several times its size of memory
    (r3/run/optimizer_state.py).
  - Megatron's file writer forks processes, which takes seconds and is unsafe beside an engine.
    torch's own writer uses threads.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from r3.models.hf_checkpoint import replace_folder
from r3.policy import Policy
from r3.policy.memory import chained
from r3.run.folder import sync_to_disk
from r3.run.identity import Identity
from r3.run.manifest import FileFacts, measure_durably, write_manifest
from r3.run.optimizer_state import gathered_state
from r3.run.plain import require_plain_metadata
from r3.run.resume import Found, step_folders
from r3.run.sound import require_sound
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh

_T = TypeVar("_T")


class SaveError(OSError):
    """A checkpoint could not be written for a reason outside of the run; it can be retried."""


def save(
    checkpoints: Path,
    policy: Policy,
    device: Device,
    mesh: Mesh,
    *,
    step: int,
    keep: int,
    files: Mapping[str, bytes] | None = None,
    identity: Identity | None = None,
) -> Path:
    """Write `step_000010/` (state after `step` steps) in one rename, point `latest` at it.

    Checkpoints older than the newest `keep` are deleted when the disk has the new one. All ranks
    must call, with the policy's training memory onloaded.

    Args:
        files: further files of this rank, by names that no other rank gives.
        identity: of the run, for the manifest.

    Raises:
        SaveError: on all ranks: a disk is full or cannot be written. What was there before is
            unchanged.
        UnsoundError: on all ranks: weights or moments that no run should continue from.
    """
    assert policy.is_onloaded, (
        f"rank {device.rank}: a checkpoint needs the optimizer state in memory"
    )
    require_sound(policy, mesh.world, f"after step {step}")
    folder = checkpoints / f"step_{step:06d}"
    partial = checkpoints / f".{folder.name}.partial"
    identity = identity or Identity(run_id="", key="")
    with policy.memory.optimizer_on_device():
        state = _sharded_state(policy, mesh, loading=False)
    sharded, common = _local_shards(state)
    started = time.time()
    needed = sum(mesh.world.all_gather_object(_num_bytes(sharded)))

    def prepare() -> None:
        if device.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _require_space(partial, needed)

    def write_own_files() -> dict[str, FileFacts]:
        (partial / _random_file(device.rank)).write_text(json.dumps(_random_state()))
        for name, content in (files or {}).items():
            (partial / name).touch(mode=0o600)  # conversations may hold texts of users
            (partial / name).write_bytes(content)
        shards = [path.name for path in partial.glob(f"__{device.rank}_*.distcp")]
        names = [_random_file(device.rank), *(files or {}), *shards]
        return measure_durably(partial, names)

    def finish() -> None:
        if device.rank:
            return
        facts = {
            "step": step,
            "update_number": policy.update_number,
            "optimizer_step": _optimizer_step(policy),
            "world_size": device.world_size,
            "seconds": round(time.time() - started, 3),
        }
        (partial / "r3.json").write_text(json.dumps(facts, indent=2))
        _write_megatron_facts(partial, common)
        known = {name: one for part in measured for name, one in part.items()}
        rest = sorted({path.name for path in partial.iterdir()} - set(known))
        write_manifest(
            partial,
            run_id=identity.run_id,
            step=step,
            files=known | measure_durably(partial, rest),
            key=identity.key_bytes,
        )
        replace_folder(partial, folder)
        link = checkpoints / ".latest.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, checkpoints / "latest")
        sync_to_disk(checkpoints)
        if keep:
            for _, old in step_folders(checkpoints)[:-keep]:
                # Renamed first: a kill in the middle must not leave half a folder of that name.
                unused = old.with_name(f".{old.name}.old")
                shutil.rmtree(unused, ignore_errors=True)
                os.replace(old, unused)
                shutil.rmtree(unused, ignore_errors=True)

    try:
        _together(mesh, prepare)
        _write_shards(partial, sharded, mesh)
        measured = _together(mesh, write_own_files)
        _together(mesh, finish)
    except SaveError:
        if device.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _together(mesh: Mesh, work: Callable[[], _T]) -> list[_T]:
    """Do `work` on every rank; return all results, or raise SaveError on all ranks."""
    value: _T | None = None
    failure = ""
    try:
        value = work()
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        failure = f"rank {mesh.world.rank}: {place}{error.strerror or error}"
    everybody = mesh.world.all_gather_object((value, failure))
    if failures := [failure for _, failure in everybody if failure]:
        raise SaveError("; ".join(failures))
    return [value for value, _ in everybody]


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder.parent}: no space: a checkpoint needs {needed / 2**20:,.1f} MiB, "
            f"{free / 2**20:,.1f} MiB are free"
        )


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
    require_plain_metadata(found.folder / ".metadata")
    assert policy.is_onloaded, f"rank {device.rank}: loading needs the optimizer state in memory"
    facts = json.loads((found.folder / "r3.json").read_text())
    with policy.memory.optimizer_on_device():
        _load_tensors(found, facts, policy, mesh, weights_only=weights_only)
    if weights_only:
        return
    policy.update_number = facts["update_number"]
    randoms = found.folder / _random_file(device.rank)
    if randoms.exists():
        _set_random_state(json.loads(randoms.read_text()))


def _load_tensors(
    found: Found, facts: Mapping[str, Any], policy: Policy, mesh: Mesh, *, weights_only: bool
) -> None:
    from megatron.core import dist_checkpointing

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
    for each in chained(policy.optimizer):
        each.get_parameter_state_dp_zero = partial(gathered_state, each)
    of_model = state if len(policy.chunks) > 1 else state["model"]
    state["optimizer"] = {
        str(i): each.sharded_param_state_fully_reshardable(of_model, loading, metadata)
        for i, each in enumerate(chained(policy.optimizer))
    }
    return state


def _local_shards(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's part of the sharded state, and the part that is not tensors."""
    from megatron.core.dist_checkpointing.serialization import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import (
        _replace_state_dict_keys_with_sharded_keys,
    )

    sharded, common = save_preprocess(state, True)
    sharded, *_ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    return sharded, common


def _num_bytes(sharded: dict[str, Any]) -> int:
    """Bytes that this rank will write, without replicas of other ranks' shards."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    return sum(
        shard.data.nbytes
        for shard in nested_values(sharded)
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id)
    )


def _write_shards(folder: Path, sharded: dict[str, Any], mesh: Mesh) -> None:
    """Write Megatron's shards with torch's threaded writer, for `dist_checkpointing.load`.

    Raises:
        SaveError: on all ranks: a disk is full or cannot be written.
    """
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        mcore_to_pyt_state_dict,
    )

    try:
        dcp.save(
            mcore_to_pyt_state_dict(sharded, False),
            storage_writer=dcp.FileSystemWriter(folder, thread_count=1, single_file_per_rank=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
    except dcp.api.CheckpointException as error:
        failures = {rank: cause for rank, (cause, _) in error.failures.items()}
        if not all(map(_is_of_disk, failures.values())):
            raise
        raise SaveError(
            "; ".join(
                f"rank {rank}: {folder}: {_of_disk(cause)}" for rank, cause in failures.items()
            )
        ) from None
    mesh.world.barrier()


def _is_of_disk(error: BaseException) -> bool:
    # torch's C++ writer reports a failed write as a RuntimeError, without the system's reason.
    return isinstance(error, OSError) or (
        isinstance(error, RuntimeError)
        and any(name in str(error) for name in ("PytorchStreamWriter", "inline_container"))
    )


def _of_disk(error: BaseException) -> str:
    reason = isinstance(error, OSError) and error.strerror
    return reason or "a write failed; is the disk full?"


def _write_megatron_facts(folder: Path, common: dict[str, Any]) -> None:
    """Write what `dist_checkpointing.load` expects beside the shards."""
    content = io.BytesIO()  # torch's own writer hides why a write failed
    torch.save(common, content)
    (folder / "common.pt").write_bytes(content.getvalue())
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

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        current = self._get_main_param_and_optimizer_states(model_param)
        if "step" in current and "step" not in tensors:
            tensors = {**tensors, "step": current["step"]}
        return original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.json"


def _random_state() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    # JSON keeps floats bit for bit: Python writes the shortest text that reads back as the same.
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    name, keys, *others = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *others))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
