"""Rewards judge by value, and a failing reward names its sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3.config import ConfigError
from r3.rewards import REWARDS, checked, exact, resolve
from r3.types import Prompt
from r3.user_code.calls import CallError

pytestmark = pytest.mark.unit


def prompt(answer: str) -> Prompt:
    return Prompt(id="rows.jsonl:7", messages=(), tokens_T=(1,), answer=answer)


def test_exact_ignores_outer_white_space_only() -> None:
    assert exact(" a b\n", prompt("a b")) == 1.0
    assert exact("ab", prompt("a b")) == 0.0


def test_numbers_pass() -> None:
    for value in (1, 0.25, True, np.float32(0.5), np.int64(2)):
        assert checked(value) == float(value)
        assert type(checked(value)) is float


@pytest.mark.parametrize("name", sorted(REWARDS.keys() - {"gym"}))  # it asks more of a row
def test_every_built_in_resolves_and_gives_a_number(name: str) -> None:
    assert resolve(name) is REWARDS[name]
    assert resolve(name)("#### 7", prompt("#### 7")) == 1.0
    assert resolve(name)("#### 8", prompt("#### 7")) == 0.0


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


def test_resolve_loads_a_function_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Weight:\n    value: float = 0.5\n"
        "def length(response, prompt):\n    return Weight().value * len(response)\n"
    )
    assert resolve(f"{file}:length")("abcd", prompt("")) == 2.0
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "mine.py"
    twin.write_text("def length(response, prompt):\n    return -1\n")
    assert resolve(f"{twin}:length")("abcd", prompt("")) == -1.0


@pytest.mark.parametrize(
    ("spec", "body", "rule"),
    [
        ("gsm9k", "", "is neither a built-in reward"),
        ("{folder}/mine.py", "", "is neither a built-in reward"),
        ("{folder}/absent.py:reward", "", "there is no file"),
        ("{folder}/mine.py:reward", "other = 1", "defines no 'reward'"),
        ("{folder}/mine.py:reward", "reward = 1", "reward is not a function"),
        ("{folder}/mine.py:reward", "def reward(response): ...", "cannot be called as"),
        ("{folder}/mine.py:reward", "def reward(prompt, response): ...", "a response first"),
        (
            "{folder}/mine.py:reward",
            "def reward(prompts, completions, **_): ...",
            "prompts and com",
        ),
        ("{folder}/mine.py:reward", "import no_such_module", "raised ModuleNotFoundError"),
        ("{folder}/mine.py:reward", "def reward(", "raised SyntaxError"),
    ],
)
def test_resolve_names_what_is_wrong(spec: str, body: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(ConfigError, match=rule) as caught:
        resolve(spec.format(folder=tmp_path))
    assert "reward.function" in str(caught.value)
    assert "Fix:" in str(caught.value)
