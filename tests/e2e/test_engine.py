"""The engine inside every rank: weights in, routes out, memory back and forth. Real vLLM, real
Megatron.
"""

from __future__ import annotations

import mmap
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e import guard_cases, push_cases, step_cases
from tests.engines import require_equal
from tests.errors import NOTHING
from tests.families import engine_checkpoint
from tests.processor import HAS_AVX512
from tests.sweeps import sweep
from tests.world import run_rows, run_world

pytestmark = pytest.mark.e2e


large = pytest.mark.large


@pytest.mark.parametrize(
    ("model", "parallel", "hosts", "reads"),
    [
        pytest.param("", {"ep": 2}, None, "peer", id="ep2-shared-memory"),
        pytest.param("", {}, None, "own", id="dp2", marks=large),
        pytest.param("", {"ep": 2}, ["one", "two"], "network", id="ep2-two-machines", marks=large),
        # The first stage has the embedding, the last one a copy of it as the output layer.
        pytest.param("qwen3_moe-tied", {"pp": 2}, None, "peer", id="pp2-tied"),
        pytest.param("qwen3-tied", {"pp": 2}, None, "peer", id="pp2-tied-dense", marks=large),
    ],
)
def test_push_makes_the_engine_bit_identical_to_a_freshly_loaded_one(
    model: str, parallel: dict[str, int], hosts: list[str] | None, reads: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"parallel": parallel, "out": str(tmp_path), "hosts": hosts}
    if model:
        given["model"] = str(engine_checkpoint(tmp_path / "model", model))
    for result in run_world(push_cases.push_equals_fresh_engine, 2, **given):
        require_equal(result.pushed)
        assert result.cached_equal
        # On every rank, whichever has the engine.
        expected = "rank 1: after the weight sync to version 1 1 tensors of the engine"
        assert expected in result.stale
        assert "1 tensors of the engine are not" in result.plan_stale  # moved: its data is current
        assert result.local_reads > 0
        assert (result.peer_reads > 0, result.network_reads > 0) == (
            reads == "peer",
            reads == "network",
        )


@pytest.fixture(scope="module")
def guards() -> SimpleNamespace:
    return run_world(guard_cases.engine_guards, 1)[0]


def test_engine_refuses_every_wrong_order_and_every_incomplete_push(
    guards: SimpleNamespace,
) -> None:
    found = guards
    assert found.works
    assert len(found.unfit) == 18
    for name, text in found.unfit.items():
        title, *faults = text.splitlines()
        assert title == "EngineConfigError: the engine cannot be used"
        assert len(faults) == 1 and faults[0].startswith(f"  - {name} is "), f"{name}: {text}"
    assert found.fit == NOTHING


def test_a_model_that_is_new_to_the_machine_needs_no_process(guards: SimpleNamespace) -> None:
    assert guards.inspected_here


def test_sleeping_and_waking_twice_changes_and_loses_nothing(guards: SimpleNamespace) -> None:
    first, *others = guards.sleeps
    asleep, half, awake = "asleep already", "with only the weights awake", "awake already"
    for sleep in guards.sleeps:
        for said, expected in zip(
            sleep.refused, (asleep, awake, half, awake, "holds version -1"), strict=True
        ):
            assert expected in said
        # A batch of no living request, which vLLM would otherwise read after the next wake.
        assert sleep.ahead == [1, 0]
        before, during = sleep.cache_bytes
        # Four layers, and two pages of each that other memory may share.
        assert before > 2**16 and during <= 8 * mmap.PAGESIZE
        assert sleep.cache_is_zero
    for sleep in others:
        assert sleep.samples == first.samples
        assert sleep.weights == first.weights


def test_norms_in_one_call_are_the_policys(guards: SimpleNamespace) -> None:
    norms = guards.norms
    done, of = norms.replaced
    assert done == of == 17  # four of each layer, and the last one
    # The order in which a row is summed: 4e-7. A forgotten weight or epsilon leaves 1e-2 or more.
    assert max(norms.farthest) < 2e-6
    assert norms.of_slices < 2e-6 < 1e-2 < norms.native_of_slices
    ours, native = norms.in_bfloat16
    assert ours < 0.01 < 0.1 < native  # vLLM normalises the sum before it rounds it
    assert norms.left_alone == ["gemma", "part of a row", "no weight"]


def test_rotated_numbers_are_rounded_to_the_nearest_bfloat16(guards: SimpleNamespace) -> None:
    """But for sums that float32 rounds to a tie. A kernel that cuts off is right in half of them,
    which vLLM's is without AVX-512."""
    assert guards.rotated > 0.999
    assert HAS_AVX512 or 0.3 < guards.rotated_by_vllm < 0.7


def test_captured_routes_are_the_routes_that_were_used() -> None:
    for result in chain(*run_rows(step_cases.step_routes, 2, [{"ep": 1}, {"ep": 2}])):
        assert result.slots > 1000
        assert result.wrong == 0
        assert result.abs_max <= 1e-4  # two float32 stacks: rounding leaves some 1e-6
        assert result.proof <= 1e-4


def test_what_is_sampled_does_not_depend_on_ranks_or_batching() -> None:
    few = {"max_num_seqs": 3, "async_scheduling": False}
    (one,), (narrow,) = run_rows(step_cases.sampled, 1, [{}, few], ep=1)
    left, right = run_world(step_cases.sampled, 2, ep=2)
    assert len(one) == 32
    assert len(set(one.values())) > 16, "samples must not share their noise"
    assert left.keys().isdisjoint(right)
    assert left | right == one
    assert narrow == one


@pytest.mark.parametrize("dtype", sweep(("float32", "bfloat16"), kept=("bfloat16",)))
def test_memory_leaves_and_comes_back_bit_for_bit(dtype: str) -> None:
    (result,) = run_world(step_cases.memory_moves, 1, dtype=dtype)
    # the cache of 0.5 GiB leaves the resident set while the policy trains; 0.1 is left for what
    # grows meanwhile
    assert result.generate_gib - result.asleep_gib >= 0.4
    assert result.gradient_bytes_in_generate == 0
    assert result.optimizer_bytes_in_generate == 0
    assert result.optimizer_tensors > 50
    assert result.restored
    assert result.random_state_kept
