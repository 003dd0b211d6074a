"""Run a program of R3 on a device that other processes use at the same time.

    python -m benchmarks.one_device train.py PRESET ...       or: -m r3.doctor PRESET ...

Two things that a device of one's own has are given up here, and only here:

- vLLM compares the free memory before and after it sleeps, and takes a neighbour's allocation for
  its own mistake. Both readings are equal here.
- NCCL refuses two ranks on one device. Under torchrun, all ranks take device 0, and gloo carries
  device tensors. Memory handles between the ranks stay those of CUDA.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from r3.engine.engine import Sleeper
from r3.runtime.device import has_gpu


def without_comparison() -> None:
    """Let vLLM's `Worker.sleep` read the same free memory twice."""
    plain, read = Sleeper.sleep, torch.accelerator.get_memory_info

    def sleep(self: Sleeper, level: int) -> None:
        torch.accelerator.get_memory_info = lambda *_: (0, 0)
        try:
            plain(self, level)
        finally:
            torch.accelerator.get_memory_info = read

    Sleeper.sleep = sleep  # type: ignore[method-assign]


def without_nccl() -> None:
    """Replace NCCL by gloo, and what Megatron-Core asks of NCCL alone by single calls."""
    plain = dist.init_process_group

    def init(backend: str, **options: Any) -> None:
        plain(backend.replace("nccl", "gloo"), **options)

    class Done:
        def wait(self) -> None: ...

    @contextmanager
    def one_by_one(*_: Any, **__: Any) -> Iterator[Done]:
        yield Done()

    dist.init_process_group = init
    dist._coalescing_manager = one_by_one
    if has_gpu():
        os.environ["LOCAL_RANK"] = "0"


def main() -> None:
    """Run the program that the command line names, in this process."""
    without_comparison()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        without_nccl()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
