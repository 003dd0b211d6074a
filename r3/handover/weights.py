"""Weights from the policy to the engine: publish handles once, plan who reads what, stream full tensors, prove it.

A rank reads its own shard directly and its machine's other shards through exported memory handles (CUDA IPC on GPUs, shared
memory on CPU). Only a shard that no rank of the reader's machine holds travels over the network, as a broadcast. The same
stream feeds the Hugging Face export.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from r3.engine import sampling_seed
from r3.handover.rollouts import pack_for
from r3.models.hf_checkpoint import write_checkpoint
from r3.policy.rules import Kind
from r3.policy.weights import HeadLayout, join_shards, split
from r3.rollout.codec import decode, encode
from r3.rollout.scored import Scored
from r3.rollout.single_turn import sample_single_turn
from r3.runtime.device import Device, SharedTensor, open_shared
from r3.runtime.mesh import Mesh
from r3.types import Prompt, Rollout

if TYPE_CHECKING:
    from r3.config import Config
    from r3.engine import Engine
    from r3.policy import Policy


def export(
    folder: Path,
    stream: WeightStream,
    policy: Policy,
    device: Device,
    mesh: Mesh,
    *,
    like: str,
    step: int,
) -> None:
    """Write the policy as a Hugging Face checkpoint, complete or absent. All ranks must call.

    Rank 0 writes; the others read along only where shards must cross the network to it.
    """
    device.synchronize()
    mesh.world.barrier()
    if mesh.world.rank == 0:
        dtype = policy.megatron.params_dtype
        write_checkpoint(
            folder, stream.read(), like=like, dtype=dtype, metadata={"step": step, "from": like}
        )
    elif stream.crosses_network:
        for _ in stream.read():
            pass
    mesh.world.barrier()


class SyncError(RuntimeError):
    """The engine does not compute what the policy computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Where one rank holds one cut of one Megatron tensor: `shape` at `offset` elements into its buffer `buffer`."""

    name: str
    hf: tuple[str, ...]
    kind: Kind
    index: int
    count: int
    buffer: int
    offset: int
    shape: tuple[int, ...]
    rows: int


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a rank lets others read."""

    host: str
    buffers: tuple[SharedTensor, ...]
    shards: tuple[Shard, ...]


def plan_reads(
    holders: Mapping[tuple[str, int], Sequence[int]], hosts: Sequence[str], reader: int
) -> tuple[dict[tuple[str, int], int], set[tuple[str, int]]]:
    """Decide for each cut `(tensor, index)` which rank `reader` takes it from, and which cuts must cross the network.

    Args:
        holders: cut -> ranks that hold it.
        hosts: machine of each rank.

    Returns:
        source of every cut: the reader itself, else a rank of its machine (readers spread over the replicas), else the
        lowest holder; and the cuts that at least one rank has no holder for on its machine, in which all ranks take part.
    """
    sources: dict[tuple[str, int], int] = {}
    crossing: set[tuple[str, int]] = set()
    machines = set(hosts)
    for cut_id, ranks in holders.items():
        if {hosts[rank] for rank in ranks} != machines:
            crossing.add(cut_id)
        near = [rank for rank in ranks if hosts[rank] == hosts[reader]]
        if cut_id in crossing and reader not in ranks and not near:
            sources[cut_id] = min(ranks)
        else:
            sources[cut_id] = reader if reader in ranks else near[reader % len(near)]
    return sources, crossing


def _layer_of(name: str) -> int:
    """Decoder layer of a tensor by its global Megatron name; -1 for what belongs to none. Sorting by it keeps the rest."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


class WeightStream:
    """Full tensors of the whole model, under Hugging Face names, from wherever their cuts lie.

    Attributes:
        shapes: name -> shape of everything `read` yields.
        crosses_network: whether any cut must, in which case all ranks read together.
        local_reads, peer_reads, network_reads: cuts this rank takes from itself, from peers' memory, over the network.
    """

    def __init__(
        self, policy: Policy, device: Device, mesh: Mesh, *, hosts: Sequence[str] | None = None
    ) -> None:
        """Publish this rank's buffers and learn everybody's. All ranks must call.

        `hosts` overrides the machine of each rank, to take the network path where there is only one machine.
        """
        self._policy, self._device, self._mesh = policy, device, mesh
        self._heads: HeadLayout = policy.heads
        handles = tuple(policy.share_parameters())
        self._own_buffers = policy.shared_buffers()
        self._addresses = [buffer.data_ptr() for buffer in self._own_buffers]
        published = Published(host=device.host, buffers=handles, shards=tuple(self._shards()))
        self._published: list[Published] = mesh.world.all_gather_object(published)
        self._opened: dict[tuple[int, int], torch.Tensor] = {}
        hosts = list(hosts) if hosts is not None else [item.host for item in self._published]

        self._cuts: dict[tuple[str, int], dict[int, Shard]] = {}
        self._tensors: dict[str, Shard] = {}
        for rank, item in enumerate(self._published):
            for shard in item.shards:
                self._cuts.setdefault((shard.name, shard.index), {})[rank] = shard
                self._tensors.setdefault(shard.name, shard)
        # Layer by layer, whatever rank holds an expert: the engine holds what it was given of a module until it has all of
        # it. In the order of the ranks, every layer of all other ranks' experts would be held to the end.
        self._tensors = dict(sorted(self._tensors.items(), key=lambda item: _layer_of(item[0])))
        for name, shard in self._tensors.items():
            lost = [index for index in range(shard.count) if (name, index) not in self._cuts]
            assert not lost, f"cuts {lost} of {shard.count} of {name} are held by no rank"
        self._sources, self._crossing = plan_reads(
            {cut_id: sorted(ranks) for cut_id, ranks in self._cuts.items()}, hosts, mesh.world.rank
        )
        self.crosses_network = bool(self._crossing)
        self.shapes: dict[str, tuple[int, ...]] = {
            name: policy.shape.tensor_shapes[name]
            for shard in self._tensors.values()
            for name in shard.hf
        }
        counts = [
            (source == mesh.world.rank, hosts[source] == hosts[mesh.world.rank])
            for source in self._sources.values()
        ]
        self.local_reads = sum(own for own, _ in counts)
        self.peer_reads = sum(near and not own for own, near in counts)
        self.network_reads = sum(not near for _, near in counts)

    def _shards(self) -> Iterator[Shard]:
        for slot in self._policy.slots:
            for number, buffer in enumerate(self._own_buffers):  # noqa: B007 (used after the loop)
                offset, rest = divmod(
                    slot.tensor.data_ptr() - buffer.data_ptr(), buffer.element_size()
                )
                if (
                    rest == 0
                    and 0 <= offset <= buffer.numel() - slot.tensor.numel()
                    and slot.tensor.dtype == buffer.dtype
                ):
                    break
            else:
                raise AssertionError(f"{slot.name} lies in none of the shared buffers")
            assert slot.tensor.is_contiguous(), f"{slot.name} is not contiguous"
            yield Shard(
                name=slot.name,
                hf=slot.hf,
                kind=slot.kind,
                index=slot.index,
                count=slot.count,
                buffer=number,
                offset=offset,
                shape=tuple(slot.tensor.shape),
                rows=slot.rows,
            )

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, in a fixed order, as views or fresh tensors on this device. Detached.

        All ranks must read to the end where cuts cross machines; otherwise a rank may read alone. Nobody may write to the
        policy's weights meanwhile.
        """
        assert self._addresses == [buffer.data_ptr() for buffer in self._policy.shared_buffers()], (
            f"rank {self._device.rank}: the shared buffers moved after their handles were published"
        )
        for name, first in self._tensors.items():
            parts = [self._cut(name, index) for index in range(first.count)]
            full = join_shards(first.kind, parts)
            if first.rows:
                full = full[: first.rows]  # a vocabulary padded to the ranks
            yield from zip(first.hf, split(first.kind, full, self._heads), strict=True)

    def _cut(self, name: str, index: int) -> torch.Tensor:
        cut_id = (name, index)
        me, source = self._mesh.world.rank, self._sources[cut_id]
        shard = self._cuts[cut_id][source]
        if cut_id not in self._crossing:
            return self._view(source, shard)  # on CUDA, a peer's memory mapped on this device
        sender = min(self._cuts[cut_id])
        mine = self._cuts[cut_id].get(me)
        if me == sender:
            assert mine is not None
            part = self._view(me, mine)
        else:
            part = torch.empty(
                shard.shape,
                dtype=self._published[source].buffers[shard.buffer].dtype,
                device=self._device.torch,
            )
        return self._mesh.world.broadcast(part, sender)

    def _view(self, rank: int, shard: Shard) -> torch.Tensor:
        buffer = (
            self._own_buffers[shard.buffer]
            if rank == self._mesh.world.rank
            else self._open(rank, shard.buffer)
        )
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
    """Make the engine's weights those of the policy and call them `version`. All ranks must call, weights awake.

    The barriers keep a rank from reading a peer's shard before it is updated, and from updating it while it is read.
    """
    device.synchronize()
    mesh.world.barrier()
    engine.load_weights(stream.shapes, stream.read(), policy_version=policy_version)
    engine.reset_cache()
    device.synchronize()
    mesh.world.barrier()


def prove_sync(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Prompt],
    config: Config,
    mesh: Mesh,
    *,
    max_tokens: int = 8,
) -> float:
    """Sample a few tokens and score the same tokens with the policy; returns the largest |log-probability difference|.

    All ranks must call, with the engine awake at the policy's version and equally many prompts. Routes are replayed where
    captured, so that a flipped expert is not mistaken for a wrong weight. The figure is of all ranks.

    Raises:
        SyncError: on every rank: the difference exceeds what rounding in the two types explains, so an engine holds other
            weights.
    """
    rollouts = sample_single_turn(
        engine,
        prompts,
        seeds=[sampling_seed(config.train.seed, -2, prompt.id, 0) for prompt in prompts],
        policy_version=engine.policy_version,
        max_tokens=max_tokens,
        temperature=config.rollout.temperature,
    )
    own = (
        [Scored(index=i, rollout=rollout, advantage=0.0) for i, rollout in enumerate(rollouts)]
        if engine.is_leader
        else []
    )
    # All ranks score the same tokens, those of the first engine; then every engine is compared with the first.
    first = decode(mesh.world.all_gather_object(encode(own))[0])
    num_layers = len(policy.shape.moe_layers) if engine.capture else 0
    # One sequence each: no larger than what training is planned for, however long the prompts.
    micro_batches = [pack_for(mesh, policy.shape, [one], num_layers=num_layers) for one in first]
    scores = policy.score(micro_batches, mode="replay" if engine.capture else "live")
    differences = [
        _difference(mine.rollout, theirs.rollout) for mine, theirs in zip(own, first, strict=False)
    ]
    if policy.reports:
        columns = zip(scores.logprobs, scores.rollout_logprobs, scores.loss_mask, strict=True)
        differences += [
            float(((ours_N - theirs_N).abs() * mask_N).max())
            for ours_N, theirs_N, mask_N in columns
        ]
    everybody = mesh.world.all_gather_object(differences)
    limit = sync_tolerance(config.model.dtype, config.engine.dtype)
    for rank, found in enumerate(everybody):
        if beyond := [difference for difference in found if not difference <= limit]:  # nan is none
            raise SyncError(
                f"rank {rank}: after the weight sync to version {engine.policy_version} engine and policy differ by {max(beyond):.3g} "
                f"in the log-probability of a sampled token (limit {limit:g}): the engine does not hold the policy's weights"
            )
    return max(difference for found in everybody for difference in found)


def _difference(mine: Rollout, theirs: Rollout) -> float:
    """Largest log-probability difference of two engines up to where, by rounding, they may have sampled apart."""
    length = min(len(mine.tokens_T), len(theirs.tokens_T))
    apart = mine.tokens_T[:length] != theirs.tokens_T[:length]
    until = int(apart.argmax()) if apart.any() else length
    return float(abs(mine.logprobs_T[:until] - theirs.logprobs_T[:until]).max(initial=0.0))


def sync_tolerance(policy_dtype: str, engine_dtype: str) -> float:
    """Largest |log-probability difference| of a proof.

    Two float32 stacks differ by rounding (1e-5 seen); half precision by whole flips of experts (0.06 seen on average,
    single tokens up to 0.5), while a wrong or missing tensor moves log-probabilities by 1 and more.
    """
    return 1e-3 if policy_dtype == engine_dtype == "float32" else 1.0
