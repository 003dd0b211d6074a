"""The engine decodes a dump again, and finds by itself what was planted beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import oracle_cases
from tests.families import engine_checkpoint
from tests.tiny import embedded
from tests.world import run_world

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_fault_is_found_by_its_place_and_nothing_else(dtype: str, tmp_path: Path) -> None:
    model = embedded(tmp_path / "model", max_position_embeddings=2048)
    (found,) = run_world(oracle_cases.planted, 1, model=str(model), dtype=dtype)
    # Decoded again, not prefilled: the same kernels give the same bits.
    assert (found.again, found.same_routes) == (0.0, True)
    findings = found.findings
    assert findings.pop("sound") == []
    (shifted,), (temperature,), (rope,), (experts,) = findings.values()
    assert shifted.startswith("rollout long:2/0: its dumped routes are those of the token before")
    assert "every router chooses the same: compare rollout.temperature" in temperature
    assert rope.startswith("the mismatch grows with the conversation")
    assert "at positions 0-64" in rope and "rope_parameters" in rope
    assert experts.startswith("layer 1, experts 0, 3: ")


def test_a_rounded_router_bias_is_found_by_choice_and_by_bytes(tmp_path: Path) -> None:
    folder = engine_checkpoint(tmp_path / "model", "glm-4.5", max_position_embeddings=2048)
    (found,) = run_world(oracle_cases.planted, 1, model=str(folder), bias=True)
    assert (found.again, found.same_routes) == (0.0, True)
    assert found.findings["sound"] == []
    (rounded,) = found.findings["rounded bias"]
    assert "choose other experts for " in rounded and "first in layer 2" in rounded
    assert "compare the router's bias" in rounded
    (name,) = found.findings["rounded bias, by bytes"]
    assert name == "model.layers.2.mlp.gate.e_score_correction_bias"
