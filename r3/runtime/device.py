"""The one file that distinguishes CUDA and CPU: devices, process groups, memory, shared tensors.

All other code uses the frozen `Device` that it is given; `tensors.py` beside it moves tensors.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from r3 import extras
from r3.runtime import terminal
from r3.runtime.limits import host_gib, openmp_threads
from r3.runtime.process import boot_id

GIB = 2**30


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

        On CPU a part may stay, for later tensors of either (r3.backends.cpu.memory).
        """
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        else:
            extras.cpu_memory().trim()

    def used_gib(self) -> float:
        """Memory in use in GiB: of the whole device on CUDA, the resident set of this process on
        CPU, with what `release_memory` let stay.
        """
        if self.is_cuda:
            free, total = self.memory_gib()
            return total - free
        return float(psutil.Process().memory_info().rss) / GIB

    def memory_gib(self) -> tuple[float, float]:
        """Free and total memory of the device; of this machine on CPU."""
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info()
            return free / GIB, total / GIB
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages / GIB, host_gib()

    def uuid(self) -> str:
        """What nvidia-smi calls the GPU, without its prefix."""
        return str(torch.cuda.get_device_properties(self.torch).uuid)

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
        # Megatron-Core 0.19 imports these kernels, and so Triton, whether or not it calls them.
        kernels: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = None
        kernels.paged_stash_pop_kernel = None
        sys.modules.setdefault(kernels.__name__, kernels)
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
        extras.cpu_memory().keep_freed_memory()
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


def machine_id() -> str:
    """Name of this machine, its boot and its process space.

    Equal host names of two containers differ so, and so do two containers of one machine that do
    not see each other's processes: shared tensors are opened through /proc.
    """
    processes = Path("/proc/self/ns/pid")
    space = os.readlink(processes) if processes.is_symlink() else ""
    return f"{os.uname().nodename}:{boot_id()}:{space}"


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
