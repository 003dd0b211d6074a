"""Find the class of an environment: a built-in one, or a user's."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

from r3 import extras
from r3.config import ConfigError, EnvConfig
from r3.envs.calculator import Calculator
from r3.envs.calls import Environment
from r3.envs.guess_number import GuessNumber
from r3.types import Message, Prompt
from r3.user_code.loading import Wanted, load_functions, problem


class SingleTurn:
    """The prompt as it is; reward functions score the response."""

    def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Return the prompt's own messages."""
        return prompt.messages

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """End the conversation after the first response."""
        return (), None, True


ENVIRONMENTS: dict[str, type[Environment]] = {
    "single_turn": SingleTurn,
    "calculator": Calculator,
    "guess_number": GuessNumber,
}

# Methods of an environment and of a workflow, and what they are called with.
_METHODS = {"reset": ("prompt",), "step": ("message",)}
_WORKFLOW_METHODS = {"run": ("task", "model")}


def is_workflow(found: type) -> bool:
    """Whether a class calls the model itself: it has `run`, and neither `reset` nor `step`."""
    return hasattr(found, "run") and not any(hasattr(found, method) for method in _METHODS)


def find(settings: EnvConfig) -> type[Any]:
    """Return the class that `env.path`, or else `env.name`, names; load the user's file.

    With `env.command`, the class runs that command.

    Raises:
        ConfigError: the class cannot be loaded, or lacks a method or a parameter.
    """
    if settings.command:
        return extras.command()
    if not settings.path:
        if settings.args:
            rule, fix = f"the built-in environment {settings.name} takes none", "leave them out"
            raise problem("env.args", settings.args, rule, fix)
        return ENVIRONMENTS[settings.name]

    def refuse(rule: str, fix: str) -> ConfigError:
        return problem("env.path", settings.path, rule, fix)

    name = settings.path.rpartition(":")[2]
    wanted = Wanted(
        field="env.path",
        name=name,
        spec=settings.path,
        passed=(),
        also=" and give the parameters of __init__ defaults",
        is_class=True,
    )
    found: Any = load_functions([wanted], "env.args", settings.args)[0].function
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
    return cast("type[Any]", found)
