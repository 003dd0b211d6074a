"""The Triton kernels of a MoE layer, run by Triton's interpreter, equal plain torch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.world import ROOT

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="no Triton of that kind"
    ),
]

# Beside the environment's packages, not among them: vLLM's CPU build takes another path with it.
TRITON = Path(sys.prefix) / "triton"


@pytest.fixture(scope="module")
def compared() -> list[dict[str, Any]]:
    assert (TRITON / "triton").is_dir(), f"{TRITON} has no Triton: make test installs it there"
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernel_cases"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{TRITON}:{ROOT}", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_kernels_equal_plain_torch_up_to_rounding(compared: list[dict[str, Any]]) -> None:
    assert {(row["kernel"], row["dtype"]) for row in compared} == {
        (kernel, dtype)
        for kernel in ("weighted_swiglu", "weighted_swiglu_backward", "sum_rows")
        for dtype in ("float32", "bfloat16")
    }
    for row in compared:
        # The exponential differs in its last bits (2^-23). Rarely that moves a result to the next
        # bfloat16, 2^-8 away.
        bound = 1e-6 if row["dtype"] == "float32" else 1e-3
        assert max(row["errors"]) <= bound, row


def test_sums_of_rows_have_the_same_bits_as_plain_torch(compared: list[dict[str, Any]]) -> None:
    sums = [row["errors"] for row in compared if row["kernel"] == "sum_rows"]
    assert len(sums) == 8 and not any(error for errors in sums for error in errors)


def test_mistakes_in_kernels_show(compared: list[dict[str, Any]]) -> None:
    for row in compared:
        if row["kernel"] != "sum_rows" and row["size"][0]:
            assert max(row["wrong"]) > 0.1, row
    # Rows in another order round differently.
    assert any(max(row["wrong"]) > 0 for row in compared if row["kernel"] == "sum_rows")
