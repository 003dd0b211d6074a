"""Supervised fine-tuning as a user starts it: without an engine, stopped and resumed, then RL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import QUIET_THREADS, rows_of, run, timeless
from tests.world import ROOT

pytestmark = pytest.mark.e2e

SFT = ("--train.objective", "sft", "--checkpoint.every", "2", "--log.tensorboard", "false")


def test_a_resumed_run_learns_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = (*SFT, "--eval.path", "", "--rollout.prompts_per_step", "8", "--train.steps")
    text = run(whole, *flags, "4")
    assert "no engine" in text and "building the engine" not in text
    run(parts, *flags, "2")
    run(parts, *flags, "4")
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


def test_without_evaluation_vllm_is_not_imported(tmp_path: Path) -> None:
    program = f"""
import sys, r3
settings = {{"train.objective": "sft", "eval.path": "", "train.steps": 1, "parallel.ep": 1,
            "log.dir": {str(tmp_path / "run")!r}, "log.tensorboard": False}}
result = r3.train("tiny-smoke", settings)
assert result.metrics[-1]["loss/nll"] > 0 and result.export is not None
print("vllm" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | QUIET_THREADS,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().splitlines()[-1] == "False"


@pytest.mark.large
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
