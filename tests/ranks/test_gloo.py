"""Gloo groups of a rank share one thread, and otherwise know nothing of each other."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from r3.config import ParallelConfig
from r3.extras import share_gloo_thread
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from tests.runs import program, soon
from tests.world import run_world

pytestmark = pytest.mark.ranks

LIMIT_S = 2.0
FORKED = """
import os
from datetime import timedelta
import torch.distributed as dist
from r3.extras import share_gloo_thread
from tests.ranks.test_gloo import gloo_threads

share_gloo_thread()
limit = timedelta(seconds=30)
groups = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=limit) for _ in range(2)]
before = gloo_threads(1)
child = os.fork()
if child == 0:
    gone = gloo_threads()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=limit)
    print(before, gone, gloo_threads(1), flush=True)
    os._exit(0)
os.waitpid(child, 0)
os._exit(0)
"""


def gloo_threads(expected: int = 0) -> int:
    """Gloo's threads of this process, when they are as many as expected or 10 seconds have passed.

    A thread names itself when it first runs, which may be after its group is made.
    """

    def count() -> int:
        names = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with suppress(OSError):  # the thread has ended
                names.append(path.read_text())
        return sum(name.startswith("gloo_tcp") for name in names)

    soon(lambda: count() == expected, 10.0)
    return count()


def observed(device: Device) -> None:
    """Make groups as a run does, use several at once, and let one of them fail."""
    before = gloo_threads(1)  # of the default group
    # Explicit options: the group gets the device that they name.
    own = dist.ProcessGroupGloo._Options()
    own._devices = [dist.ProcessGroupGloo.create_default_device()]
    own._timeout = timedelta(seconds=30)
    plain = dist.ProcessGroupGloo(
        dist.PrefixStore("own", dist.distributed_c10d._get_default_store()),
        device.rank,
        device.world_size,
        own,
    )
    # The test does count threads, and explicit options are respected.
    assert gloo_threads(before + 1) - before == 1
    del plain, own
    build_mesh(device, ParallelConfig())
    groups = [
        dist.new_group(timeout=timedelta(seconds=limit_s)) for limit_s in (30.0, 31.0, LIMIT_S)
    ]
    limits_s = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    ]
    assert limits_s == [30.0, 31.0, LIMIT_S]
    assert len(dist.distributed_c10d._world.pg_map) > 20, "most of them Megatron's"
    assert gloo_threads(1) == 1, "of all of them together"
    sums: list[list[float]] = [[], [], []]

    def add(number: int) -> None:
        for value in range(50):
            tensor = torch.full((1000,), float(value * (number + 1)))
            dist.all_reduce(tensor, group=groups[number])
            sums[number].append(tensor.unique().item())

    at_once = [threading.Thread(target=add, args=(number,)) for number in range(3)]
    for thread in at_once:
        thread.start()
    for thread in at_once:
        thread.join()
    # Sums of small whole numbers are exact.
    assert sums == [[2.0 * value * (number + 1) for value in range(50)] for number in range(3)]
    if device.rank == 0:  # the other one is missing
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=groups[2])
        assert LIMIT_S * 0.9 < time.monotonic() - began < LIMIT_S + 20
    later = torch.ones(1)
    dist.all_reduce(later, group=groups[0])
    assert later.item() == 2.0


def test_all_groups_share_one_thread_and_nothing_else() -> None:
    run_world(observed, 2)


def test_sharing_twice_changes_nothing() -> None:
    before = dist.ProcessGroupGloo.__init__
    share_gloo_thread()
    once = dist.ProcessGroupGloo.__init__
    share_gloo_thread()
    try:
        assert dist.ProcessGroupGloo.__init__ is once
    finally:
        dist.ProcessGroupGloo.__init__ = before


def test_a_forked_process_starts_its_own_thread() -> None:
    # The thread of the parent's device does not exist in the child: a group that used this device
    # would wait forever.
    done = program(sys.executable, "-c", FORKED)
    assert done.stdout.split() == ["1", "0", "1"], done.stderr
