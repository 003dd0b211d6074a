"""Rewards: `def reward(response: str, prompt: Prompt) -> float`, a built-in by name or a user's own file.

A reward that crashes or returns no number stops the run and names the sample: a silent 0 would train on a lie.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

from r3.config import ConfigError, Problem
from r3.types import Prompt

Reward = Callable[[str, Prompt], float]

# Possessive quantifiers: a number that runs into a letter or a fraction is no number, rather than its first digits.
_FINAL_NUMBER = re.compile(
    r"""[#]{4}[ \t]*
        ( (?: [-+]?\$? | \$[-+] )
          (?: [0-9][0-9,]*+ (?:\.[0-9]++)?+ | \.[0-9]++ ) )
        (?![\w/])""",
    re.VERBOSE,
)

_FINAL_ANSWER = re.compile(
    r"####[ \t]*([^\n]+)|<answer>(.+?)</answer>|\\boxed\{((?:[^{}]|\{[^{}]*\})+)\}", re.DOTALL
)


class RewardError(RuntimeError):
    """A reward failed on one sample; says which."""


def gsm8k(response: str, prompt: Prompt) -> float:
    """1 when the last `#### number` of the response equals the answer's, else 0.

    Numbers are compared by value: `#### 1,234.50`, `#### $1234.5` and `####1234.5` are the same.
    """
    expected = _final_number(prompt.answer)
    if expected is None:
        raise ValueError(f"the reference answer has no '#### number': {prompt.answer[-200:]!r}")
    return float(_final_number(response) == expected)


def exact(response: str, prompt: Prompt) -> float:
    """1 when the response is the answer, white space at both ends aside, else 0."""
    return float(response.strip() == prompt.answer.strip())


def gym(response: str, prompt: Prompt) -> float:
    """The score that reasoning-gym's own scorer of the task gives to the final answer; partial credit is the task's.

    Its scorers judge a bare answer: what stands behind the last `####`, in the last `<answer>` or `\\boxed`, else all of it.
    """
    from reasoning_gym.factory import get_score_answer_fn

    found = _FINAL_ANSWER.findall(response)
    answer = next(filter(None, found[-1])) if found else response
    entry = dict(prompt.metadata["entry"])
    return float(get_score_answer_fn(prompt.metadata["gym"])(answer.strip(), entry))


REWARDS: dict[str, Reward] = {"gsm8k": gsm8k, "exact": exact, "gym": gym}


def resolve(spec: str) -> Reward:
    """The reward that `reward.function` names: a built-in, or `path/to/file.py:function`."""
    if spec in REWARDS:
        return REWARDS[spec]
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        rule = "names no built-in reward and is not path/to/file.py:function"
        raise _problem(spec, rule, f"one of {', '.join(sorted(REWARDS))}, or a file and its function")
    path = Path(file)
    if not path.is_file():
        raise _problem(spec, f"there is no file {file}", "give the path from the folder the run starts in")
    function = getattr(_load(spec, path), name, None)
    if not callable(function):
        defined = "is not a function" if function is not None else "is not defined"
        raise _problem(spec, f"{name} {defined} in {file}", f"write `def {name}(response, prompt)` there")
    if inspect.iscoroutinefunction(function):
        rule = f"{name} is async, rewards are plain functions"
        raise _problem(spec, rule, f"write `def {name}(response, prompt)`")
    try:
        inspect.signature(function).bind("response", "prompt")
    except TypeError as error:
        rule = f"{name} cannot be called as {name}(response, prompt): {error}"
        raise _problem(spec, rule, "mend its parameters") from None
    return function


def score(function: Reward, response: str, prompt: Prompt, member: int) -> float:
    """The reward of one response. Whatever goes wrong names the prompt, the group member and the response."""
    sample = f"prompt {prompt.id}, member {member}, response (first 200 characters): {response[:200]!r}"
    name = getattr(function, "__name__", repr(function))
    try:
        reward: Any = function(response, prompt)
    except Exception as error:  # a user's own code may raise anything; it goes on with its sample
        raise RewardError(f"reward {name} raised {type(error).__name__}: {error}\n  {sample}") from error
    # numpy's numbers are Real too; tensors and strings are not.
    if not isinstance(reward, Real):
        kind = type(reward).__name__
        raise RewardError(f"reward {name} returned {reward!r} ({kind}), not a number\n  {sample}")
    if not math.isfinite(reward):
        raise RewardError(f"reward {name} returned {reward}, not a finite number\n  {sample}")
    return float(reward)


def _final_number(text: str) -> Decimal | None:
    found = _FINAL_NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def _load(spec: str, path: Path) -> object:
    # The full path as the module's name: two files of one name do not meet, and loading twice runs the code once.
    name = str(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is still loading
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # so may importing it
        del sys.modules[name]
        raise _problem(spec, f"{path} raised {type(error).__name__}: {error}", "mend the file") from error
    return module


def _problem(spec: str, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(field="reward.function", value=spec, rule=rule, fix=fix)])
