"""A task is read from several sources and for several held-out sets, each with what is its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from r3 import assets
from r3.config import parse_value, with_values
from r3.data.prompts import prompts_of_step
from r3.rollout.task import read_task
from tests.tiny import random_rollouts, tiny_config

pytestmark = pytest.mark.unit


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Two sources of ten and four rows, drawn one to one; two sets over one file, the second judged exactly."""
    rows = [json.loads(line) for line in assets.WORD_PROBLEMS_TRAIN.read_text().splitlines()[:14]]
    (tmp_path / "ten.jsonl").write_text("\n".join(map(json.dumps, [*rows[:10], rows[0]])))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[10:]), tmp_path / "four.parquet")
    return {
        "data.path": [str(tmp_path / "ten.jsonl"), str(tmp_path / "four.parquet")],
        "data.weights": [1, 1],
        "data.drop_duplicates": True,
        "eval.path": [str(assets.WORD_PROBLEMS_EVAL)] * 2,
        "eval.name": ["short", "long"],
        "eval.max_prompts": [3, 5],
        "eval.max_tokens": [0, 300],
        "eval.function": ["gsm8k", "exact"],
    }


def test_a_task_of_several_sources_and_sets(settings: dict[str, Any]) -> None:
    config = with_values(
        tiny_config(), {name: parse_value(name, value) for name, value in settings.items()}
    )
    task = read_task(config)
    assert (len(task.prompts), task.prompts.sizes, task.prompts.dropped_duplicates) == (
        14,
        (10, 4),
        1,
    )
    drawn = prompts_of_step(task.prompts, seed=0, step=0, count=8)
    assert sum(prompt.id.startswith("four.parquet:") for prompt in drawn) == 4

    short, long = task.heldout
    assert [(each.settings.name, len(each.prompts)) for each in task.heldout] == [
        ("short", 3),
        ("long", 5),
    ]
    assert task.max_model_len == max(len(prompt.tokens_T) for prompt in long.prompts) + 300
    prompt = short.prompts[0]
    rollout = random_rollouts(task.shape, [9])[0]
    rollout = replace(rollout, response="#### " + prompt.answer.rpartition("####")[2])
    assert (short.scorer(rollout, prompt), long.scorer(rollout, prompt)) == (1.0, 0.0)


def test_evaluation_alone_reads_no_training_data(settings: dict[str, Any]) -> None:
    settings |= {"data.path": "missing.jsonl", "data.weights": [], "eval.only": True}
    config = with_values(
        tiny_config(), {name: parse_value(name, value) for name, value in settings.items()}
    )
    task = read_task(config)
    assert (len(task.prompts), len(task.heldout)) == (0, 2)
