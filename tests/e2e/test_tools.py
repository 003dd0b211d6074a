"""`tiny-tools` as a user runs it: the model calls the calculator unprompted, over several turns,
and learns to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3 import assets
from r3.envs import Calculator, evaluate
from r3.run.folder import read_jsonl
from r3.tools.dumps import read_rollouts
from r3.types import Rollout
from tests.runs import rows_of, run

pytestmark = [pytest.mark.e2e, pytest.mark.large]

STEPS = 6
CALL = re.compile(r"<tool_call>([^<]*)</tool_call><\|im_end\|>\n")
CALL_AND_REPLY = re.compile(
    CALL.pattern + r"<\|im_start\|>user\n<tool_response>([^<]*)</tool_response>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps on two ranks, at a higher learning rate than the preset's, every step's rollouts
    kept.
    """
    folder = tmp_path_factory.mktemp("tools") / "run"
    flags: dict[str, Any] = {
        "train.steps": STEPS,
        "train.lr": 5e-4,
        "log.rollouts_every": 1,
        "eval.every": 0,
    }
    flags["data.path"] = assets.WORD_PROBLEMS_TRAIN
    run(
        folder,
        *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        preset="tiny-tools",
    )
    return folder


def rollouts_of(folder: Path, step: int) -> list[Rollout]:
    return read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl")[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(assets.TINY_MOE_TOOLS)


def test_conversations_call_the_calculator_and_hear_the_right_answer(
    folder: Path, tokenizer: Any
) -> None:
    first = rollouts_of(folder, 1)
    calls = [
        CALL_AND_REPLY.findall(tokenizer.decode(rollout.tokens_T.tolist())) for rollout in first
    ]
    # The model was taught to call in two of five conversations, three or four times.
    assert len(first) == 128 and sum(map(bool, calls)) > 25 and sum(map(len, calls)) > 75
    for expression, reply in (pair for pairs in calls for pair in pairs):
        try:
            assert evaluate(expression) == reply
        except (ValueError, SyntaxError, ZeroDivisionError):
            assert reply == "error"
    rows = rows_of(folder)[1:]
    assert all(row["env/turns_mean"] > 1.5 and row["env/calls"] > 128 * 1.5 for row in rows)
    assert not any(
        row[f"env/{what}"] for row in rows for what in ("errors", "timeouts", "crashes", "dropped")
    )


def test_dumped_messages_are_those_that_the_tokens_hold(folder: Path, tokenizer: Any) -> None:
    dump = folder / "rollouts" / "step_000001.jsonl"
    rows, rollouts = read_jsonl(dump), rollouts_of(folder, 1)
    answers = {row["question"]: row["answer"] for row in read_jsonl(assets.WORD_PROBLEMS_TRAIN)}
    assert len(rows) == len(rollouts) == 128
    for row, rollout in zip(rows, rollouts, strict=True):
        assert row["reference"] == answers[row["question"]]
        first, *others = row["messages"]
        assert first == {"role": "user", "content": row["question"]}
        roles = [message["role"] for message in others]
        assert roles[0] == "assistant" and set(roles) <= {"assistant", "tool"}
        assert row["turn_rewards"] == [None] * roles.count("assistant"), "a function judges the end"
        # The template puts the same messages into the same text, up to where the conversation
        # ended.
        text = tokenizer.apply_chat_template(
            row["messages"], tools=Calculator.tools, tokenize=False
        )
        assert text.startswith(tokenizer.decode(rollout.tokens_T.tolist()))
        assert others[-1]["content"] == row["response"] or row["finish_reason"] != "stop"
    assert sum(len(row["messages"]) > 3 for row in rows) > 25, "conversations with calls"
    for row in read_jsonl(folder / "eval" / f"step_{STEPS:06d}.jsonl"):
        assert row["messages"][0]["content"] == row["question"] and row["reference"]


def test_it_learns_to_call(folder: Path) -> None:
    rows = rows_of(folder)
    assert rows[-1]["eval/heldout/accuracy"] >= rows[0]["eval/heldout/accuracy"] + 0.15
    assert rows[-1]["env/turns_mean"] > rows[1]["env/turns_mean"]
    assert rows[-1]["reward/mean"] > rows[1]["reward/mean"]
