"""The same cases as on CPU, on a CUDA device: `pytest -m gpu`.

They need one GPU and vLLM's CUDA build; CI does not run them. Without a GPU the same command
rehearses them on CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import precision_cases, push_cases, step_cases
from tests.e2e.step_cases import StepRoutes
from tests.world import run_world

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def routes() -> StepRoutes:
    """One step in bfloat16 on both sides."""
    (result,) = run_world(step_cases.step_routes, 1, ep=1, dtype="bfloat16", timeout_s=600.0)
    return result


def test_captured_routes_are_the_routes_used(routes: StepRoutes) -> None:
    assert routes.slots > 1000
    assert routes.wrong == 0


def test_engine_and_policy_agree_within_bfloat16(routes: StepRoutes) -> None:
    # 3e-5 on CPU, replayed or live: the routers of this model are decided. Wrong weights give 0.1.
    assert 0 < routes.k3["replay"] < 1e-3
    assert 0 < routes.k3["live"] < 1e-3


def test_push_makes_the_engine_equal_to_a_freshly_loaded_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "export")
    (engine,) = run_world(push_cases.pushed, 1, out=folder, dtype="bfloat16", timeout_s=600.0)
    assert engine.before != engine.after, "the moved weights must sample something else"
    (fresh,) = run_world(push_cases.loaded, 1, model=folder, dtype="bfloat16", timeout_s=600.0)
    assert engine.after == fresh
    assert engine.cached == fresh
    assert engine.slept == [fresh, fresh]
    assert engine.compared > 0


def test_float32_head_is_computed_on_both_sides() -> None:
    (result,) = run_world(precision_cases.head, 1, fp32=True, timeout_s=600.0)
    assert (result.types, result.rounded) == (["torch.float32"], False)
    # Logits from bfloat16 operands multiplied in float32, against float64: rounding of the sums.
    assert result.policy_error <= 1e-4
