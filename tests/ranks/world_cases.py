"""Ranks that fail, hang or tell who they are."""

from __future__ import annotations

import os
import time
from pathlib import Path

from r3.runtime.device import Device


def fails(device: Device, *, rank: int) -> None:
    """Raise on one rank."""
    if device.rank == rank:
        raise RuntimeError(f"said by rank {rank}")


def hangs(device: Device, *, rank: int) -> None:
    """Sleep on one rank."""
    if device.rank == rank:
        time.sleep(300)


def facts(device: Device, *, name: str) -> list[object]:
    """The rank's number, the value of a variable, and the hash of a text."""
    return [device.rank, os.environ.get(name), hash("text")]


def forked_by(device: Device) -> list[str]:
    """The environment of the process that forked this rank."""
    environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    return environment.decode().split("\0")
