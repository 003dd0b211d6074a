"""Teachers of on-policy distillation: frozen checkpoints that score the policy's samples.

A teacher is built by the policy's code, in the policy's layout, without gradients and optimizer. It
may have any size. Its weights are on the host between passes. Its routers choose for themselves:
the engine's routes are those of another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch

from r3.config import Config
from r3.data.prompts import source_labels
from r3.models.hf_checkpoint import CheckpointReader
from r3.models.shape import ModelShape
from r3.policy.build import build_chunks, in_precision, transformer_config
from r3.policy.scoring import ScoringPolicy
from r3.policy.weight_slots import load, slots
from r3.routing.replay import attach_replay
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from r3.runtime.tensors import to_host
from r3.types import MicroBatch


class Teacher(ScoringPolicy):
    """One frozen checkpoint."""

    def __init__(self, config: Config, device: Device, mesh: Mesh, path: str) -> None:
        """Build the shard, load it from `path` and put it on the host. All ranks must call.

        Raises:
            ShapeError: the checkpoint does not have the tensors of its model.
        """
        shape = ModelShape.read(path)
        config = config.of_teacher(is_dense=not shape.moe_layers)
        self.device, self.mesh, self.shape = device, mesh, shape
        megatron = transformer_config(config, shape)
        chunks = build_chunks(config, shape, megatron, mesh, device)
        self.replay = attach_replay(chunks, shape.moe_layers, mesh.pp)
        self.wrapped, _ = in_precision(megatron, chunks)
        with CheckpointReader(path) as reader:
            reader.require(shape)
            load(slots(chunks, shape, mesh), reader.read, shape)
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._weights = [(parameter, to_host(parameter)) for parameter in parameters]
        device.synchronize()
        self._to_host()

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, ...]:
        """Log-probability of every target, as `score` returns it. All ranks must call."""
        with self._on_device():
            return self.score(micro_batches, mode="live").logprobs

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        for parameter, host in self._weights:
            parameter.data = host.to(self.device.torch, non_blocking=True)
        try:
            yield
        finally:
            self._to_host()

    def _to_host(self) -> None:
        for parameter, host in self._weights:
            parameter.data = host
        self.device.release_memory()


class Teachers:
    """The teachers of a run, one for all samples or one per source of prompts."""

    def __init__(self, config: Config, device: Device, mesh: Mesh) -> None:
        """Build every checkpoint of `algo.teacher` once. All ranks must call."""
        paths, labels = config.algo.teacher, source_labels(config.data.path)
        self._mesh = mesh
        self._teachers = {
            path: Teacher(config, device, mesh, path) for path in dict.fromkeys(paths)
        }
        self._of_source = dict(
            zip(labels, paths if len(paths) > 1 else paths * len(labels), strict=True)
        )

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Score every token by the teacher of its source. All ranks must call.

        Each teacher scores all tokens: ranks must make equally many passes.

        Returns:
            Log-probabilities per micro-batch, [N / cp]; empty on all but the last pipeline stage.
        """
        of_batches: list[torch.Tensor] = []
        for path, teacher in self._teachers.items():
            scored = teacher.logprobs(micro_batches)
            if not of_batches:
                of_batches = list(scored)
                continue
            for number, logprobs_N in enumerate(scored):
                mine_N = self._tokens_of(path, micro_batches[number]).to(logprobs_N.device)
                of_batches[number] = torch.where(mine_N, logprobs_N, of_batches[number])
        return of_batches

    def _tokens_of(self, path: str, micro_batch: MicroBatch) -> torch.Tensor:
        """Mark this rank's tokens of samples whose source has this teacher, bool [N / cp]."""
        mine = [
            self._of_source.get(prompt_id.rpartition(":")[0]) == path
            for prompt_id in micro_batch.prompt_ids
        ]
        lengths = [
            (end - start) // self._mesh.cp.size for start, end in pairwise(micro_batch.cu_seqlens)
        ]
        return torch.repeat_interleave(torch.tensor(mine), torch.tensor(lengths))
