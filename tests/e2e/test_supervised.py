"""Supervised fine-tuning as a user starts it: without an engine, stopped and resumed, then RL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import rows_of, run

pytestmark = [pytest.mark.e2e, pytest.mark.large]


def test_rl_continues_from_the_export(tmp_path: Path) -> None:
    """The held-out accuracy that supervised training ends with is where RL begins."""
    flags = ("--eval.max_prompts", "64", "--log.tensorboard", "false")
    run(tmp_path / "sft", *flags, "--train.objective", "sft", "--train.steps", "3")
    first = rows_of(tmp_path / "sft")
    assert first[-1]["loss/nll"] < first[1]["loss/nll"]
    assert first[-1]["eval/heldout/accuracy"] > first[0]["eval/heldout/accuracy"] + 0.1
    export = str(tmp_path / "sft/hf/step_000003")
    run(tmp_path / "rl", *flags, "--model.path", export, "--train.steps", "1")
    then = rows_of(tmp_path / "rl")
    assert then[0]["eval/heldout/accuracy"] == first[-1]["eval/heldout/accuracy"]
    assert then[-1]["routing/coverage"] == 1.0, "routes are captured and replayed again"
