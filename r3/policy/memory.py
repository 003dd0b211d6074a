"""The policy's training memory: offloaded while the engine generates, restored bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from r3.runtime.device import Device, Stash, free, unfree


class TrainingMemory:
    """Gradients and optimizer state of one policy.

    Parameters stay on the device: the engine reads them, and they are the smallest part. Gradient
    buffers are freed and come back as zeros. Optimizer tensors (float32 main parameters of a
    half-precision model, both moments) go to the device's stash. Megatron's own optimizer offload
    is not used: it replaces tensors that are views of the parameter buffer.
    """

    def __init__(self, wrapped: list[Any], optimizer: Any, device: Device) -> None:
        self._wrapped, self._optimizer = wrapped, optimizer
        self._stash = Stash(device=device)
        self._device = device

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the flat gradient buffers of all chunks."""
        for chunk in self._wrapped:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the optimizer under a stable key, except scalar step counters."""
        for i, optimizer in enumerate(chained(self._optimizer)):
            for g, group in enumerate(
                getattr(optimizer, "shard_fp32_from_float16_groups", None) or []
            ):
                for k, parameter in enumerate(group):
                    if parameter is not None:
                        yield f"{i}/main/{g}/{k}", parameter.data
            for g, group in enumerate(optimizer.optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    for name, value in optimizer.optimizer.state.get(parameter, {}).items():
                        if torch.is_tensor(value) and value.dim():
                            yield f"{i}/state/{g}/{k}/{name}", value

    def offload(self) -> int:
        """Free gradients and offload the optimizer's tensors; returns the bytes that were freed."""
        # Otherwise main parameters keep a copy of their gradient shard.
        self._optimizer.zero_grad(set_to_none=True)
        left = sum(free(buffer) for buffer in self.gradient_buffers())
        left += sum(self._stash.put(key, tensor) for key, tensor in self.optimizer_tensors())
        self._device.synchronize()
        self._device.release_memory()
        return left

    def onload(self) -> None:
        """Restore optimizer tensors, and gradients as zeros."""
        for key, tensor in self.optimizer_tensors():
            self._stash.get(key, tensor)
        for buffer in self.gradient_buffers():
            unfree(buffer)
        self._device.synchronize()


def chained(optimizer: Any) -> list[Any]:
    """Return the optimizers inside Megatron's: for dense parameters and, if ep > 1, for experts."""
    return list(getattr(optimizer, "chained_optimizers", None) or [optimizer])
