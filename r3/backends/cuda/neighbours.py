"""Other programs on a GPU: what an error of vLLM about their memory means."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from r3.engine.build import DeviceMemoryError
from r3.runtime.device import Device

# What vLLM says where another process has memory, or takes some -> what that means for a user.
_TAKEN = {
    "Free memory on device": "the engine does not fit beside the other processes on this device",
    "Memory usage increased after sleeping": "another process took memory of this device while the "
    "engine gave up its own, which vLLM takes for its own mistake",
}


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
            f"{share * total:.1f}. On the device: {', '.join(processes(device)) or 'unknown'}. "
            f"{DeviceMemoryError.advice}"
        ) from error


def processes(device: Device) -> list[str]:
    """Programs on this GPU as nvidia-smi lists them, with process id and memory.

    Empty on CPU, without nvidia-smi, and where programs run in other containers.
    """
    program = shutil.which("nvidia-smi")
    if not (device.is_cuda and program):
        return []
    query = ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory"]
    query += ["--format=csv,noheader"]
    listed = subprocess.run([program, *query], capture_output=True, text=True).stdout
    return programs_on(device.uuid(), listed)


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
