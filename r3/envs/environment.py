"""Call the methods of an environment, and check what they return.

Worker processes import this module first, so it imports no settings.
"""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from r3 import extras
from r3.errors import ConfigError, Fault
from r3.metrics.glossary import checked_metrics
from r3.types import Message, Prompt
from r3.user_code.calls import CallError, Step, awaited, flag, number, own_copy
from r3.user_code.loading import START_LIMIT_S, as_named, load, time_limit

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


Shown = tuple[tuple[Any, ...], tuple[str, ...]]
"""Tools and stop strings of an environment or a workflow."""


def shown_by(instance: Any) -> Shown:
    """Return copies of `tools` and `stop`.

    Raises:
        TypeError: one of them is no list.
    """
    shown = {}
    for name in ("tools", "stop"):
        value = getattr(instance, name, ())
        if isinstance(value, str) or not isinstance(value, Sequence):
            kind = type(instance).__name__
            raise TypeError(f"{kind}.{name} is {value!r}, not a list or tuple. Write a list")
        shown[name] = tuple(own_copy(list(value)))
    return shown["tools"], shown["stop"]


def require_same(before: Shown, instance: Any, method: str) -> None:
    """Raise CallError if an instance shows the model something else than its run was told."""
    for name, then, now in zip(("tools", "stop"), before, shown_by(instance), strict=True):
        if now != then:
            others = "a row may have its own (data.tools_key)" if name == "tools" else "or env.stop"
            raise CallError(
                f"{type(instance).__name__}.{method} changed self.{name} to {now!r}, of which the "
                f"model sees nothing. Set it in the class or in __init__; {others}",
                again=False,
            )


@dataclass(frozen=True, slots=True)
class Source:
    """How an environment is created: its class, or in workers the path of a user's, arguments, and
    what it shows the model.
    """

    factory: Callable[..., Environment] | str
    arguments: Mapping[str, Any]
    shown: Shown = ((), ())

    def create(self) -> Environment:
        """Create one."""
        factory = load(self.factory) if isinstance(self.factory, str) else self.factory
        made = cast("Callable[..., Environment]", factory)(**own_copy(self.arguments))
        require_same(self.shown, made, "__init__")
        return made


def announced(factory: Callable[..., Any], arguments: Mapping[str, Any], spec: str) -> Shown:
    """Return what instances of a user's class show the model: `__init__` may set it.

    Raises:
        ConfigError: an instance cannot be created, or shows something unusable.
    """
    from r3.data.conversation import read_tools  # settings, which workers lack

    late = TimeoutError(f"it was not done after {START_LIMIT_S:g} s")
    try:
        with extras.surroundings().restored(spec):
            made = time_limit(lambda: factory(**own_copy(arguments)), START_LIMIT_S, lambda: late)
            tools, stop = shown_by(made)
    except Exception as error:  # a user's class may raise anything
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        name = spec.rpartition(":")[2]
        rule = f"{name}({listed}) raised {type(error).__name__}: {as_named(str(error))}"
        raise ConfigError.of("env.path", spec, rule, "correct the class") from error
    if functions := [tool for tool in tools if callable(tool)]:
        rule = f"tools has the function {functions[0].__name__}, and the model is shown schemas"
        fix = f"transformers.utils.get_json_schema({functions[0].__name__}) makes one of it"
        raise ConfigError.of("env.path", spec, rule, fix)
    try:
        read_tools(tools)
    except Fault as error:
        raise ConfigError.of(
            "env.path", spec, f"tools {error.rule}", "write JSON schemas"
        ) from None
    if not all(isinstance(text, str) and text for text in stop):
        rule = f"stop is {list(stop)!r}, not a list of strings that are not empty"
        raise ConfigError.of("env.path", spec, rule, "write strings, or leave it out")
    return tools, stop


def _checked(method: str, value: Any) -> Any:
    """Check what a method returned. The empty name only creates the environment.

    Raises:
        CallError: it is something else than agreed; without frames, which are R3's own.
    """
    try:
        if method == "reset" and not (messages := checked_messages(value, method)):
            raise TypeError("reset returned no message for the model")
        return messages if method == "reset" else checked_step(value) if method == "step" else None
    except (TypeError, ValueError) as error:
        raise CallError(f"{type(error).__name__}: {error}") from error


def _started(state: Any, method: str, arguments: Sequence[Any]) -> tuple[Environment, Shown, Any]:
    """Return an environment, which may have to be created, and what its method returns."""
    environment = state.create() if isinstance(state, Source) else state
    shown = shown_by(environment)
    value = getattr(environment, method)(*own_copy(arguments)) if method else None
    return environment, shown, value


def call(method: str, state: Any, *arguments: Any) -> tuple[Environment, Any]:
    environment, shown, value = _started(state, method, arguments)
    value = awaited(_settled(value)) if inspect.isawaitable(value) else value
    require_same(shown, environment, method)
    return environment, _checked(method, value)


async def call_async(method: str, state: Any, *arguments: Any) -> tuple[Environment, Any]:
    environment, shown, value = _started(state, method, arguments)
    value = await _settled(value)
    require_same(shown, environment, method)
    return environment, _checked(method, value)


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def call_in_worker(method: str, state: Any, *arguments: Any) -> tuple[bytes, Any]:
    """Call a method of an environment that travels as bytes.

    Only workers open them: the main process needs none of its classes.
    """
    opened = pickle.loads(state) if isinstance(state, bytes) else state
    environment, value = call(method, opened, *arguments)
    return b"" if method == "close" else pickle.dumps(environment), value
