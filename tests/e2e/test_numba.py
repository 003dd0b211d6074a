"""A user's file that imports Numba: vLLM looks through every module when it builds an engine."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.runs import program, rows_of, run
from tests.world import QUIET_THREADS

pytestmark = pytest.mark.e2e

REWARD = """\
import sys
import zlib

import numba

kernels = sys.modules.get("vllm.triton_utils.dispatcher")
print("Numba before the engine:", kernels is None or not kernels._registry)


@numba.njit
def scaled(number):
    return number / 16


def reward(response, prompt):
    return scaled(zlib.crc32(response.encode()) % 16)
"""
# vLLM 0.31 and later, as a program would meet it without R3's care.
SCAN = """\
import sys
import warnings

import torch.distributed  # has a name that warns when it is asked for anything

if {numba}:
    import numba

from vllm.triton_utils import dispatcher

if {careful}:
    from r3.backends.cpu.engine import _replace_kernels_of_vllm_alone

    _replace_kernels_of_vllm_alone()


def kernel(x): ...


module = type(dispatcher)("vllm.of_a_test")
module.kernel = kernel
sys.modules["vllm.of_a_test"] = module
wrapper = dispatcher.KernelOverride(kernel, kernel)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    dispatcher._rebind_kernels([(kernel, wrapper)])
assert module.kernel is wrapper
print("warnings:", [each.category.__name__ for each in said])
"""


def test_a_reward_with_numba_trains_and_nothing_warns(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    given = ("--reward.function", f"{file}:reward", "--train.steps", "1", "--parallel.ep", "1")
    said = run(tmp_path / "run", *given, ranks=1)
    assert "Numba before the engine: True" in said
    assert "FutureWarning" not in said
    (row,) = (row for row in rows_of(tmp_path / "run") if "optim/grad_norm" in row)
    assert row["optim/grad_norm"] > 0


@pytest.mark.skipif(
    find_spec("vllm.triton_utils.dispatcher") is None, reason="vLLM before 0.31 does not look"
)
def test_vllms_own_scan_dies_of_numba_and_r3s_does_not() -> None:
    def scan(**given: bool) -> subprocess.CompletedProcess[str]:
        return program(sys.executable, "-c", SCAN.format(**given), env=QUIET_THREADS)

    theirs, ours = scan(careful=False, numba=True), scan(careful=True, numba=True)
    assert theirs.returncode == 1 and "object has no attribute 'get'" in theirs.stderr
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert "warnings: []" in ours.stdout
    assert "FutureWarning" in scan(careful=False, numba=False).stdout
