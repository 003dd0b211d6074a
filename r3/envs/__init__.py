"""Environments: what happens in a conversation. Yours is one class: `--env.path my_env.py:MyEnv`.

    class MyEnv:
        def reset(self, prompt):        # returns the first messages; the model answers them
            return prompt.messages

        def step(self, message):        # returns (new messages, reward or None, done)
            return [], None, True

        def close(self):                # optional; called once, however the conversation ends
            ...

`step` may return metrics as a fourth value, `return [], 1.0, True, {"tool_calls": 3}`: numbers that
become `env/tool_calls`, averaged over conversations. If several turns report one name, the last
value counts.

R3 creates one instance per conversation. Methods may be `async def`. Rewards of several turns are
added; if the environment gives none, `reward.function` scores the last message. Optional class
attributes are `tools`, JSON schemas for the chat template, and `stop`, strings that end a turn.
With `env.workers` the instance is pickled between calls. Take randomness from `prompt.id`: what is
drawn elsewhere differs from run to run.

A class with a method `run` instead is a workflow, which calls the model itself
(`r3/envs/workflow.py`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from r3.config import ConfigError, EnvConfig
from r3.config.arguments import Taker
from r3.envs.calculator import Calculator
from r3.envs.command import Command
from r3.envs.guess_number import GuessNumber
from r3.envs.single_turn import SingleTurn
from r3.envs.workflow import Workflow
from r3.metrics.users import checked_metrics
from r3.types import Message, Prompt
from r3.user_code.loading import assign, load_for, problem
from r3.user_code.values import flag, number

Observed = (
    tuple[Sequence[Message], float | None, bool]
    | tuple[Sequence[Message], float | None, bool, Mapping[str, float]]
)


class Environment(Protocol):
    """The methods that every environment has."""

    def reset(self, prompt: Prompt) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Return the first messages; the model answers them."""

    def step(self, message: Message) -> Observed | Awaitable[Observed]:
        """Take a message of the model; return new messages, a reward or None, and whether it ends.

        Metrics may follow as a fourth value: numbers by name.

        Args:
            message: `{"role": "assistant", "content": ..., "finish_reason": ..., "tool_calls":
                [{"name": ..., "arguments": {...}}]}`. The finish reason is "stop", or "length" if
                the message was cut. `tool_calls` has those calls that are valid JSON.
        """


ENVIRONMENTS: dict[str, type[Environment]] = {
    "single_turn": SingleTurn,
    "calculator": Calculator,
    "guess_number": GuessNumber,
}


@dataclass(frozen=True, slots=True)
class Step:
    """What `Environment.step` returned, checked."""

    messages: tuple[Message, ...]
    reward: float | None
    done: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


# Methods of an environment and of a workflow, and what they are called with.
_METHODS = {"reset": ("prompt",), "step": ("message",)}
_WORKFLOW_METHODS = {"run": ("task", "model")}


def is_workflow(found: type) -> bool:
    """Whether a class calls the model itself: it has `run`, and neither `reset` nor `step`."""
    return hasattr(found, "run") and not any(hasattr(found, method) for method in _METHODS)


def find(settings: EnvConfig) -> type[Environment] | type[Workflow]:
    """Return the class that `env.path`, or else `env.name`, names; load the user's file.

    `Command` runs the command of `env.command`.

    Raises:
        ConfigError: the class cannot be loaded, or lacks a method or a parameter.
    """
    if settings.command:
        return Command
    if not settings.path:
        if settings.args:
            rule, fix = f"the built-in environment {settings.name} takes none", "leave them out"
            raise problem("env.args", settings.args, rule, fix)
        return ENVIRONMENTS[settings.name]

    def refuse(rule: str, fix: str) -> ConfigError:
        return problem("env.path", settings.path, rule, fix)

    name = settings.path.rpartition(":")[2]
    found: Any = load_for("env.path", settings.path, f"class {name}")
    if not inspect.isclass(found):
        raise refuse(f"{name} is not a class", f"write `class {name}:` with reset and step, or run")
    signature = inspect.signature(found)
    (arguments,) = assign("env.args", settings.args, [Taker(name=name, signature=signature)])
    try:
        signature.bind(**arguments)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise refuse(
            f"{name}({given}) cannot be created: {error}",
            "give the parameters of __init__ defaults, or set them with --env.args key=value",
        ) from None
    workflow = is_workflow(found)
    for method, parameters in (_WORKFLOW_METHODS if workflow else _METHODS).items():
        function = getattr(found, method, None)
        listed = ", ".join(parameters)
        definition = f"{'async ' if workflow else ''}def {method}(self, {listed})"
        if not callable(function):
            raise refuse(f"{name} has no method {method}", f"write `{definition}`")
        try:
            inspect.signature(function).bind("self", *parameters)
        except TypeError as error:
            rule = f"{name}.{method} cannot be called as {method}({listed}): {error}"
            raise refuse(rule, f"write `{definition}`") from None
        if workflow and not inspect.iscoroutinefunction(function):
            raise refuse(f"{name}.{method} is not async", f"write `{definition}`")
    for attribute in ("tools", "stop"):
        if isinstance(value := getattr(found, attribute, ()), str) or not isinstance(
            value, Sequence
        ):
            raise refuse(
                f"{name}.{attribute} is {value!r}, not a list or tuple", "write a list, even of one"
            )
    return cast("type[Environment] | type[Workflow]", found)


def checked_messages(value: Any, method: str) -> tuple[Message, ...]:
    """Check the messages that a user's method returned, and make them plain data.

    Other keys than role and content become JSON values here, where a failure is the environment's.

    Raises:
        TypeError: they are not a list of messages with role and content.
        ValueError: a message contains itself.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{method} must return a list of messages, returned {value!r}")
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise TypeError(
                f"{method} returned {message!r}: a message needs 'role' and 'content', both strings"
            )
    return tuple(
        {
            str(key): part if isinstance(part, str) else json.loads(json.dumps(part, default=str))
            for key, part in message.items()
        }
        for message in value
    )


def checked_step(value: Any) -> Step:
    """Check what a user's `step` returned.

    Raises:
        TypeError: it is not (messages, reward, done) or (messages, reward, done, metrics).
        ValueError: the metrics are not finite numbers by name.
    """
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise TypeError(
            "step must return (messages, reward, done) or (messages, reward, done, metrics), "
            f"returned {value!r}"
        )
    messages, reward, done, *reported = value
    try:
        reward = None if reward is None else number(reward)
    except ValueError as error:
        raise TypeError(
            f"step must return a finite number or None as reward, returned {error}"
        ) from None
    try:
        done = flag(done)
    except ValueError as error:
        raise TypeError(f"step must return True or False as done, returned {error}") from None
    step = Step(
        checked_messages(messages, "step"),
        reward,
        done,
        checked_metrics(reported[0], "env") if reported else {},
    )
    if not step.done and not step.messages:
        raise TypeError("step returned no message for the model although done is false")
    return step
