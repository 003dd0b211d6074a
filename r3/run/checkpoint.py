"""Checkpoints: written completely or not at all, resumed bit for bit, readable under other layouts.

A checkpoint has weights, optimizer state, the step (data order, sampling seeds and learning rate
are functions of it), random states and suspended conversations (r3/partial). Tensors go
through Megatron's sharded state and torch's distributed checkpoint writer, so a run may resume with
other parallel sizes.

Upstream faults that this module works around (Megatron-Core 0.16.1 with torch's AdamW):
  - `load_state_dict` gives every parameter the same `step` tensor, which AdamW then advances once
    per parameter: wrong from the second update on, without an error. Here tensors are loaded one
    optimizer at a time, and every parameter gets its own counter.
  - The fully reshardable load asks for a `step` that the save does not write (KeyError).
  - `DistributedOptimizer.get_parameter_state_dp_zero` gathers whole buffers on the device of every
    rank, and keeps the result on the host of every rank. For 30 B parameters on 8 ranks that is
    27 GiB per device and about 130 GiB of host memory per rank. `gathered_state` takes a piece at a
    time.
  - Megatron's file writer forks processes, which takes seconds and is unsafe beside an engine.
    R3 uses torch's own writer (r3/run/checkpointer.py).
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from r3 import extras
from r3.policy import Policy
from r3.policy.memory import chained
from r3.run.manifest import require_plain_metadata
from r3.runtime.device import Device
from r3.runtime.mesh import Axis, Mesh

# Weights of trained transformers stay below 1e3; beyond a hundred times that, logits are noise.
_LARGEST_WEIGHT = 1e5
# Gradients are clipped to a norm near 1. Unclipped ones beyond 1e10 come from such weights.
_LARGEST_MOMENT = {"exp_avg": 1e10, "exp_avg_sq": 1e20}
_SHOWN = 3
KEYS = ("param", "exp_avg", "exp_avg_sq")
PIECE = 1 << 24
"""Values on the device of the gathering rank at a time, of all ranks together."""


class UnsoundError(FloatingPointError):
    """Weights or moments that are not finite, or far too large."""


def copied_state(
    policy: Policy, device: Device, mesh: Mesh, *, make_room: Callable[[int], None]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Copy this rank's state to host memory: shards as torch's writer takes them, and files.

    All ranks must call, with the policy's training memory onloaded.

    Args:
        make_room: called on all ranks with the bytes of this rank, before anything is copied.
    """
    assert policy.is_onloaded, (
        f"rank {device.rank}: a checkpoint needs the optimizer state in memory"
    )
    with policy.memory.optimizer_on_device():
        state = _sharded_state(policy, mesh, loading=False)
    sharded, common = _local_shards(state)
    make_room(sum(shard.data.nbytes for shard in _tensors(sharded)))
    _detach_from(policy, sharded)
    files = RandomStates(device.rank).state_dict()
    if device.rank == 0:
        files |= _megatron_facts(common)
    return _for_torch(sharded), files


def load_checkpoint(
    folder: Path, policy: Policy, device: Device, mesh: Mesh, *, weights_only: bool = False
) -> None:
    """Load a checkpoint into the policy and the random generators. All ranks must call.

    Restores the weights, both Adam moments, their step and (in half precision) the float32 main
    parameters. Random states are restored only if this rank existed when the checkpoint was saved.

    Args:
        folder: the checkpoint.
        policy: with its training memory onloaded.
        device: this rank's device.
        mesh: the layout of the ranks; it may differ from that of the save.
        weights_only: load the weights alone, for a policy that will not be trained.
    """
    if weights_only:
        load_weights(folder, policy.chunks, mesh)
        return
    require_plain_metadata(folder / ".metadata")
    assert policy.is_onloaded, f"rank {device.rank}: loading needs the optimizer state in memory"
    facts = json.loads((folder / "r3.json").read_text())
    with policy.memory.optimizer_on_device():
        _load_tensors(folder, facts, policy, mesh)
    policy.update_number = facts["update_number"]
    RandomStates(device.rank).load_state_dict(CheckpointFiles(folder))


def load_weights(folder: Path, chunks: Sequence[Any], mesh: Mesh) -> None:
    """Load the weights of a checkpoint into model chunks. All ranks must call."""
    require_plain_metadata(folder / ".metadata")
    _load_state(folder, chunks, _sharded_weights(chunks, mesh))


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


def _load_state(folder: Path, chunks: Sequence[Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Read what is wanted, and load the weights among it into the chunks."""
    from megatron.core import dist_checkpointing

    state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    for name, chunk in _named(chunks):
        chunk.load_state_dict(state[name], strict=False)
    for adapters in extras.adapters().adapters_of(chunks):
        adapters.merge()
    return state


def _load_tensors(folder: Path, facts: Mapping[str, Any], policy: Policy, mesh: Mesh) -> None:
    _fill_adam_state(policy)
    state = _load_state(folder, policy.chunks, _sharded_state(policy, mesh, loading=True))
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
    for member in chained(policy.optimizer):
        member.get_parameter_state_dp_zero = partial(gathered_state, member)
    of_model = state if len(policy.chunks) > 1 else state["model"]
    state["optimizer"] = {
        str(i): member.sharded_param_state_fully_reshardable(of_model, loading, _metadata(mesh))
        for i, member in enumerate(chained(policy.optimizer))
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


def _tensors(sharded: dict[str, Any]) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return (value for value in nested_values(sharded) if isinstance(value, ShardedTensor))


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


def optimizer_step(policy: Policy) -> int:
    """Updates that the optimizer has made."""
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


class CheckpointFiles(Mapping[str, bytes]):
    """The files of a checkpoint by name, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in self._folder.glob("*"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RandomStates:
    """The random generators of torch (CPU), numpy and Python of a rank."""

    def __init__(self, rank: int) -> None:
        self._name = f"random_{rank:05d}.json"

    def state_dict(self) -> dict[str, bytes]:
        """Return the states as a file by name."""
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, internal, gauss_next = random.getstate()
        state = {
            "torch": bytes(torch.get_rng_state().tolist()).hex(),
            "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
            "python": [version, list(internal), gauss_next],
        }
        return {self._name: json.dumps(state).encode()}

    def load_state_dict(self, files: Mapping[str, bytes]) -> None:
        """Set the generators, if this rank existed when the files of a checkpoint were written."""
        if self._name not in files:
            return
        state = json.loads(files[self._name])
        # JSON keeps floats bit for bit: Python writes the shortest text that reads back the same.
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
        name, keys, *others = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *others))
        version, internal, gauss_next = state["python"]
        random.setstate((version, tuple(internal), gauss_next))


def gathered_state(
    optimizer: Any, *, empty_data: bool = False, piece: int = PIECE, **_: Any
) -> dict[Any, Any]:
    """Return what Megatron's `get_parameter_state_dp_zero` returns, with values on one rank only.

    The first of the ranks with the same parameters writes them to the checkpoint. The memory of the
    others is reserved and never touched. All ranks of the optimizer must call.

    Args:
        optimizer: one of Megatron's distributed optimizers.
        empty_data: leave the values undefined, for a load that replaces them.
        piece: values gathered at a time.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[number]
        ((dtype, buckets),) = ranges.items()
        size = buffer.numel_unpadded
        whole = {key: torch.empty(size, dtype=torch.float32) for key in KEYS}
        done = 0
        for bucket, bucket_ranges in zip(buffer.buckets, buckets, strict=True):
            if not empty_data:
                into = {
                    key: tensor[done : done + bucket.numel_unpadded]
                    for key, tensor in whole.items()
                }
                _gather_bucket(optimizer, bucket, bucket_ranges["param_map"], into, piece)
            done += bucket.numel_unpadded
        state[number] = {dtype: {**whole, "numel_unpadded": size}}
    return state


def _gather_bucket(
    optimizer: Any,
    bucket: Any,
    param_map: dict[Any, Any],
    into: dict[str, torch.Tensor],
    piece: int,
) -> None:
    """Fill `into` on the first rank with the shards of all ranks, each an equal part."""
    group = optimizer.data_parallel_group
    ranks, rank = group.size(), group.rank()
    shard = bucket.grad_data.numel() // ranks
    length = max(1, piece // ranks)
    own = [
        (ranges["gbuf_local"], optimizer._get_main_param_and_optimizer_states(param))
        for param, ranges in param_map.items()
    ]
    for key, target in into.items():
        for start in range(0, shard, length):
            end = min(start + length, shard)
            part = torch.zeros(end - start, dtype=torch.float32, device=bucket.grad_data.device)
            for local, tensors in own:
                low, high = max(local.start, start), min(local.end, end)
                if low < high:
                    values = tensors[key].detach()[low - local.start : high - local.start]
                    part[low - start : high - start].copy_(values)
            parts = [torch.empty_like(part) for _ in range(ranks)] if rank == 0 else None
            if ranks > 1:
                dist.gather(part, parts, dst=dist.get_global_rank(group, 0), group=group)
            for number, received in enumerate([part] if ranks == 1 else parts or []):
                at = number * shard + start
                kept = target[at : at + len(received)]  # without the padding of the bucket
                kept.copy_(received[: len(kept)])
