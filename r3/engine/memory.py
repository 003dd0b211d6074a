"""Free the memory of an engine that sleeps, and restore it when it wakes.

On CUDA this is vLLM's own sleep mode: level 1 keeps weights on the host, level 2 drops them, and
the next sync brings all of them. vLLM has no sleep mode on CPU. There its scheduler is paused the
same way, and the KV cache is freed (`r3.backends.cpu.engine.KVCache`). CPU weights stay where they
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from r3 import extras
from r3.models.shape import BYTES_OF, ModelShape
from r3.runtime.device import GIB, Device

if TYPE_CHECKING:
    from vllm import LLM

    from r3.config import Config

Part = Literal["weights", "kv_cache"]


# What vLLM says where another process has memory, or takes some -> what that means for a user.
_TAKEN = {
    "Free memory on device": "the engine does not fit beside the other processes on this device",
    "Memory usage increased after sleeping": "another process took memory of this device while the "
    "engine gave up its own, which vLLM takes for its own mistake",
}


class DeviceMemoryError(RuntimeError):
    """Another process has memory of the device that the engine needs."""


def share_of_device(config: Config, shape: ModelShape, total_gib: float) -> float:
    """Fraction of the device's memory that must be free when vLLM builds the engine.

    With `engine.kv_cache_gib` that is what the cache and the weights take: then vLLM uses the
    fraction for nothing else.
    """
    engine = config.engine
    if not engine.kv_cache_gib:
        return engine.memory_fraction
    weights = shape.num_params * BYTES_OF[engine.dtype] / config.parallel.engine_tp
    return min(1.0, (weights / GIB + engine.kv_cache_gib) / total_gib)


@contextmanager
def neighbours_named(device: Device, share: float) -> Iterator[None]:
    """Inside, an error of vLLM about other processes' memory names these and says what to do.

    Args:
        share: fraction of the device that the engine asks for.

    Raises:
        DeviceMemoryError: in the place of vLLM's error.
    """
    try:
        yield
    except (ValueError, AssertionError) as error:
        reason = next((said for sign, said in _TAKEN.items() if sign in str(error)), "")
        if not reason:
            raise
        free, total = device.memory_gib()
        raise DeviceMemoryError(
            f"{reason}. {free:.1f} of {total:.1f} GiB are free; the engine asks for "
            f"{share * total:.1f}. On the device: {', '.join(device.processes()) or 'unknown'}. "
            "End the other processes, or use another device. engine.kv_cache_gib, or a smaller "
            "engine.memory_fraction, lets the engine ask for less"
        ) from error


class Sleeper:
    """Frees and restores the memory of one engine."""

    def __init__(self, llm: LLM, device: Device, share: float) -> None:
        self._llm = llm
        self._device, self._share = device, share
        self._cache = None if device.is_cuda else extras.engine_on_cpu().KVCache(llm)

    def sleep(self, level: int) -> None:
        """Pause the scheduler, drop cached prefixes and free memory."""
        # With async scheduling vLLM schedules a batch ahead. The last one belongs to requests that
        # have finished, and would be read after the next wake.
        core = self._llm.llm_engine.engine_core.engine_core
        while core.batch_queue:
            self._llm.llm_engine.step()
        with neighbours_named(self._device, self._share):
            self._llm.sleep(level=level)
        if self._cache:
            self._cache.free()

    def wake(self, part: Part) -> None:
        """Restore the memory of a part. Its contents are lost: weights must be loaded again."""
        if self._cache is None:
            # Waking needs memory that is free on the device; memory that torch caches is not.
            self._device.release_memory()
        elif part == "kv_cache":
            self._cache.restore()
        self._llm.wake_up(tags=[part])

    def fill(self) -> None:
        """Write all of the awake KV cache, so that it takes the memory that it can take on CPU."""
        if self._cache:
            self._cache.fill()
