"""Memory of other processes: what is read, and the error where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from r3.runtime.process import read_memory

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
