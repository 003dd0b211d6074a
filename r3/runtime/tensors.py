"""Tensors beyond this process's device: shared with other processes of the machine, copied to host
memory beside the work, or moved out and back in place. The same for CUDA and CPU.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing import reductions

from r3 import extras
from r3.runtime.device import Device

# ------------------------------------------------------------------------------------------------
# Tensors shared with other processes of this machine: one interface, two transports.


@dataclass(frozen=True, kw_only=True)
class SharedTensor:
    """A picklable handle to a flat tensor of another process on this machine."""

    transport: str
    payload: Any
    dtype: torch.dtype
    numel: int


def share(tensor: torch.Tensor) -> SharedTensor:
    """Export a flat tensor that owns its storage. Views into it stay valid.

    On CUDA this returns an IPC handle; the memory must be outside of expandable segments and vLLM's
    sleep pool. On CPU the storage moves once, in place, into unnamed shared memory. The handle
    names it by process and file descriptor, so a killed run leaves nothing behind.
    """
    assert tensor.dim() == 1 and tensor.is_contiguous() and tensor.storage_offset() == 0, (
        "share() needs a flat tensor at the start of its storage, got shape "
        f"{tuple(tensor.shape)}, stride {tensor.stride()}, offset {tensor.storage_offset()}"
    )
    if tensor.is_cuda:
        transport, (_, payload) = "cuda-ipc", reductions.reduce_tensor(tensor.detach())
        assert payload[6] == tensor.device.index, "torch changed the layout of its IPC arguments"
    else:
        descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
        transport, payload = "shared-memory", (os.getpid(), descriptor, size)
    return SharedTensor(
        transport=transport, payload=payload, dtype=tensor.dtype, numel=tensor.numel()
    )


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that all tensors in the same memory have, which may be freed for now."""
    return int(tensor.untyped_storage()._cdata)


def ipc_arguments(payload: Sequence[Any], device_index: int) -> tuple[Any, ...]:
    """Arguments of `rebuild_cuda_tensor` that map a peer's memory on this rank's own device.

    The sent arguments name the peer's device. With them, every rank would create a context of 0.4
    to 0.5 GiB on every GPU of the machine, and reading would copy between devices. vLLM's own IPC
    transfer replaces the same argument. The event is switched off because `sync_weights`
    synchronises and waits at a barrier.
    """
    arguments = list(payload)
    arguments[6] = device_index  # storage_device
    arguments[-1] = False  # event_sync_required
    return tuple(arguments)


def open_shared(handle: SharedTensor, device: Device) -> torch.Tensor:
    """Map a tensor that another process of this machine shared; CUDA refuses the own process."""
    if handle.transport == "cuda-ipc":
        assert device.torch.index is not None, f"{device.torch} has no device index"
        return reductions.rebuild_cuda_tensor(*ipc_arguments(handle.payload, device.torch.index))
    pid, descriptor, size = handle.payload
    assert pid != os.getpid(), "a rank reads its own tensors directly, not through a handle"
    mapped = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(mapped, size)
    finally:
        os.close(mapped)
    return torch.empty(0, dtype=handle.dtype).set_(storage, 0, (handle.numel,))


def _driver(device: int) -> Any:
    """The CUDA driver, for a GPU: threads would begin on the first one, and open a context there.

    Args:
        device: number of the GPU.
    """

    def register(address: int, size: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def unregister(address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    return extras.host_memory().Registrar(
        begin=lambda: torch.cuda.set_device(device), register=register, unregister=unregister
    )


def to_host(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Copy `tensor` to host memory. A copy from CUDA is only queued: synchronise before reading it.

    Args:
        into: where to copy; None allocates, for a copy from CUDA page-locked memory.
    """
    if into is None and tensor.is_cuda:
        driver = _driver(tensor.device.index)
        (pages,) = extras.host_memory().page_locked([tensor.nbytes], driver)
        into = extras.host_memory().tensor_on(pages.result(), tensor)
    elif into is None:
        into = torch.empty(tensor.shape, dtype=tensor.dtype)
    return into.copy_(tensor.detach(), non_blocking=True)


class SideStream:
    """A side stream on CUDA, next to the current one. On CPU work is done immediately."""

    def __init__(self, device: Device) -> None:
        self._stream = torch.cuda.Stream() if device.is_cuda else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Inside, work is queued here, behind what the current stream has so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Queue what comes on the current stream behind what this one has so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def finish(self) -> None:
        """Wait on the host until its work is done."""
        if self._stream is not None:
            self._stream.synchronize()


# ------------------------------------------------------------------------------------------------
# Moving tensors out of device memory and back in place; all views stay valid.


@dataclass
class Stash:
    """Keeps the contents of device tensors elsewhere while the engine owns the device memory.

    On CUDA this is page-locked host memory, allocated once. On CPU it is an unlinked temporary
    file, so that the contents leave the resident set. On CUDA both directions are queued:
    synchronise afterwards.

    Attributes:
        sizes: bytes of what was put, by key.
        coming: host memory that was reserved and not used yet.
        pinned: host memory that was used.
        files: those on CPU.
    """

    device: Device
    sizes: dict[str, int] = field(default_factory=dict)
    coming: dict[str, Future[Any]] = field(default_factory=dict)
    pinned: dict[str, torch.Tensor] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Begin to make host memory for CUDA tensors, in this order, and return at once.

        Args:
            sizes: bytes by key.
        """
        if self.device.is_cuda:
            driver = _driver(self.device.torch.index)
            blocks = extras.host_memory().page_locked(list(sizes.values()), driver)
            self.coming |= zip(sizes, blocks, strict=True)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` out and free its storage; does nothing if it is out already."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size == 0:
            return
        assert tensor.storage_offset() == 0 and tensor.nbytes == size, (
            f"{key} does not own its storage"
        )
        if self.device.is_cuda:
            if key in self.coming:
                pages = self.coming.pop(key).result()
                self.pinned[key] = extras.host_memory().tensor_on(pages, tensor)
            # The storage freed below stays in torch's cache until this copy, on the same stream, is
            # done.
            self.pinned[key] = to_host(tensor, self.pinned.get(key))
        else:
            if key not in self.files:
                self.files[key] = tempfile.TemporaryFile(prefix="r3-stash-")  # noqa: SIM115
            file = self.files[key]
            file.seek(0)
            file.write(_memory_of(tensor, size))
            file.flush()
        self.sizes[key] = size
        storage.resize_(0)

    def get(self, key: str, tensor: torch.Tensor) -> None:
        """Restore the contents that `put` took, bit for bit; does nothing if they are there."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            return
        storage.resize_(self.sizes[key])
        if self.device.is_cuda:
            tensor.copy_(self.pinned[key], non_blocking=True)
        else:
            self.files[key].seek(0)
            read = self.files[key].readinto(_memory_of(tensor, self.sizes[key]))
            assert read == self.sizes[key], f"{key}: {read} of {self.sizes[key]} bytes came back"


def _memory_of(tensor: torch.Tensor, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory of a CPU tensor, without a copy.

    A storage that numpy has seen can never be resized again. Valid while the storage keeps its
    memory.
    """
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
