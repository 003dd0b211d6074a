"""The same cases as on CPU, on a CUDA device: `pytest -m gpu`. They need one GPU and vLLM's CUDA
build; CI does not run them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import cases, precision_cases
from tests.world import run_world

pytestmark = pytest.mark.gpu


def test_captured_routes_are_the_routes_used() -> None:
    (result,) = run_world(cases.step_routes, 1, ep=1, engine_dtype="bfloat16", timeout_s=600.0)
    assert result["slots"] > 1000
    assert result["wrong"] == 0


def test_replay_lowers_the_mismatch_on_the_same_tokens() -> None:
    (result,) = run_world(cases.step_routes, 1, ep=1, engine_dtype="bfloat16", timeout_s=600.0)
    assert result["figures"]["replay/k3"] < result["figures"]["live/k3"]


def test_push_makes_the_engine_equal_to_a_freshly_loaded_one(tmp_path: Path) -> None:
    (result,) = run_world(
        cases.push_equals_fresh_engine, 1, ep=1, out=str(tmp_path), timeout_s=600.0
    )
    assert result["moved"] and result["equal"] and result["cached_equal"]


def test_float32_head_is_computed_on_both_sides() -> None:
    (result,) = run_world(precision_cases.head, 1, fp32=True, timeout_s=600.0)
    assert (result["types"], result["rounded"]) == (["torch.float32"], False)
    assert result["policy_error"] <= 1e-4
