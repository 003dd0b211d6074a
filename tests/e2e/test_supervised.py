"""Supervised fine-tuning as a user starts it: without an engine, stopped and resumed, then RL."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import rows_of, run, timeless, without_last_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.large]


def test_a_resumed_run_learns_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ("--train.objective", "sft", "--train.steps", "4", "--eval.path", "")
    flags += ("--rollout.prompts_per_step", "8", "--log.tensorboard", "false")
    flags += ("--checkpoint.every", "2", "--checkpoint.keep", "0")
    text = run(whole, *flags)
    assert "no engine" in text and "building the engine" not in text
    without_last_checkpoint(shutil.copytree(whole, parts, symlinks=True), 4)
    assert "after step 2" in run(parts, *flags)
    rows = rows_of(whole)
    assert [timeless(row) for row in rows] == [timeless(row) for row in rows_of(parts)]
    assert rows[-1]["loss/nll"] < rows[0]["loss/nll"]
    mine, theirs = (_export(folder / "hf/step_000004") for folder in (whole, parts))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def _export(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_rl_continues_from_the_export(tmp_path: Path) -> None:
    """The held-out accuracy that supervised training ends with is where RL begins."""
    flags = ("--eval.max_prompts", "64", "--log.tensorboard", "false")
    run(tmp_path / "sft", *flags, "--train.objective", "sft", "--train.steps", "3")
    first = rows_of(tmp_path / "sft")
    assert first[-1]["eval/heldout/accuracy"] > first[0]["eval/heldout/accuracy"] + 0.1
    export = str(tmp_path / "sft/hf/step_000003")
    run(tmp_path / "rl", *flags, "--model.path", export, "--train.steps", "1")
    then = rows_of(tmp_path / "rl")
    assert then[0]["eval/heldout/accuracy"] == first[-1]["eval/heldout/accuracy"]
    assert then[-1]["routing/coverage"] == 1.0, "routes are captured and replayed again"
