"""The one file that distinguishes CUDA and CPU: devices, process groups, memory, shared tensors.

All other code uses the frozen `Device` that it is given. `device_cpu.py` holds the stand-ins that
let Megatron run without CUDA, each with the upstream line that needs it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from r3 import extras
from r3.runtime import host_memory, terminal
from r3.runtime.limits import host_gib, openmp_threads
from r3.runtime.process import boot_id

GIB = 2**30
KEPT_SHARE = 1 / 4
"""Of the machine's memory: what its processes keep of the memory they free, on CPU."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of this rank.

    Attributes:
        torch: the torch device.
        is_cuda: whether it is a GPU.
        rank, local_rank, world_size: from torchrun; without it, a single rank.
        host: identifies the machine; ranks with the same host can map each other's memory.
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
        """Return unused cached memory to the system, so that engine or policy can take it.

        On CPU this rank's part of `KEPT_SHARE` may stay, for later tensors of either: taking a page
        from the system again takes 2 to 10 us, which was up to a fifth of a training step.
        """
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if free_heap_bytes() >= KEPT_SHARE * host_gib() * GIB / ranks:
                ctypes.CDLL("libc.so.6").malloc_trim(0)

    def used_gib(self) -> float:
        """Memory in use in GiB: of the whole device on CUDA, the resident set of this process on
        CPU, with what `release_memory` let stay.
        """
        if self.is_cuda:
            free, total = self.memory_gib()
            return total - free
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB

    def memory_gib(self) -> tuple[float, float]:
        """Free and total memory of the device; of this machine on CPU."""
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info()
            return free / GIB, total / GIB
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages / GIB, host_gib()

    def processes(self) -> list[str]:
        """Programs on this GPU as nvidia-smi lists them, with process id and memory.

        Empty on CPU, without nvidia-smi, and where programs run in other containers.
        """
        program = shutil.which("nvidia-smi")
        if not (self.is_cuda and program):
            return []
        query = ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory"]
        query += ["--format=csv,noheader"]
        listed = subprocess.run([program, *query], capture_output=True, text=True).stdout
        return programs_on(str(torch.cuda.get_device_properties(self.torch).uuid), listed)

    def fragmented_gib(self) -> float:
        """Memory in GiB that torch keeps on the device beyond its tensors; 0 on CPU.

        After `release_memory` it is what lies around tensors in segments that cannot be returned.
        """
        if not self.is_cuda:
            return 0.0
        return (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / GIB

    def name(self) -> str:
        """The model of the GPU, or "CPU"."""
        return torch.cuda.get_device_name() if self.is_cuda else "CPU"

    def versions(self) -> dict[str, str]:
        """Versions of CUDA and NCCL; nothing on CPU."""
        if not self.is_cuda:
            return {}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return {"CUDA": str(torch.version.cuda), "NCCL": nccl}


def programs_on(uuid: str, listed: str) -> list[str]:
    """The programs on one GPU among those that nvidia-smi lists.

    Args:
        uuid: of the GPU, without the prefix that nvidia-smi gives it.
        listed: lines of "GPU, process id, name, memory".
    """
    rows = [line.split(", ") for line in listed.splitlines()]
    return [
        f"{name} (process {pid}{', this one' if pid == str(os.getpid()) else ''}, {memory})"
        for gpu, pid, name, memory in (row for row in rows if len(row) == 4)
        if gpu.removeprefix("GPU-") == uuid
    ]


def prepare_environment() -> None:
    """Set the variables that torch, vLLM and OpenMP read once.

    Call it before Megatron-Core or vLLM is imported. vLLM runs in this process, without a child
    process for the engine.
    """
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Its warnings matter on GPUs: slow order of pushed weights, an unexpected kernel.
        "VLLM_LOGGING_LEVEL": "WARNING" if torch.cuda.is_available() else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # Every request has a seed and returns processed log-probabilities: vLLM never draws such
        # tokens with FlashInfer, but would import it for dense models, and may compile it.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    if not torch.cuda.is_available():
        # Compiling vLLM's small log-probability kernel takes 7 to 14 s and gains nothing on CPU.
        # Megatron-Core's decorators would import the compiler, for functions that R3 does not call.
        # OpenMP threads that spin make ranks on shared cores ten times slower.
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        # Triton has no CPU back end. If a CUDA build of torch installed it, importing it only
        # warns.
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
        # This logger reports that Triton is absent.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    for name, value in (defaults | writable_caches()).items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())


def writable_caches() -> dict[str, str]:
    """Variables that move the caches of vLLM and Triton out of a home that cannot be written.

    Empty if it can. vLLM would print eight tracebacks, and Triton would raise an error.
    """
    home = os.path.expanduser("~")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return {}
    except OSError:
        pass
    root = f"{tempfile.gettempdir()}/r3-{os.getuid()}"  # as launch/slurm.sbatch
    return {"VLLM_CACHE_ROOT": f"{root}/vllm", "TRITON_CACHE_DIR": f"{root}/triton"}


def free_port() -> int:
    """A free TCP port on the loopback interface.

    It lies below the range from which the kernel serves connections that name no port: a port of
    that range can be taken again before the caller listens on it. It is drawn at random, so that
    two programs that ask at once get different ones.
    """
    import secrets
    import socket

    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    room = int(ports.read_text().split()[0]) - 10000 if ports.exists() else 0
    drawn = [10000 + secrets.randbelow(room) for _ in range(20)] if room > 0 else []
    with socket.socket() as probe:
        for wanted in drawn:
            with suppress(OSError):
                probe.bind(("127.0.0.1", wanted))
                return wanted
        probe.bind(("127.0.0.1", 0))  # the kernel chooses one
        return int(probe.getsockname()[1])


def has_gpu() -> bool:
    """Whether `init_device` will use a GPU."""
    return torch.cuda.is_available()


def device_gib() -> float | None:
    """Memory in GiB of the GPU that `init_device` will use; None on CPU."""
    if not has_gpu():
        return None
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.cuda.get_device_properties(number).total_memory / GIB


def select_device() -> None:
    """Make this rank's GPU the current device of this thread; new threads start on device 0."""
    if has_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def init_device(*, timeout_s: float = 1800.0) -> Device:
    """Select the device and create the default process group. All ranks must call.

    On CUDA, host tensors use gloo and device tensors use NCCL; on CPU, all tensors use gloo.

    Args:
        timeout_s: seconds that a collective waits for other ranks.
    """
    prepare_environment()
    is_cuda = has_gpu()
    local_rank = int(os.environ["LOCAL_RANK"])
    select_device()
    if not is_cuda:
        torch.set_num_threads(openmp_threads(os.environ["OMP_NUM_THREADS"]))
        keep_freed_memory()
    if not dist.is_initialized():
        extras.share_gloo_thread()
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


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for later tensors, until `Device.release_memory`.

    By default it takes each large tensor from the system and returns it at once. The system fills
    every new page with zeros, which takes a tenth of the time of a training step on CPU.
    """
    if sys.platform == "linux":
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8  # of malloc.h
        libc = ctypes.CDLL("libc.so.6")
        # Larger ones still come from the system: a hole in the heap as large as one is costly.
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, -1)  # -1: never
        # One heap for all threads: those of other threads cannot keep more than 64 MiB.
        libc.mallopt(arena_max, 1)


def discard(storage: torch.UntypedStorage) -> bool:
    """Return the pages of host memory to the system; the memory reads as zeros afterwards.

    Its addresses stay valid. The system provides a page of zeros where one is touched again, so
    memory that is not used costs nothing.

    Returns:
        False if the memory stays: it has no whole page, is shared with other processes, mapped from
        a file or locked, or the system is not Linux. The contents are not needed either way.
    """
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    # Whole pages only: the C library and other tensors use the rest of the first and the last one.
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform != "linux" or last <= first or not _is_private(first, last):
        return False
    madvise = ctypes.CDLL("libc.so.6").madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(first, last - first, mmap.MADV_DONTNEED) != 0:
        return False
    all_bytes = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (end - begin,))
    all_bytes[: first - begin].zero_()
    all_bytes[last - begin :].zero_()
    return True


def _is_private(begin: int, end: int) -> bool:
    """Whether all addresses from `begin` to before `end` are private memory without a file.

    In shared memory and in files, discarded pages would come back with their old contents.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:  # sorted by address
            addresses, permissions, _offset, _device, inode, *_path = line.split()
            start, stop = (int(address, 16) for address in addresses.split("-"))
            if start <= begin < stop:
                if permissions[3] != "p" or inode != "0":
                    return False
                if end <= stop:
                    return True
                begin = stop
    return False


def machine_id() -> str:
    """Name of this machine, its boot and its process space.

    Equal host names of two containers differ so, and so do two containers of one machine that do
    not see each other's processes: shared tensors are opened through /proc.
    """
    processes = Path("/proc/self/ns/pid")
    space = os.readlink(processes) if processes.is_symlink() else ""
    return f"{os.uname().nodename}:{boot_id()}:{space}"


class _HeapState(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def free_heap_bytes() -> float:
    """Bytes that the C library keeps for later tensors, some of which may have been returned to the
    system already. Unlimited if the library does not say.
    """
    mallinfo2 = getattr(ctypes.CDLL("libc.so.6"), "mallinfo2", None)  # since glibc 2.33
    if mallinfo2 is None:
        return float("inf")
    mallinfo2.restype = _HeapState
    return float(mallinfo2().fordblks)


def settle() -> None:
    """Exclude all objects that exist now from garbage collection: they live as long as the run.

    Otherwise each collection walks all objects of vLLM, Megatron and transformers, about 0.3 s.
    """
    gc.collect()
    gc.freeze()


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed torch, numpy and random.

    Args:
        deterministic: use deterministic kernels. On CUDA an operation that has none raises an
            error. With a warning only, torch keeps the backward pass of flash attention
            non-deterministic (ATen, attention_backward.cu).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=not torch.cuda.is_available())


def leave(code: int) -> None:
    """End the process after a run: barrier, destroy the process group, flush, exit. All ranks must
    call.

    An ordinary exit would run the teardown of vLLM and nanobind, which prints warnings about leaks
    and may wait for other ranks.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    terminal.flush()
    os._exit(code)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random states of torch, numpy and random after the block."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


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
        f"{tuple(tensor.shape)}, "
        f"stride {tensor.stride()}, offset {tensor.storage_offset()}"
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


def _driver(device: int) -> host_memory.Registrar:
    """The CUDA driver, for a GPU: threads would begin on the first one, and open a context there.

    Args:
        device: number of the GPU.
    """

    def register(address: int, size: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def unregister(address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    return host_memory.Registrar(
        begin=lambda: torch.cuda.set_device(device), register=register, unregister=unregister
    )


def to_host(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Copy `tensor` to host memory. A copy from CUDA is only queued: synchronise before reading it.

    Args:
        into: where to copy; None allocates, for a copy from CUDA page-locked memory.
    """
    if into is None and tensor.is_cuda:
        driver = _driver(tensor.device.index)
        (pages,) = host_memory.page_locked([tensor.nbytes], driver)
        into = host_memory.tensor_on(pages.result(), tensor)
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
    coming: dict[str, Future[host_memory.Pages]] = field(default_factory=dict)
    pinned: dict[str, torch.Tensor] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Begin to make host memory for CUDA tensors, in this order, and return at once.

        Args:
            sizes: bytes by key.
        """
        if self.device.is_cuda:
            driver = _driver(self.device.torch.index)
            blocks = host_memory.page_locked(list(sizes.values()), driver)
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
                self.pinned[key] = host_memory.tensor_on(pages, tensor)
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
