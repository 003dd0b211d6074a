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
    R3 uses torch's own writer (r3/run/writing.py).
"""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from r3 import extras
from r3.policy import Policy
from r3.policy.memory import chained
from r3.run.optimizer_state import gathered_state
from r3.run.resume import Found
from r3.run.run_json import Identity
from r3.run.verify_checkpoint import require_plain_metadata
from r3.run.writing import Unwritten, make_room
from r3.runtime.device import Device
from r3.runtime.mesh import Axis, Mesh

# Weights of trained transformers stay below 1e3; beyond a hundred times that, logits are noise.
_LARGEST_WEIGHT = 1e5
# Gradients are clipped to a norm near 1. Unclipped ones beyond 1e10 come from such weights.
_LARGEST_MOMENT = {"exp_avg": 1e10, "exp_avg_sq": 1e20}
_SHOWN = 3


class UnsoundError(FloatingPointError):
    """Weights or moments that are not finite, or far too large."""


def capture(
    checkpoints: Path,
    policy: Policy,
    device: Device,
    mesh: Mesh,
    *,
    step: int,
    keep: int,
    values: Mapping[int, float] | None = None,
    evaluations: Sequence[Mapping[str, float]] = (),
    files: Mapping[str, bytes] | None = None,
    identity: Identity | None = None,
) -> Unwritten:
    """Copy the state after `step` steps to host memory, to be written while the run goes on.

    All ranks must call, with the policy's training memory onloaded. When this returns, the policy
    may change.

    Args:
        keep: checkpoints older than the newest so many are deleted when the new one is on the disk.
        values: of the evaluations by step; the checkpoint of the highest is not deleted.
        evaluations: the same as rows of metrics, for `r3.json`.
        files: further files of this rank, by names that no other rank gives.
        identity: of the run, for the manifest.

    Raises:
        SaveError: on all ranks: the disk has no room or cannot be written.
        UnsoundError: on all ranks: weights or moments that no run should continue from.
    """
    assert policy.is_onloaded, (
        f"rank {device.rank}: a checkpoint needs the optimizer state in memory"
    )
    started = time.time()
    require_sound(policy, mesh.world, f"after step {step}")
    with policy.memory.optimizer_on_device():
        state = _sharded_state(policy, mesh, loading=False)
    sharded, common = _local_shards(state)
    folder = checkpoints / f"step_{step:06d}"
    make_room(folder, sum(mesh.world.all_gather_object(_num_bytes(sharded))), mesh.world)
    _detach_from(policy, sharded)
    return Unwritten(
        folder=folder,
        shards=_for_torch(sharded),
        files={
            _random_file(device.rank): json.dumps(_random_state()).encode(),
            **({} if device.rank else _megatron_facts(common)),
        },
        private=files or {},
        facts={
            "step": step,
            "update_number": policy.update_number,
            "optimizer_step": _optimizer_step(policy),
            "world_size": device.world_size,
            "evaluations": list(evaluations),
        },
        identity=identity or Identity(run_id="", key=""),
        keep=keep,
        values=dict(values or {}),
        started=started,
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
    if weights_only:
        load_weights(found, policy.chunks, mesh)
        return
    require_plain_metadata(found.folder / ".metadata")
    assert policy.is_onloaded, f"rank {device.rank}: loading needs the optimizer state in memory"
    facts = json.loads((found.folder / "r3.json").read_text())
    with policy.memory.optimizer_on_device():
        _load_tensors(found, facts, policy, mesh)
    policy.update_number = facts["update_number"]
    randoms = found.folder / _random_file(device.rank)
    if randoms.exists():
        _set_random_state(json.loads(randoms.read_text()))


def load_weights(found: Found, chunks: Sequence[Any], mesh: Mesh) -> None:
    """Load the weights of a checkpoint into model chunks. All ranks must call."""
    require_plain_metadata(found.folder / ".metadata")
    _load_state(found, chunks, _sharded_weights(chunks, mesh))


def require_sound(policy: Policy, world: Axis, when: str) -> None:
    """Check this rank's weights and moments. All ranks must call.

    Args:
        when: for the message, such as "after step 5".

    Raises:
        UnsoundError: on all ranks, if a tensor of one rank is not finite or too large.
    """
    with policy.memory.optimizer_on_device():
        mine = [f"rank {world.rank}: {fault}" for fault in unsound(_training_tensors(policy))]
    if everything := [fault for faults in world.all_gather_object(mine) for fault in faults]:
        more = f" and {len(everything) - _SHOWN} more" if len(everything) > _SHOWN else ""
        raise UnsoundError(
            f"the policy is broken {when}: {'; '.join(everything[:_SHOWN])}{more}. Nothing was "
            "saved or exported. Fix: lower train.lr or set train.clip_grad, then start again: the "
            "run resumes from its newest checkpoint"
        )


def unsound(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Name the tensors with values that are not finite or beyond the limit of their kind."""
    for name, tensor in tensors:
        if not tensor.numel():
            continue
        # aminmax returns nan if any value is nan, and needs no copy of the tensor.
        smallest, largest = (float(value) for value in torch.aminmax(tensor))
        limit = _LARGEST_MOMENT.get(name.rpartition("/")[2], _LARGEST_WEIGHT)
        lowest = 0.0 if name.endswith("/exp_avg_sq") else -limit
        if not (lowest <= smallest and largest <= limit):  # also catches nan
            yield f"{name} has values from {smallest:.3g} to {largest:.3g}"


def _training_tensors(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    for i, chunk in enumerate(policy.chunks):
        for name, parameter in chunk.named_parameters():
            yield f"weights {i}/{name}", policy.values(parameter.detach())
    for name, tensor in policy.memory.optimizer_tensors():
        yield f"optimizer {name}", tensor


def _load_state(found: Found, chunks: Sequence[Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Read what is wanted, and load the weights among it into the chunks."""
    from megatron.core import dist_checkpointing

    state: dict[str, Any] = dist_checkpointing.load(wanted, str(found.folder))
    for name, chunk in _named(chunks):
        chunk.load_state_dict(state[name], strict=False)
    for adapters in extras.adapters().adapters_of(chunks):
        adapters.merge()
    return state


def _load_tensors(found: Found, facts: Mapping[str, Any], policy: Policy, mesh: Mesh) -> None:
    _fill_adam_state(policy)
    state = _load_state(found, policy.chunks, _sharded_state(policy, mesh, loading=True))
    with _step_free_load():
        for i, optimizer in enumerate(chained(policy.optimizer)):
            optimizer.load_parameter_state_from_fully_reshardable(state["optimizer"][str(i)])
            for parameter, values in optimizer.optimizer.state.items():
                # One tensor per parameter, on its device: the fused AdamW needs it there.
                values["step"] = torch.tensor(
                    float(facts["optimizer_step"]), device=parameter.device
                )


def _named(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _metadata(mesh: Mesh) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mesh.megatron.dp_cp,
    }


def _sharded_weights(chunks: Sequence[Any], mesh: Mesh) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, chunk in _named(chunks):
        if hasattr(chunk, "lora"):  # the base is that of the starting model
            state[name] = chunk.lora.sharded_state()
            continue
        sharded = chunk.sharded_state_dict(metadata=_metadata(mesh))
        # Placeholders of TransformerEngine: always None here, and they differ between the two kinds
        # of experts.
        state[name] = {key: value for key, value in sharded.items() if "_extra_state" not in key}
    return state


def _sharded_state(policy: Policy, mesh: Mesh, *, loading: bool) -> dict[str, Any]:
    state = _sharded_weights(policy.chunks, mesh)
    for each in chained(policy.optimizer):
        each.get_parameter_state_dp_zero = partial(gathered_state, each)
    of_model = state if len(policy.chunks) > 1 else state["model"]
    state["optimizer"] = {
        str(i): each.sharded_param_state_fully_reshardable(of_model, loading, _metadata(mesh))
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
    """Bytes of the tensors that this rank will write."""
    return sum(shard.data.nbytes for shard in _tensors(sharded))


def _tensors(sharded: dict[str, Any]) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return (each for each in nested_values(sharded) if isinstance(each, ShardedTensor))


def _detach_from(policy: Policy, sharded: dict[str, Any]) -> None:
    """Copy to host memory what the next update would change; gathered moments are copies."""
    own = [tensor for chunk in policy.chunks for tensor in chunk.state_dict().values()]
    own += [tensor for _, tensor in policy.memory.optimizer_tensors()]
    changing = {
        tensor.untyped_storage().data_ptr() for tensor in own if isinstance(tensor, torch.Tensor)
    }
    for shard in _tensors(sharded):
        shard.data = _independent(shard.data, changing)


def _independent(tensor: torch.Tensor, changing: set[int]) -> torch.Tensor:
    if tensor.is_cpu and tensor.untyped_storage().data_ptr() not in changing:
        return tensor.detach()
    return tensor.detach().to("cpu", copy=True)


def _for_torch(sharded: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict

    return mcore_to_pyt_state_dict(sharded, False)


def _megatron_facts(common: dict[str, Any]) -> dict[str, bytes]:
    """What `dist_checkpointing.load` expects beside the shards."""
    content = io.BytesIO()
    torch.save(common, content)
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    return {"common.pt": content.getvalue(), "metadata.json": json.dumps(backends).encode()}


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
