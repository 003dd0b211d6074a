"""The one file that knows CUDA from CPU: devices, process-group back ends, memory figures, shared tensors, stashes.

Everything else asks the frozen `Device` it is given. Megatron's stand-ins for a machine without CUDA lie beside this file
in `device_cpu.py`, each with the upstream line it serves.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """What this rank computes on.

    Attributes:
        torch: the torch device.
        is_cuda: whether that is a GPU.
        rank, local_rank, world_size: from torchrun, or a world of one.
        host: identifies the machine, so that ranks know whose memory they can map.
    """

    torch: torch.device
    is_cuda: bool
    rank: int
    local_rank: int
    world_size: int
    host: str

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def release_memory(self) -> None:
        """Give memory that nobody uses back to the system, so that the other world can take it."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def used_gib(self) -> float:
        """Memory in use: of the whole device on CUDA, of this process (resident set) on CPU."""
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info()
            return (total - free) / GIB
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB


def prepare_environment() -> None:
    """Set what torch, vLLM and OpenMP read once at import. Call before any of them is imported or used.

    vLLM runs in this process (no engine child); spinning OpenMP threads make ranks that share cores ten times slower.
    """
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # On GPUs its warnings matter: a slow order of pushed weights, a kernel that is not the one asked for.
        "VLLM_LOGGING_LEVEL": "WARNING" if torch.cuda.is_available() else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    if not torch.cuda.is_available():
        # Compiling vLLM's small log-probability kernel costs 7 to 14 s at the first call and gains nothing on CPU.
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        # Triton has no CPU back end; where a CUDA build of torch brought it along, importing it only costs and warns.
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
        logging.getLogger("torch._library.triton").setLevel(
            logging.ERROR
        )  # says that Triton is not there
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())


def free_port() -> int:
    """A TCP port on this machine that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_gpu() -> bool:
    """Whether `init_device` will take a CUDA device."""
    return torch.cuda.is_available()


def device_gib() -> float | None:
    """Memory of the GPU that `init_device` will take; None on CPU."""
    if not has_gpu():
        return None
    return (
        torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory / GIB
    )


def select_device() -> None:
    """Make this rank's GPU the current one of this thread: a new thread starts on device 0, whatever the rank's is."""
    if has_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def init_device(*, timeout_s: float = 1800.0) -> Device:
    """Select the device and create the default process group. All ranks must call.

    On CUDA host tensors travel over gloo and device tensors over NCCL; on CPU all over gloo.
    """
    prepare_environment()
    is_cuda = has_gpu()
    local_rank = int(os.environ["LOCAL_RANK"])
    select_device()
    if not is_cuda and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=timedelta(seconds=timeout_s)
        )
    return Device(
        torch=torch.device("cuda", local_rank) if is_cuda else torch.device("cpu"),
        is_cuda=is_cuda,
        rank=dist.get_rank(),
        local_rank=local_rank,
        world_size=dist.get_world_size(),
        host=machine_id(),
    )


def machine_id() -> str:
    """Name of this machine and its boot: two containers that share a host name do not share memory by accident."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename}:{boot.read_text().strip() if boot.exists() else ''}"


def settle() -> None:
    """Tell the garbage collector that everything alive now stays: what a run builds is large and never dies.

    Without it each collection between the phases walks all of vLLM, Megatron and transformers, about 0.3 s.
    """
    gc.collect()
    gc.freeze()


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed torch, numpy and random alike; `deterministic` also asks torch for deterministic kernels.

    On CUDA an operation without a deterministic kernel raises an error. With a warning alone, torch keeps
    flash attention's backward pass non-deterministic (ATen, attention_backward.cu), and two runs would differ.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=not torch.cuda.is_available())


def leave(code: int) -> None:
    """End the process at once after a run: barrier, destroy the process group, flush, exit. All ranks must call.

    An ordinary exit would run vLLM's and nanobind's teardown, which warns of leaks and may wait for the other ranks.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Sampling must not move the trainer's random state: put torch's, numpy's and random's back afterwards."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


# --------------------------------------------------------------------------------------------------------------------
# Sharing a tensor with the other processes of this machine: one path, two transports.


@dataclass(frozen=True, kw_only=True)
class SharedTensor:
    """A picklable handle to a flat tensor of another process on this machine."""

    transport: str
    payload: Any
    dtype: torch.dtype
    numel: int


def share(tensor: torch.Tensor) -> SharedTensor:
    """Export a flat tensor that owns its storage. Views into it stay valid.

    CUDA: an IPC handle, which needs memory outside expandable segments and outside vLLM's sleep pool. CPU: the storage
    moves, once and in place, into unnamed shared memory; the handle names it by process and descriptor, so a killed run
    leaves nothing behind.
    """
    assert tensor.dim() == 1 and tensor.is_contiguous() and tensor.storage_offset() == 0, (
        f"share() wants a flat tensor that starts its storage, got shape {tuple(tensor.shape)}, "
        f"stride {tensor.stride()}, offset {tensor.storage_offset()}"
    )
    if tensor.is_cuda:
        _, arguments = reductions.reduce_tensor(tensor.detach())
        assert arguments[6] == tensor.device.index, (
            "torch has changed what it sends for a CUDA tensor"
        )
        return SharedTensor(
            transport="cuda-ipc", payload=arguments, dtype=tensor.dtype, numel=tensor.numel()
        )
    descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
    payload = (os.getpid(), descriptor, size)
    return SharedTensor(
        transport="shared-memory", payload=payload, dtype=tensor.dtype, numel=tensor.numel()
    )


def ipc_arguments(payload: Sequence[Any], device_index: int) -> tuple[Any, ...]:
    """Arguments of `rebuild_cuda_tensor` that map a peer's memory on this rank's own device, without its event.

    As sent, they name the peer's device: every rank would make a context of 0.4 to 0.5 GiB on every GPU of the machine,
    and each tensor read would be copied between devices. vLLM's own transfer replaces the same argument. The event would
    order this reader behind the peer's stream, which `sync_weights` does with a synchronisation and a barrier.
    """
    arguments = list(payload)
    arguments[6] = device_index  # storage_device
    arguments[-1] = False  # event_sync_required
    return tuple(arguments)


def open_shared(handle: SharedTensor, device: Device) -> torch.Tensor:
    """Map what a peer on this machine shared. Never call it on a handle of this very process (CUDA refuses that)."""
    if handle.transport == "cuda-ipc":
        assert device.torch.index is not None, f"{device.torch} does not say which GPU it is"
        return reductions.rebuild_cuda_tensor(*ipc_arguments(handle.payload, device.torch.index))
    pid, descriptor, size = handle.payload
    assert pid != os.getpid(), "a rank reads its own tensors directly, not through a handle"
    mapped = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(mapped, size)
    finally:
        os.close(mapped)
    return torch.empty(0, dtype=handle.dtype).set_(storage, 0, (handle.numel,))


def to_host(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of `tensor` in host memory, in `into` where that is given. From CUDA the copy is queued: synchronise first.

    Memory for a copy from CUDA is page-locked, otherwise the copy would be several times slower and block. It is registered
    rather than pinned by torch, which rounds every block up to a power of two: a third more for typical buffers.
    """
    if into is None:
        into = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.is_cuda:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(into.data_ptr(), into.nbytes, 0)
            )
    return into.copy_(tensor.detach(), non_blocking=True)


# --------------------------------------------------------------------------------------------------------------------
# Taking tensors out of device memory and back, in place: every view of them stays valid.


@dataclass
class Stash:
    """Keeps the contents of device tensors elsewhere while the other world owns the memory.

    On CUDA elsewhere is page-locked host memory, allocated once and reused; on CPU it is an unlinked temporary file, so
    that what was put away really leaves the resident set. On CUDA both directions are queued: synchronise afterwards.
    """

    device: Device
    sizes: dict[str, int] = field(default_factory=dict)
    pinned: dict[str, torch.Tensor] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def put(self, key: str, tensor: torch.Tensor) -> int:
        """Copy `tensor` out and free its storage; returns the bytes that left. A tensor already out is left alone."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size == 0:
            return 0
        assert tensor.storage_offset() == 0 and tensor.nbytes == size, (
            f"{key} does not own its whole storage"
        )
        if self.device.is_cuda:
            # The storage freed below stays in torch's cache until this copy, on the same stream, is done.
            self.pinned[key] = to_host(tensor, self.pinned.get(key))
        else:
            file = self.files.get(key)
            if file is None:
                file = self.files[key] = tempfile.TemporaryFile(prefix="r3-stash-")  # noqa: SIM115 (lives with the run)
            file.seek(0)
            # A copy: a tensor that lent its memory to numpy can never be resized again.
            file.write(tensor.detach().clone().view(-1).view(torch.uint8).numpy().data)
            file.flush()
        self.sizes[key] = size
        storage.resize_(0)
        return size

    def get(self, key: str, tensor: torch.Tensor) -> None:
        """Bring back what `put` took, bit for bit. A tensor that never left is left alone."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            return
        storage.resize_(self.sizes[key])
        if self.device.is_cuda:
            tensor.copy_(self.pinned[key], non_blocking=True)
        else:
            self.files[key].seek(0)
            data = np.frombuffer(self.files[key].read(self.sizes[key]), dtype=np.uint8)
            tensor.detach().view(torch.uint8).view(-1).copy_(torch.from_numpy(data.copy()))


def free(tensor: torch.Tensor) -> int:
    """Free a tensor's storage without keeping its contents; returns the bytes that left."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    return size


def unfree(tensor: torch.Tensor) -> None:
    """Give a freed tensor its storage back, filled with zeros."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())
        tensor.zero_()
