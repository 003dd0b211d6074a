"""What a person reads when a machine has no more memory, files or time for a run."""

from __future__ import annotations

import errno
import resource

import torch

# What torch and its libraries say when the system gives no memory.
_NO_HOST_MEMORY = (
    "can't allocate memory",
    "could not create a primitive",
    "could not create a memory object",
    "Cannot allocate memory",
)


def exhausted(error: BaseException, where: str) -> list[str]:
    """The lines of an error of this kind, or none.

    Args:
        where: the rank, behind what is wrong.
    """
    if any(sign in str(error) for sign in _NO_HOST_MEMORY) or isinstance(error, MemoryError):
        said = str(error).splitlines() or ["MemoryError"]
        return [
            f"out of host memory{where}: {said[0]}",
            "  The system or the container has a limit (ulimit -v, cgroup) or no more. Raise it,",
            "  start fewer ranks, or lower train.micro_batch_tokens or engine.kv_cache_gib.",
        ]
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return [
            f"too many open files{where}: {error}",
            f"  The limit is {most} (ulimit -n), and R3 has raised it as far as it may. Raise the",
            "  hard limit, or lower env.workers, reward.workers or the connections of your code.",
        ]
    if isinstance(error, RuntimeError) and "Timed out waiting" in str(error):  # gloo's words
        return [
            f"another rank did not come in time{where}: {error}",
            "  A rank waits debug.collective_timeout_s for the others. Raise it, or look for what",
            "  keeps one of them, such as slow rewards: RUN_DIR/heartbeats has their phases.",
        ]
    if isinstance(error, torch.OutOfMemoryError):
        return [
            f"out of memory{where}: {str(error).splitlines()[0]}",
            "  Lower train.micro_batch_tokens, engine.memory_fraction or engine.kv_cache_gib, or",
            "  set model.recompute full. --dry-run prints the memory of each phase.",
        ]
    return []
