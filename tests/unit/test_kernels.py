"""The Triton kernels, run by Triton's interpreter, equal plain torch."""

import json
import platform
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.runs import program
from tests.world import ROOT

pytestmark = [
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="no Triton of that kind"
    )
]

# Beside the environment's packages, not among them: vLLM's CPU build takes another path with it.
TRITON = Path(sys.prefix) / "triton"
DTYPES = ("float32", "bfloat16")
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def measured() -> dict[str, Rows]:
    return json.loads(run(TRITON_INTERPRET="1"))


def run(*words: str, **variables: str) -> str:
    """What `kernel_cases` prints."""
    assert (TRITON / "triton").is_dir(), f"{TRITON} has no Triton: make test installs it there"
    command = (sys.executable, "-m", "tests.unit.kernel_cases", *words)
    done = program(*command, env={"PYTHONPATH": f"{TRITON}:{ROOT}", **variables}, timeout_s=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compared(measured: dict[str, Rows]) -> Rows:
    return measured["experts"]


def test_kernels_equal_plain_torch_up_to_rounding(compared: Rows) -> None:
    kernels = ("weighted_swiglu", "weighted_swiglu_backward", "sum_rows")
    assert {(row["kernel"], row["dtype"]) for row in compared} == {*product(kernels, DTYPES)}
    for row in compared:
        # The exponential differs in its last bits (2^-23). Rarely that moves a result to the next
        # bfloat16, 2^-8 away.
        bound = 1e-6 if row["dtype"] == "float32" else 1e-3
        assert max(row["errors"]) <= bound, row


def test_sums_of_rows_have_the_same_bits_as_plain_torch(compared: Rows) -> None:
    sums = [row["errors"] for row in compared if row["kernel"] == "sum_rows"]
    assert len(sums) == 8 and not any(error for errors in sums for error in errors)


def test_mistakes_in_kernels_show(compared: Rows) -> None:
    for row in compared:
        if row["kernel"] != "sum_rows" and row["size"][0]:
            assert max(row["wrong"]) > 0.1, row
    # Rows in another order round differently.
    assert any(max(row["wrong"]) > 0 for row in compared if row["kernel"] == "sum_rows")


def test_sums_and_gradients_of_logits_are_as_exact_as_those_of_plain_torch(
    measured: dict[str, Rows],
) -> None:
    rows = measured["output layer"]
    names = ("sums", "gradient", "gradient with entropy", "gradient in halves")
    assert {(row["case"], row["dtype"]) for row in rows} == {*product(names, DTYPES)}
    for row in rows:
        # z is at most 190, rounded to 2^-17 in float32, and so is the logarithm of a probability.
        bound = 4 * 2**-17
        if row["case"] == "gradient in halves":
            bound += 2**-14  # the interpreter cuts bits off, where a GPU rounds: 2^-18
        elif row["case"] != "sums" and row["dtype"] == "bfloat16":
            bound += 2**-7  # the type of the result, cut off too
        assert row["error"] <= bound, row
        if row["dtype"] == "float32" and row["case"] != "gradient in halves":
            assert row["error"] <= 1.1 * row["plain"] + 1e-7, row
        # Another target: nothing else would show if there is only padding.
        assert row["wrong"] > 0.1 or not row["size"][2], row


def test_norms_and_rotations_are_as_exact_as_plain_torch(measured: dict[str, Rows]) -> None:
    rows = measured["rows"]
    kernels = ("norm", "norm_backward", "turn")
    assert {(row["kernel"], row["dtype"]) for row in rows} == {*product(kernels, DTYPES)}
    for row in rows:
        # In bfloat16 the interpreter cuts off what a GPU rounds: 2^-7, at most twice.
        more = 1e-7 if row["dtype"] == "float32" else 2**-7
        for error, plain in zip(row["errors"], row["plain"], strict=True):
            assert error <= 2 * plain + more, row
        # Another weight, or other cosines: nothing else would show if there are no rows.
        assert max(row["wrong"]) > 0.1 or not row["size"][0], row


@pytest.mark.large
def test_every_kernel_compiles_for_an_h100(tmp_path: Path) -> None:
    sizes = json.loads(run("compile", TRITON_CACHE_DIR=str(tmp_path)))
    # Two types, and four variants of one kernel. Three also have a number that may be 1.
    assert len(sizes) == 2 * (7 + 4) + 2 + 4 and min(sizes.values()) > 1000
