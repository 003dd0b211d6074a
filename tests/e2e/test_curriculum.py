"""Runs with several sources: a pass rate of each, a curriculum, and a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from r3 import assets
from r3.tools import read_rollouts
from tests.runs import rows_of, run, timeless_rows, without_last_checkpoint, words

pytestmark = pytest.mark.e2e


def resumed(whole: Path, step: int, *flags: str, preset: str = "tiny-smoke") -> Path:
    """Make the last steps of a run again, which must be the same."""
    killed = shutil.copytree(whole, whole.with_name("killed"), symlinks=True)
    without_last_checkpoint(killed, step)
    run(killed, *flags, preset=preset)
    assert timeless_rows(killed) == timeless_rows(whole)
    return killed


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

    killed = resumed(whole, 6, *flags)
    states = [
        json.loads((folder / "checkpoints/step_000006/curriculum.json").read_text())
        for folder in (whole, killed)
    ]
    assert states[0] == states[1] and states[0]["places"] == 48


GUESS = '''
class Guess:
    """A hidden number; a wrong guess costs 0.1."""

    stop = ("?",)

    def reset(self, prompt):
        self.number, self.turns = int(prompt.answer.split("####")[-1]), 0
        return [{"role": "user", "content": "Which number?"}]

    def step(self, message):
        self.turns += 1
        digits = "".join(filter(str.isdigit, message["content"]))[-3:]
        right = digits != "" and int(digits) == self.number
        done = right or self.turns == 2
        return [] if done else [{"role": "user", "content": "No."}], float(right) - 0.1, done


class Agent:
    """A workflow of one or two calls."""

    async def run(self, task, model):
        first = await model.chat(list(task.messages))
        if "####" in first["content"]:
            return 1.0
        await model.chat([*task.messages, {"role": "user", "content": "Short!"}])
        return 0.0
'''


def test_sources_with_four_environments_resume_bit_for_bit(tmp_path: Path) -> None:
    rows = assets.WORD_PROBLEMS_TRAIN.read_text().splitlines()
    names = ("plain", "tools", "guess", "agent")
    for index, name in enumerate(names):
        part = rows[20 * index : 20 * index + 20]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    code = tmp_path / "my_env.py"
    code.write_text(GUESS)
    paths = " ".join(f"{tmp_path}/{name}.jsonl" for name in names)
    flags = words(f"--data.path {paths} --data.env single_turn '' {code}:Guess {code}:Agent")
    flags += words("--data.weights 2 1 1 1 --rollout.prompts_per_step 10 --rollout.group_size 2")
    flags += words("--train.steps 4 --checkpoint.every 2 --log.rollouts_every 1 --eval.path ''")
    whole = tmp_path / "whole"
    output = run(whole, *flags, preset="tiny-tools")
    assert f"single_turn and calculator and {code}:Guess and {code}:Agent" in output
    for row in rows_of(whole):
        # Float32 on both sides: a row of routes that is shifted or another sample's leaves 1e-3.
        assert row["mismatch/k3"] < 1e-9
        assert [row[f"source/{name}.jsonl/samples"] for name in names] == [8.0, 4.0, 4.0, 4.0]
    seen: dict[str, list[Any]] = {name: [] for name in names}
    for step in range(1, 5):
        rollouts, _, _ = read_rollouts(whole / f"rollouts/step_{step:06d}.jsonl")
        for each in rollouts:
            seen[each.prompt_id.partition(".")[0]].append(each)
    said = {name: [each.messages for each in of] for name, of in seen.items()}
    assert all([m["role"] for m in each] == ["user", "assistant"] for each in said["plain"])
    assert any(m["role"] == "tool" for each in said["tools"] for m in each)
    assert all(each[0]["content"] == "Which number?" for each in said["guess"])
    assert any(m["content"] == "No." for each in said["guess"] for m in each)
    assert not any(
        "Which" in m["content"] for name in names[:2] for each in said[name] for m in each
    )

    resumed(whole, 4, *flags, preset="tiny-tools")
