"""Ranks that read each other's memory get what gloo brings, and never go on alone."""

from __future__ import annotations

import ctypes
import errno
import platform
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from r3.layers.dispatch import TokenDispatcher, size_plan
from r3.runtime import peers as module
from r3.runtime.device import Device
from r3.runtime.mesh import Axis
from r3.runtime.peers import Peers, SharedBarrier
from tests.families import family_checkpoint
from tests.policies import batches_of, build, experts_as_on_cuda
from tests.tiny import tiny_config
from tests.world import ranks_read_each_other, run_rows, run_world
from tests.wrong_routes import patched

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not ranks_read_each_other(),
        reason="Yama (ptrace_scope) keeps ranks with different parents from reading each other",
    ),
]

ROUNDS = 300


@dataclass(frozen=True, kw_only=True)
class Waited:
    """What one rank saw at many barriers.

    Attributes:
        by_gloo: the system does not let ranks see each other's arrivals.
        came, left: seconds on the clock that processes share, by round.
        numbers: what it got in each round.
    """

    by_gloo: bool
    came: list[float]
    left: list[float]
    numbers: list[list[int]]


def waited(device: Device, processor: str, forbidden: bool) -> Waited:
    """Wait many times, and let some ranks come a little and some much later.

    Args:
        processor: what the system calls it.
        forbidden: the system refuses rank 0 shared memory.
    """

    def refused(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    with (
        patched(module.platform, "machine", lambda _: lambda: processor),
        patched(
            module.os,
            "memfd_create",
            lambda usual: refused if forbidden and device.rank == 0 else usual,
        ),
    ):
        peers = _peers(device)
    draw = random.Random(device.rank)
    came, left, numbers = [], [], []
    for number in range(ROUNDS):
        # 0.03 s: longer than a rank waits without sleeping.
        time.sleep(draw.choice([0.0, 0.0, 0.0, 0.001, 0.03 if number % 30 == 0 else 0.0]))
        came.append(time.monotonic())
        numbers.append(peers.barrier(1000 * number + device.rank))
        left.append(time.monotonic())
    by_gloo = not isinstance(getattr(peers.barrier, "__self__", None), SharedBarrier)
    return Waited(by_gloo=by_gloo, came=came, left=left, numbers=numbers)


@pytest.mark.parametrize(
    ("ranks", "processor", "forbidden"),
    [
        (2, "x86_64", False),
        (3, "x86_64", False),
        (4, "x86_64", False),
        (3, "aarch64", False),
        (2, "x86_64", True),
    ],
)
def test_nobody_leaves_a_barrier_before_all_have_come(
    ranks: int, processor: str, forbidden: bool
) -> None:
    found = run_world(waited, ranks, processor=processor, forbidden=forbidden)
    for number in range(ROUNDS):
        last = max(each.came[number] for each in found)
        assert all(each.left[number] >= last for each in found), f"round {number}"
        expected = [1000 * number + rank for rank in range(ranks)]
        assert all(each.numbers[number] == expected for each in found), f"round {number}"
    # Only processors that show writes in order can do without messages.
    assert all(each.by_gloo == (forbidden or processor != "x86_64") for each in found)


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Whether one rank got the same through memory as through gloo."""

    messages: bool
    objects: bool
    rows: bool
    lengths: list[int]


def exchanged(device: Device) -> Exchanged:
    """Exchange messages, objects and rows of any size, also of none, many times."""
    group = dist.group.WORLD
    by_memory = Axis.of("world", group, device)
    by_gloo = Axis.of("world", group)
    assert by_memory.peers is not None and by_gloo.peers is None
    draw = random.Random(device.rank)
    common = random.Random(5)  # the same on all ranks
    messages, objects, rows, lengths = [], [], [], []
    for _ in range(20):
        outgoing = [draw.randbytes(draw.choice([0, 1, 700, 70_000])) for _ in range(by_gloo.size)]
        lengths += map(len, outgoing)
        messages.append(by_memory.all_to_all_bytes(outgoing) == by_gloo.all_to_all_bytes(outgoing))
        item = {"rank": device.rank, "bytes": outgoing[0]}
        objects.append(by_memory.all_gather_object(item) == by_gloo.all_gather_object(item))
        counts = [[common.choice([0, 1, 7]) for _ in range(by_gloo.size)] for _ in outgoing]
        sent = counts[device.rank]
        received = [row[device.rank] for row in counts]
        tensors = [
            torch.randn(sum(sent), 3, 5),
            torch.randn(sum(sent), 2, dtype=torch.bfloat16),
            torch.randint(9, (sum(sent), 4)),
        ]
        expected = [tensor.new_empty(sum(received), *tensor.shape[1:]) for tensor in tensors]
        for tensor, into in zip(tensors, expected, strict=True):
            dist.all_to_all_single(into, tensor, received, sent)
        found = by_memory.peers.all_to_all_rows(tensors, sent, received)
        rows += [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]
    return Exchanged(messages=all(messages), objects=all(objects), rows=all(rows), lengths=lengths)


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_objects_and_rows_are_those_of_gloo(ranks: int) -> None:
    for found in run_world(exchanged, ranks):
        assert found.messages and found.objects and found.rows, found
        assert min(found.lengths) == 0 and max(found.lengths) == 70_000, found


@dataclass(frozen=True, kw_only=True)
class Missed:
    """What a rank of two hears when the other one stays away.

    Attributes:
        at_begin: error if it does not come.
        at_end: error if it does not leave.
        seconds: until both were raised.
    """

    at_begin: str
    at_end: str
    seconds: float


def missed(device: Device, limit_s: float, processor: str) -> Missed:
    """Let rank 1 stay in one window, and away from another one."""
    with patched(module.platform, "machine", lambda _: lambda: processor):
        slow, absent = (_peers(device, limit_s) for _ in range(2))
    began = time.monotonic()
    at_end = _error_of(slow, busy_s=4 * limit_s * device.rank)
    at_begin = _error_of(absent) if device.rank == 0 else ""
    return Missed(at_end=at_end, at_begin=at_begin, seconds=time.monotonic() - began)


def _error_of(peers: Peers, *, busy_s: float = 0.0) -> str:
    try:
        with peers.window(torch.zeros(1, dtype=torch.int64)):
            time.sleep(busy_s)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_a_rank_waits_for_the_groups_time_limit_only(processor: str) -> None:
    first, other = run_world(missed, 2, limit_s=1.0, processor=processor)
    expected = "did not reach the barrier within 1 s" if processor == "x86_64" else "Timed out"
    assert expected in first.at_end and expected in first.at_begin, first
    assert 2.0 <= first.seconds < 3.9, first
    assert other.at_end, "a rank that comes back late must not go on alone"
    if processor == "x86_64":
        assert "rank 0 of" in other.at_end and "stopped waiting for others" in other.at_end


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One rank of two that share experts.

    Attributes:
        peers: its ranks read each other's memory.
        by_memory, by_gloo: exchanges of each kind in one forward and backward pass.
        same: loss and gradients have the same bits with both.
        moved: gradients are not all zero.
    """

    peers: bool
    by_memory: int
    by_gloo: int
    same: bool
    moved: bool


def trained(device: Device, model: str, dtype: str, experts: str) -> Trained:
    """The same pass with tokens from memory, and by gloo while ranks compute."""
    sections = {"dtype": dtype, "experts": experts_as_on_cuda(experts)}
    config = tiny_config(model, parallel={"ep": 2}, model=sections)
    mesh, policy = build(device, config)
    (batch,) = batches_of(mesh, policy.shape)
    calls = {"memory": 0, "gloo": 0}

    def counted(kind: str) -> Callable[[Any], Any]:
        def counting(run: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[kind] += 1
                return run(*args, **kwargs)

            return call

        return counting

    def gradients() -> list[torch.Tensor]:
        with (
            patched(Peers, "all_to_all_rows", counted("memory")),
            patched(dist, "all_to_all_single", counted("gloo")),
        ):
            loss = policy.forward_backward(batch)["loss/total"]
        buffers = [buffer.clone() for buffer in policy.memory.gradient_buffers()]
        return [torch.tensor(loss.total), *buffers]

    from_memory = gradients()
    assert calls["gloo"] == 0, calls
    by_memory = calls["memory"]
    ep = replace(mesh.ep, peers=None)
    for chunk in policy.wrapped:
        for layer in chunk.modules():
            if isinstance(getattr(layer, "token_dispatcher", None), TokenDispatcher):
                layer.token_dispatcher._ep = ep
    policy.replay.plan = size_plan(ep, policy.shape.num_experts // ep.size)
    by_gloo = gradients()
    return Trained(
        peers=mesh.ep.peers is not None,
        by_memory=by_memory,
        by_gloo=calls["gloo"],
        same=all(torch.equal(one, other) for one, other in zip(from_memory, by_gloo, strict=True)),
        moved=any(bool(gradient.any()) for gradient in from_memory[1:]),
    )


def test_tokens_from_memory_give_the_bits_of_gloo(tmp_path: Path) -> None:
    model = str(family_checkpoint(tmp_path / "model", "qwen2_moe"))  # it has shared experts
    kinds = (("float32", "fused"), ("bfloat16", "fused"), ("float32", "sorted"))
    rows = [{"dtype": dtype, "experts": experts} for dtype, experts in kinds]
    for found in chain(*run_rows(trained, 2, rows, model=model)):
        assert found.peers and found.same and found.moved, found
        # Values, gates and experts go together.
        assert 0 < found.by_memory < found.by_gloo, found


def forbid_reading() -> None:
    """Let the kernel refuse this process the memory of others from now on, as containers may."""
    number = {"x86_64": 310, "aarch64": 270}[platform.machine()]  # of process_vm_readv
    filter_ = (
        (0x20, 0, 0, 0),  # load the number of a call
        (0x15, 0, 1, number),  # skip the next line if it is another one
        (0x06, 0, 0, 0x50000 | errno.EPERM),  # fail
        (0x06, 0, 0, 0x7FFF0000),  # allow
    )
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in filter_))
    program = struct.pack("HP", len(filter_), ctypes.addressof(lines))
    libc = ctypes.CDLL(None)
    no_new_privileges, set_filter, mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_filter, mode, program, 0, 0) == 0


def found_peers(device: Device) -> list[bool]:
    """Whether ranks read each other: on one machine, rank 0 on another one, rank 0 not allowed."""
    found = []
    for way in ("one host", "other host", "not allowed"):
        if way == "not allowed" and device.rank == 0:
            forbid_reading()
        apart = way == "other host" and device.rank == 0
        group = dist.new_group(backend="gloo")
        found.append(Peers.of(group, f"{device.host} {apart}") is not None)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_read_each_other_or_none_does(ranks: int) -> None:
    assert run_world(found_peers, ranks) == [[True, False, False]] * ranks


def _peers(device: Device, limit_s: float = 60.0) -> Peers:
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    assert isinstance(group, dist.ProcessGroup)
    peers = Peers.of(group, device.host)
    assert peers is not None
    return peers
