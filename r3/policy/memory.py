"""The policy's training memory: offloaded while the engine generates, restored bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from r3 import extras
from r3.runtime.device import Device
from r3.runtime.tensors import SideStream, Stash


class TrainingMemory:
    """Gradients and optimizer state of one policy.

    Parameters stay on the device: the engine reads them, and they are the smallest part. Gradient
    buffers are freed and come back as zeros. Optimizer tensors (float32 main parameters of a
    half-precision model, both moments) go to the device's stash. Megatron's own optimizer offload
    is not used: it replaces tensors that are views of the parameter buffer.

    Some parameters' tensors may stay on the device; all do of a kept optimizer. Those of a streamed
    one come back for a part of the optimizer step only, some parameters at a time. The same kernels
    see the same values, so the updates are the same bit for bit. On CUDA a part comes while the one
    before it is updated and goes.
    """

    def __init__(
        self,
        wrapped: list[Any],
        optimizer: Any,
        device: Device,
        *,
        streamed: bool = False,
        kept_bytes: float = 0.0,
    ) -> None:
        self._wrapped, self._optimizer = wrapped, optimizer
        self._stash = Stash(device=device)
        self._device, self._streamed = device, streamed
        self._staying = self._largest_within(kept_bytes)
        self._coming, self._going = SideStream(device), SideStream(device)
        self._has_moments = False
        for i, member in enumerate(chained(optimizer)):
            if self._streamed:
                extras.streamed().step_in_parts(
                    member,
                    lambda member=(i, member): self._moving([member]),
                    stash=self._stash,
                    coming=self._coming,
                    going=self._going,
                )
            member.optimizer.step = partial(self._step_when_there, member.optimizer.step)

    def _largest_within(self, size: float) -> set[int]:
        """Return the ids of the largest parameters whose optimizer tensors fit into these bytes."""
        tensors = [
            (parameter.nbytes * (3 if id(parameter) in mains else 2), id(parameter))
            for optimizer in chained(self._optimizer)
            for mains in [set(map(id, chain(*optimizer.shard_fp32_from_float16_groups)))]
            for group in optimizer.optimizer.param_groups
            for parameter in group["params"]
        ]
        staying = set()
        for nbytes, parameter in sorted(tensors, key=lambda one: -one[0]):
            if nbytes <= size:
                size -= nbytes
                staying.add(parameter)
        return staying

    def reserve(self) -> None:
        """Begin to make the host memory that the tensors will go to: by tens of GiB, seconds."""
        moments = [
            (_state_key(i, g, k, name), parameter.nbytes)
            for i, optimizer in enumerate(chained(self._optimizer))
            for g, group in enumerate(optimizer.optimizer.param_groups)
            for k, parameter in enumerate(group["params"])
            for name in ("exp_avg", "exp_avg_sq")
            if id(parameter) not in self._staying
        ]
        # Main parameters are offloaded first, and a streamed optimizer begins with the largest.
        present = [(key, tensor.nbytes) for _, key, tensor in self._moving()]
        self._stash.reserve(
            {
                key: size
                for of_kind in (present, moments)
                for key, size in sorted(of_kind, key=lambda one: one[1], reverse=True)
                if size
            }
        )

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the flat gradient buffers of all chunks."""
        for chunk in self._wrapped:
            for of_chunk in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield of_chunk.grad_data

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the optimizer under a stable key, except scalar step counters."""
        for i, optimizer in enumerate(chained(self._optimizer)):
            for _, key, tensor in tensors_of(i, optimizer):
                yield key, tensor

    def _moving(
        self, members: Iterable[tuple[int, Any]] | None = None
    ) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Yield what `tensors_of` yields of some members (None: all), without what stays."""
        for member in members or enumerate(chained(self._optimizer)):
            yield from (one for one in tensors_of(*member) if id(one[0]) not in self._staying)

    def offload(self) -> None:
        """Free gradients, and offload the optimizer's tensors but for those that stay."""
        self._coming.join()  # there may have been no step
        # Otherwise main parameters keep a copy of their gradient shard.
        self._optimizer.zero_grad(set_to_none=True)
        for buffer in self.gradient_buffers():
            buffer.untyped_storage().resize_(0)
        for _, key, tensor in self._moving():
            self._stash.put(key, tensor)
        self._device.synchronize()
        self._device.release_memory()

    def onload(self) -> None:
        """Restore gradients as zeros, and optimizer tensors unless they are streamed.

        On CUDA, side streams copy during the passes: the optimizer's step waits for them.
        """
        with self._coming.after_current():
            for _, key, tensor in self._moving() if not self._streamed else ():
                self._stash.get(key, tensor)
        self._restore_gradients()

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Inside, all optimizer tensors have their values on the device.

        A streamed optimizer gets the room of the gradients, which are zeros afterwards.
        """
        if not self._streamed:
            self._coming.join()  # there may have been no step
            yield
            return
        for buffer in self.gradient_buffers():
            buffer.untyped_storage().resize_(0)
        for _, key, tensor in self._moving():
            self._stash.get(key, tensor)
        self._device.synchronize()
        try:
            yield
        finally:
            for _, key, tensor in self._moving():
                self._stash.put(key, tensor)
            self._restore_gradients()
            self._device.synchronize()

    def _step_when_there(self, step: Any) -> None:
        self._coming.join()
        if self._staying and not self._has_moments:
            # The first step makes the moments: not inside of segments that activations have left.
            self._device.release_memory()
            self._has_moments = True
        step()

    def _restore_gradients(self) -> None:
        for buffer in self.gradient_buffers():
            if not buffer.untyped_storage().nbytes():
                buffer.untyped_storage().resize_(buffer.nbytes)
                buffer.zero_()


def tensors_of(number: int, optimizer: Any) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """Yield (parameter of AdamW, key, tensor) of one of Megatron's optimizers."""
    for g, group in enumerate(optimizer.shard_fp32_from_float16_groups):
        for k, parameter in enumerate(group):
            if parameter is not None:
                yield parameter, f"{number}/main/{g}/{k}", parameter.data
    for g, group in enumerate(optimizer.optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            for name, value in optimizer.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value) and value.dim():
                    yield parameter, _state_key(number, g, k, name), value


def _state_key(number: int, group: int, index: int, name: str) -> str:
    return f"{number}/state/{group}/{index}/{name}"


def chained(optimizer: Any) -> list[Any]:
    """Return the optimizers inside Megatron's: for dense parameters and, if ep > 1, for experts.

    Those without parameters are left out.
    """
    return [member for member in optimizer.chained_optimizers if not member.is_stub_optimizer]
