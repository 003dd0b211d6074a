"""Memory of other processes, and the limit of open files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch

from r3.runtime.process import read_memory
from tests.world import ROOT

pytestmark = pytest.mark.unit


def test_memory_is_read_byte_for_byte() -> None:
    source, target = torch.arange(1_000_003), torch.zeros(1_000_003, dtype=torch.int64)
    read_memory(os.getpid(), source.data_ptr() + 8, target.data_ptr(), source.nbytes - 16)
    assert torch.equal(target[:-2], source[1:-1]) and target[-2:].tolist() == [0, 0]


def test_memory_of_an_ended_process_is_an_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    target = torch.zeros(1)
    with pytest.raises(
        ProcessLookupError, match=f"memory of process {ended.pid} not read: No such"
    ):
        read_memory(ended.pid, target.data_ptr(), target.data_ptr(), 4)


def test_memory_that_does_not_exist_is_an_error() -> None:
    target = torch.zeros(1)
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), 1 << 12, target.data_ptr(), 4)


@pytest.mark.parametrize(("command", "expected"), [("ulimit -Sn 64", None), ("ulimit -n 64", 64)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    command: str, expected: int | None
) -> None:
    text = "from r3.runtime.process import raise_file_limit; print(raise_file_limit())"
    done = subprocess.run(
        ["bash", "-c", f'{command}; exec "$0" -c "$1"', sys.executable, text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(done.stdout) == (expected or min(hard, 1 << 16)), done.stderr
