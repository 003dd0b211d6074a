"""Ranks that fail, hang or tell who they are."""

from __future__ import annotations

import os
import time

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
