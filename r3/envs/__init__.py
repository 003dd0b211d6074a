"""Environments: what a conversation is. One object a conversation; a user's own is one file, `--env.path my_env.py:MyEnv`.

    class MyEnv:
        def reset(self, prompt):                 # -> the first messages, which the model answers
            return prompt.messages

        def step(self, message):                 # -> new messages, a reward or None, whether the conversation is over
            return [], None, True

Both may be `async def`. A reward of None leaves the judgement to `reward.function`; rewards of several turns are added.
Optional class attributes: `tools`, given to the chat template, and `stop`, strings that end a turn. With `env.workers` the
object travels between processes, so its attributes must be picklable. Randomness comes from `prompt.id`: what is drawn
elsewhere differs from run to run.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, cast

from r3.config import ConfigError, EnvConfig, Problem
from r3.envs.calculator import Calculator
from r3.envs.guess_number import GuessNumber
from r3.envs.single_turn import SingleTurn
from r3.runtime.workers import load
from r3.types import Message, Prompt

Observed = tuple[Sequence[Message], float | None, bool]


class Environment(Protocol):
    """What the loop asks of an environment."""

    def reset(self, prompt: Prompt) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The first messages; the model answers them."""

    def step(self, message: Message) -> Observed | Awaitable[Observed]:
        """Take the model's message: `{"role": "assistant", "content": ..., "finish_reason": "stop" or "length"}`.

        "length" means that it was cut. Returns messages for the model, a reward or None, and whether this was the end.
        """


ENVIRONMENTS: dict[str, type[Environment]] = {
    "single_turn": SingleTurn,
    "calculator": Calculator,
    "guess_number": GuessNumber,
}


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment made of a message, checked."""

    messages: tuple[Message, ...]
    reward: float | None
    done: bool


def find(settings: EnvConfig) -> type[Environment]:
    """The class that `env.path`, or else `env.name`, names. Loads the user's file.

    Raises:
        ConfigError: it cannot be loaded, or cannot be used as it is called.
    """
    if not settings.path:
        return ENVIRONMENTS[settings.name]

    def refuse(rule: str, fix: str) -> ConfigError:
        return ConfigError([Problem("env.path", settings.path, rule, fix)])

    file, _, name = settings.path.rpartition(":")
    if not Path(file).is_file():
        raise refuse(f"there is no file {file}", "give path/to/file.py:Class")
    try:
        found: Any = load(settings.path)
    except Exception as error:  # a user's file may raise anything; the message names it
        raise refuse(f"{file} raised {type(error).__name__}: {error}", "mend the file") from error
    if not inspect.isclass(found):
        raise refuse(f"{name} is not a class", f"write `class {name}:` with reset and step")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise refuse(
            f"{name}() cannot be made without arguments: {error}", "mend __init__"
        ) from None
    for method, argument in (("reset", "prompt"), ("step", "message")):
        function = getattr(found, method, None)
        if not callable(function):
            raise refuse(
                f"{name} has no method {method}", f"write `def {method}(self, {argument})`"
            )
        try:
            inspect.signature(function).bind("self", argument)
        except TypeError as error:
            rule = f"{name}.{method} cannot be called as {method}({argument}): {error}"
            raise refuse(rule, f"write `def {method}(self, {argument})`") from None
    for attribute in ("tools", "stop"):
        if isinstance(value := getattr(found, attribute, ()), str) or not isinstance(
            value, Sequence
        ):
            raise refuse(
                f"{name}.{attribute} is {value!r}, not a list or tuple", "put it in brackets"
            )
    return cast("type[Environment]", found)


def checked_messages(value: Any, method: str) -> tuple[Message, ...]:
    """What a user's method returned, as messages; TypeError says what is wrong with it."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{method} must give a list of messages, gave {value!r}")
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise TypeError(
                f"{method}: {message!r} is no message with 'role' and 'content' that are text"
            )
    return tuple(dict(message) for message in value)


def checked_step(value: Any) -> Step:
    """What a user's `step` returned, checked."""
    if not isinstance(value, tuple) or len(value) != 3:
        raise TypeError(f"step must return (messages, reward, done), returned {value!r}")
    messages, reward, done = value
    # numpy's numbers are Real too; tensors and strings are not.
    if reward is not None and not (isinstance(reward, Real) and isfinite(reward)):
        raise TypeError(f"step must return a finite number or None as reward, returned {reward!r}")
    step = Step(
        checked_messages(messages, "step"), None if reward is None else float(reward), bool(done)
    )
    if not step.done and not step.messages:
        raise TypeError(
            "step returned no message for the model though the conversation is not over"
        )
    return step
