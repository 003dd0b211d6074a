"""The mismatch by position in the conversation, with a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import depth_cases
from tests.tiny import embedded
from tests.world import run_world

pytestmark = pytest.mark.e2e


def test_a_rope_wrong_beyond_its_context_is_found_by_depth_alone(tmp_path: Path) -> None:
    model = embedded(tmp_path / "model", max_position_embeddings=2048)
    (found,) = run_world(depth_cases.rope_beyond_the_context, 1, model=str(model))
    assert found.sound["check_depth"].startswith("mean |D| and agreement by position: 0-1k ")
    depth = found.wrong.pop("check_depth")
    assert depth.startswith("CheckFailed: the mismatch grows with the conversation: mean |D| is ")
    assert "at 1-4k. Compare rope_parameters" in depth
    for name, said in found.wrong.items():
        # What is shorter than the context is the same to the last digit.
        assert said == found.sound[name], name
