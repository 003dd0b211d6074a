"""Runs with several sources: a pass rate of each, a curriculum, and a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from r3 import assets
from tests.runs import rows_of, run, timeless, without_last_checkpoint, words

pytestmark = pytest.mark.e2e


def test_a_curriculum_resumes_bit_for_bit_and_counts_its_rows(tmp_path: Path) -> None:
    """Bounds that half of the rows break, and so few rows that some must be taken back."""
    rows = assets.WORD_PROBLEMS_TRAIN.read_text().splitlines()
    for name, part in (("a", rows[:14]), ("b", rows[14:20])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    flags = words(f"--data.path {tmp_path}/a.jsonl {tmp_path}/b.jsonl --data.weights 3 1")
    flags += words("--data.curriculum 0.3 0.6 --data.curriculum_rest 2 --train.steps 6 --eval.path")
    flags += ("", *words("--rollout.prompts_per_step 8 --checkpoint.every 3"))
    whole = tmp_path / "whole"
    output = run(whole, *flags)
    found = rows_of(whole)
    for row in found:
        samples = {name: row[f"source/{name}.jsonl/samples"] for name in "ab"}
        assert samples == {"a": 48.0, "b": 16.0}
        rates = {name: row[f"source/{name}.jsonl/pass_rate"] for name in "ab"}
        assert (rates["a"] * 48 + rates["b"] * 16) / 64 == pytest.approx(row["reward/mean"])
        assert row["curriculum/held_easy"] + row["curriculum/held_hard"] <= 20
    assert found[0]["curriculum/passed_over"] == 0 < found[-1]["curriculum/passed_over"]
    assert found[0]["curriculum/held_easy"] > 0 and found[0]["curriculum/held_hard"] > 0
    assert sum(row["curriculum/taken_back"] for row in found) > 0
    assert output.count("prompts are rows that data.curriculum holds back") == 1

    killed = tmp_path / "killed"
    shutil.copytree(whole, killed, symlinks=True)
    without_last_checkpoint(killed, 6)
    run(killed, *flags)
    assert list(map(timeless, rows_of(killed))) == list(map(timeless, found))
    states = [
        json.loads((folder / "checkpoints/step_000006/curriculum.json").read_text())
        for folder in (whole, killed)
    ]
    assert states[0] == states[1] and states[0]["places"] == 48
