"""Rewards judge by value, and a failing reward names its sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3 import assets
from r3.config import RewardConfig
from r3.rewards import REWARDS, CallError, checked, exact
from r3.rewards.scorer import make_scorer
from r3.types import Prompt
from tests.settings import found, found_in_files
from tests.tiny import responded

EVAL = str(assets.WORD_PROBLEMS_EVAL)


def prompt(answer: str) -> Prompt:
    return Prompt(id="rows.jsonl:7", messages=(), tokens_T=(1,), answer=answer)


def test_built_ins_give_numbers_and_exact_ignores_outer_white_space_only() -> None:
    for name in REWARDS:
        assert REWARDS[name]("#### 7", prompt("#### 7")) == 1.0
        assert REWARDS[name]("#### 8", prompt("#### 7")) == 0.0
    assert exact(" a b\n", prompt("a b")) == 1.0
    assert exact("ab", prompt("a b")) == 0.0


def test_numbers_pass() -> None:
    for value in (1, 0.25, True, np.float32(0.5), np.int64(2)):
        assert checked(value) == float(value)
        assert type(checked(value)) is float


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (float("nan"), "nan, not a finite number"),
        (float("-inf"), "-inf, not a finite number"),
        ("1", "'1', not a number"),
        (None, "None, not a number"),
        (torch.tensor([1.0]), r"tensor\(\[1\.\]\), not a number"),
    ],
)
def test_what_is_no_finite_number_is_refused(value: Any, rule: str) -> None:
    with pytest.raises(CallError, match=rule):
        checked(value)


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("other = 1", "defines no 'reward'"),
        ("reward = 1", "reward is not a function"),
        ("def reward(response): ...", "`def reward(response, prompt)` or, for all samples of a "),
        ("def reward(prompt, response): ...", "a response first"),
        ("def reward(prompts, completions, **_): ...", "prompts and completions"),
        ("import no_such_module", "mine.py:1 raised ModuleNotFoundError"),
        ("\n\n1 / 0", "mine.py:3 raised ZeroDivisionError"),
        ("def reward(", "raised SyntaxError"),
        ("import sys; sys.exit(0)", "mine.py calls sys.exit(0) while it is imported"),
    ],
)
@pytest.mark.parametrize("field", ["reward.function", "eval.function", "reward.row_functions"])
def test_a_file_that_cannot_be_used_is_refused(
    body: str, rule: str, field: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(body)
    values = {"reward.function": "row", "eval.path": EVAL, field: f"{tmp_path}/mine.py:reward"}
    message = found_in_files(values)[field]
    assert rule in message and "Fix:" in message


def test_faults_of_all_files_are_said_at_once(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("1 / 0")
    other.write_text("def f(inputs): ...\nclass Mine: ...\ndef r(response, prompt, x=0): ...")
    named = {"reward.function": [f"{one}:r", f"{other}:r"], "reward.args": ["y=1"]}
    named |= {"algo.loss": f"{other}:f", "env.path": f"{other}:Mine", "eval.env": f"{one}:Mine"}
    found = found_in_files(named | {"eval.path": EVAL})
    assert found.keys() == {"reward.function", "algo.loss", "env.path", "eval.env"}
    one.write_text("def r(response, prompt): ...")
    assert "r takes none; r_2 takes x" in found_in_files(named)["reward.args"]


NOISY = """
import os, sys, threading
print("imported", sys.argv[1:], os.environ["MINE"])
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.chdir("/")
import torch
calls = []
def reward(response, prompt):
    calls.append(response)
    return len(calls)
"""


def test_the_check_and_the_run_share_one_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file may print, start threads, leave the folder, read words and variables of the start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "1")
    Path("mine.py").write_text(NOISY)
    assert found({"reward.function": "mine.py:reward"}) == {}
    assert "imported" not in capfd.readouterr().out, "settings alone run no code of the user"
    assert found_in_files({"reward.function": "mine.py:reward"}) == {}
    scorer = make_scorer(RewardConfig(function=("mine.py:reward",)))
    assert [scorer(responded(), prompt("")) for _ in range(2)] == [1.0, 2.0]
    scorer.close()
    assert capfd.readouterr().out.count("imported") == 1
    assert Path.cwd() == tmp_path
