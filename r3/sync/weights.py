"""Weight sync: publish handles once, plan who reads what, stream full tensors, verify the result.

A rank reads its own shards directly, and other shards of its machine through exported memory
handles (CUDA IPC on GPUs, shared memory on CPU). Only shards that no rank of the reader's machine
has travel over the network, as broadcasts. The same stream feeds the Hugging Face export.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from r3 import extras
from r3.errors import Explained
from r3.models.hf_checkpoint import joined, kept, write_checkpoint
from r3.models.hf_config import ShapeError
from r3.models.tensors import Experts, S, Shard, ShardId, SyncPlan, collect
from r3.policy.weight_slots import join_shards, named
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from r3.runtime.tensors import SharedTensor, open_shared, storage_of

if TYPE_CHECKING:
    from r3.engine import Engine
    from r3.policy import Policy


def export(
    folder: Path,
    stream: WeightStream,
    policy: Policy,
    device: Device,
    mesh: Mesh,
    *,
    small_files: Mapping[str, bytes],
    metadata: Mapping[str, Any],
) -> None:
    """Write the policy as a Hugging Face checkpoint, completely or not at all.

    All ranks must call. Rank 0 writes; all read if shards must cross the network.

    Args:
        folder: the new checkpoint; replaced if it exists.
        stream: the policy's weights.
        policy: gives the type of the weights.
        device: this rank's device.
        mesh: the layout of the ranks.
        small_files: config, tokenizer and templates, from `read_small_files`; rank 0 needs them.
        metadata: where the weights come from, for `r3.json`.

    Raises:
        OSError: on all ranks: the disk is full or cannot be written.
    """
    device.synchronize()
    mesh.world.barrier()
    weights, failure = stream.read(), ""
    if mesh.world.rank == 0:
        weights, dtype = joined(weights, policy.shape), policy.megatron.params_dtype
        try:
            write_checkpoint(
                folder,
                chain(weights, kept(policy.shape)),
                small_files=small_files,
                dtype=dtype,
                metadata=metadata,
            )
        except (OSError, SafetensorError, ShapeError) as error:
            failure = str(error)
    if stream.crosses_network:  # after a failure too: other ranks read as far
        for _ in weights:
            pass
    if failure := mesh.world.all_gather_object(failure)[0]:
        raise OSError(failure)


class SyncError(Explained):
    """The engine does not have the policy's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedShard(Shard):
    """A shard, and where its rank has it.

    Attributes:
        buffer: number of the rank's buffer that has it.
        offset: first element in that buffer.
    """

    buffer: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a rank publishes for others to read: its machine, its buffers, the shards in them."""

    host: str
    buffers: tuple[SharedTensor, ...]
    dtypes: tuple[torch.dtype, ...]
    shards: tuple[PlacedShard, ...]


def gather(
    plan: SyncPlan[S],
    read_shard: Callable[[ShardId], torch.Tensor],
    only: Collection[str] | None = None,
) -> Iterator[tuple[S, torch.Tensor]]:
    """Yield every full tensor once, with a shard that describes it, in the order of the plan.

    Args:
        plan: what to read.
        read_shard: returns the tensor of a shard of the plan.
        only: HF tensors of which at least one must be in a tensor that is read; None: all are.
    """
    wanted = None if only is None else set(only)
    for shard in plan.tensors.values():
        if wanted is None or not wanted.isdisjoint(shard.hf):
            parts = [read_shard((shard.name, i)) for i in range(shard.count)]
            full = join_shards(shard.kind, parts, rows=1 if shard.experts else 0)
            # A vocabulary is padded to the ranks.
            yield shard, full if shard.experts else full[: shard.rows]


class WeightStream:
    """Full tensors of the whole model under Hugging Face names, read from all ranks' shards.

    Attributes:
        shapes: name -> shape of everything that `read` yields.
        changing: tensors with adapters, and those that the policy joins with them. Only these
            change; empty: all do.
        crosses_network: some shards cross the network: all ranks must read together.
        plan: which shard is read from which rank.
    """

    def __init__(
        self, policy: Policy, device: Device, mesh: Mesh, *, hosts: Sequence[str] | None = None
    ) -> None:
        """Publish this rank's buffers and receive those of all ranks. All ranks must call.

        Args:
            policy: the policy to stream.
            device: this rank's device.
            mesh: the layout of the ranks.
            hosts: overrides the machine of each rank, to test the network path on one machine.
        """
        self._policy, self._device, self._mesh = policy, device, mesh
        handles = tuple(policy.share_parameters())
        self._own_buffers = policy.shared_buffers()
        self._addresses = self._places()
        dtypes = tuple(buffer.dtype for buffer in self._own_buffers)
        published = Published(
            host=device.host, buffers=handles, dtypes=dtypes, shards=tuple(self._shards())
        )
        self._published: list[Published] = mesh.world.all_gather_object(published)
        self._opened: dict[tuple[int, int], torch.Tensor] = {}
        hosts = list(hosts) if hosts is not None else [item.host for item in self._published]
        if policy.makes_weights:  # their memory cannot be read: every rank sends its own
            hosts = [f"{host} {rank}" for rank, host in enumerate(hosts)]
        # Number and values of the buffer that was made last.
        self._made: tuple[int, torch.Tensor] | None = None

        shards = [item.shards for item in self._published]
        self.plan: SyncPlan[PlacedShard] = SyncPlan.of(*collect(shards), hosts, mesh.world.rank)
        self.crosses_network = bool(self.plan.crossing)
        self.shapes: dict[str, tuple[int, ...]] = {
            name: policy.shape.tensor_shapes[name]
            for shard in self.plan.tensors.values()
            for name in shard.hf
        }
        adapted: dict[str, int] = {}
        if policy.config.uses_lora:
            adapted = extras.adapter_plan().ranks_of(policy.config, policy.shape)
        self.changing = {
            name
            for shard in self.plan.tensors.values()
            if not adapted.keys().isdisjoint(shard.hf)
            for name in shard.hf
        }

    def _shards(self) -> Iterator[PlacedShard]:
        numbers = {storage_of(buffer): i for i, buffer in enumerate(self._own_buffers)}
        for slot in self._policy.slots:
            number = numbers.get(storage_of(slot.tensor), -1)
            buffer, offset = self._own_buffers[number], slot.tensor.storage_offset()
            assert (
                number >= 0
                and 0 <= offset <= buffer.numel() - slot.tensor.numel()
                and slot.tensor.dtype == buffer.dtype
            ), f"{slot.name} is in none of the shared buffers"
            assert slot.tensor.is_contiguous(), f"{slot.name} is not contiguous"
            of_slot = {declared.name: getattr(slot, declared.name) for declared in fields(Shard)}
            yield PlacedShard(**of_slot, buffer=number, offset=offset)

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, in a fixed order, as detached views or new tensors.

        If shards cross machines, all ranks must read to the end; otherwise a rank may read alone.
        Nobody may write to the policy's weights meanwhile.
        """
        for shard, full in self._gather():
            yield from named(shard, full, self._policy.shape)

    def read_blocks(
        self, only: Collection[str] | None = None
    ) -> Iterator[tuple[str | Experts, torch.Tensor]]:
        """Yield the same as `read`, with the tensors of neighbouring experts as they lie.

        Args:
            only: names of tensors, with all experts of a layer or none; None: all tensors.
        """
        for shard, full in self._gather(only):
            if shard.experts:
                yield shard.experts, full
            else:
                yield from named(shard, full, self._policy.shape)

    def _gather(
        self, only: Collection[str] | None = None
    ) -> Iterator[tuple[PlacedShard, torch.Tensor]]:
        assert self._addresses == self._places(), (
            f"rank {self._device.rank}: the shared buffers moved after their handles were published"
        )
        yield from gather(self.plan, self._read_shard, only)
        self._made = None

    def _places(self) -> list[int]:
        """Addresses of the buffers that are shared."""
        buffers = [] if self._policy.makes_weights else self._policy.shared_buffers()
        return [buffer.data_ptr() for buffer in buffers]

    def _read_shard(self, shard_id: ShardId) -> torch.Tensor:
        source = self.plan.sources[shard_id]
        shard = self.plan.holders[shard_id][source]
        if shard_id not in self.plan.crossing:  # on CUDA, a peer's memory mapped on this device
            return self._view(source, shard)
        if self._mesh.world.rank == source:
            part = self._view(source, shard)
        else:
            dtype = self._published[source].dtypes[shard.buffer]
            part = torch.empty(shard.shape, dtype=dtype, device=self._device.torch)
        return self._mesh.world.broadcast(part, source)

    def _view(self, rank: int, shard: PlacedShard) -> torch.Tensor:
        if rank != self._mesh.world.rank:
            buffer = self._open(rank, shard.buffer)
        elif self._made and self._made[0] == shard.buffer:
            buffer = self._made[1]
        else:
            buffer = self._policy.values(self._own_buffers[shard.buffer])
            self._made = shard.buffer, buffer
        size = torch.Size(shard.shape).numel()
        return buffer.detach()[shard.offset : shard.offset + size].view(shard.shape)

    def _open(self, rank: int, number: int) -> torch.Tensor:
        key = (rank, number)
        if key not in self._opened:
            self._opened[key] = open_shared(self._published[rank].buffers[number], self._device)
        return self._opened[key]


def sync_weights(
    stream: WeightStream, engine: Engine, device: Device, mesh: Mesh, *, policy_version: int
) -> None:
    """Copy the policy's weights to the engine, as `policy_version`. All ranks must call.

    With adapters, an engine that still has the other weights gets only those that change. Its
    weights must be awake. The exchange and the barrier keep a rank from reading another rank's
    shard before it is updated, and from updating a shard while it is read.
    """
    device.synchronize()
    only = engine.needed(stream.changing) if stream.changing else None
    if not all(mesh.world.all_gather_object(only is not None)):
        only = None
    engine.load_weights(stream, policy_version=policy_version, only=only)
    engine.reset_cache()
    device.synchronize()
    mesh.world.barrier()
