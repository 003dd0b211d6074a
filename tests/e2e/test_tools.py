"""`tiny-tools` as a user runs it: the model calls the calculator unprompted, over several turns,
and learns to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3 import assets, show, watch
from r3.envs import Calculator, evaluate
from r3.report import main as report
from r3.run import read_jsonl
from r3.tools import read_rollouts
from r3.types import Rollout
from tests.runs import require_replayed, rows_of, run, words
from tests.tiny import tokenizer_with

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
    flags = words(f"--train.steps {STEPS} --train.lr 5e-4 --log.rollouts_every 1 --eval.every 0")
    run(folder, *flags, "--data.path", str(assets.WORD_PROBLEMS_TRAIN), preset="tiny-tools")
    return folder


def rollouts_of(folder: Path, step: int) -> list[Rollout]:
    return read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl")[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(folder=assets.TINY_MOE_TOOLS)


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


def test_the_run_can_be_looked_into(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show.main([str(folder), "--step", "1", "--best", "2", "--worst", "0", "--width", "200"])
    out = capsys.readouterr().out
    assert "step 1  train: 128 samples" in out and out.count("reference\n") == 2
    show.main([str(folder), "--eval", "--best", "1", "--width", "200"])
    assert f"step {STEPS}  heldout: 256 samples" in capsys.readouterr().out
    watch.main([str(folder), "--once"])
    assert f"step {STEPS}/{STEPS}" in capsys.readouterr().out
    report([str(folder), "-o", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "word_problems_train.jsonl" in page and "tool_call>" in page


def test_what_the_tool_said_has_routes_and_no_loss(folder: Path, tokenizer: Any) -> None:
    opening, closing = tokenizer.convert_tokens_to_ids(["<tool_response>", "</tool_response>"])
    observed = 0
    for step in range(1, STEPS + 1):
        for rollout in rollouts_of(folder, step):
            assert rollout.routed_experts.shape == (len(rollout.tokens_T) - 1, 4, 2)
            assert rollout.routed_experts.min() >= 0 and rollout.routed_experts.max() < 8
            starts, ends = (
                np.flatnonzero(rollout.tokens_T == token) for token in (opening, closing)
            )
            sampled = rollout.loss_mask_T == 1
            told = [(a, b) for a, b in zip(starts, ends, strict=False) if not sampled[a]]
            for a, b in told:
                assert not sampled[
                    a - 3 : b + 6
                ].any()  # from `<|im_start|>user` to `<|im_start|>assistant`
            observed += len(told)
            assert (rollout.logprobs_T[~sampled] == 0).all() and (
                rollout.logprobs_T[sampled] < 0
            ).any()
    assert observed > 300


def test_every_row_of_every_turn_is_accounted_for_and_replayed(folder: Path) -> None:
    for row in rows_of(folder)[1:]:
        tokens = [len(rollout.tokens_T) for rollout in rollouts_of(folder, int(row["step"]))]
        require_replayed(row)
        assert row["routing/rows_expected"] == sum(tokens) - len(tokens)
        assert row["routing/rows_live"] == row["routing/rows_last_token"] == len(tokens)
        assert row["routing/overlap_differs"] == 0.0


def test_engine_and_policy_agree_on_several_turns(folder: Path) -> None:
    for row in rows_of(folder)[1:]:
        # float32 on both sides leaves some 1e-13, a shift by one token 1e-2 and more.
        assert row["mismatch/k3"] <= 1e-9
        assert row["mismatch/abs_max"] <= 1e-4
        assert row["routing/agreement"] > 0.999
        assert np.isfinite(row["optim/grad_norm"])


def test_it_learns_to_call(folder: Path) -> None:
    rows = rows_of(folder)
    assert rows[-1]["eval/heldout/accuracy"] >= rows[0]["eval/heldout/accuracy"] + 0.15
    assert rows[-1]["env/turns_mean"] > rows[1]["env/turns_mean"]
    assert rows[-1]["reward/mean"] > rows[1]["reward/mean"]
