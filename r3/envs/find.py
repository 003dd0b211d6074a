"""Find the class of an environment, and check the settings beside it."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any, cast

from r3.config import Config, ConfigError, EnvConfig, Problem
from r3.config.rules import Findings
from r3.envs.calculator import Calculator
from r3.envs.environment import Environment
from r3.envs.guess_number import GuessNumber
from r3.user_code.loading import Wanted, load_functions

ENVIRONMENTS: dict[str, type[Environment]] = {"calculator": Calculator, "guess_number": GuessNumber}

# Methods of an environment and of a workflow, and what they are called with.
_METHODS = {"reset": ("prompt",), "step": ("message",)}
_WORKFLOW_METHODS = {"run": ("task", "model")}


def is_workflow(cls: type) -> bool:
    """Whether a class calls the model itself: it has `run`, and neither `reset` nor `step`."""
    return hasattr(cls, "run") and not any(hasattr(cls, method) for method in _METHODS)


def find(settings: EnvConfig) -> type[Any]:
    """Return the class that `env.path`, or else `env.name`, names; load the user's file.

    With `env.command`, the class runs that command or passes episodes to its process.

    Raises:
        ConfigError: the class cannot be loaded, or lacks a method or a parameter.
    """
    if settings.command:
        from r3.envs.command import Command, Resident, stays

        return Resident if stays(settings.command) else Command
    if not settings.path:
        if settings.args:
            rule, fix = f"the built-in environment {settings.name} takes none", "leave them out"
            raise ConfigError.of("env.args", settings.args, rule, fix)
        return ENVIRONMENTS[settings.name]

    def refuse(rule: str, fix: str) -> ConfigError:
        return ConfigError.of("env.path", settings.path, rule, fix)

    name = settings.path.rpartition(":")[2]
    wanted = Wanted(
        field="env.path",
        name=name,
        spec=settings.path,
        passed=(),
        also=" and give the parameters of __init__ defaults",
        is_class=True,
    )
    cls: Any = load_functions([wanted], "env.args", settings.args)[0].function
    workflow = is_workflow(cls)
    for method, parameters in (_WORKFLOW_METHODS if workflow else _METHODS).items():
        function = getattr(cls, method, None)
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
    return cast("type[Any]", cls)


def environment_notes(env: EnvConfig, config: Config | None = None) -> list[str]:
    """Load the class of an environment; return settings without effect beside that of a run.

    Args:
        config: the settings of the run, if it is the environment of the training.

    Raises:
        ConfigError: the class cannot be used, or not with these settings.
    """
    workflow = is_workflow(find(env))
    if config is None:
        return []
    if workflow:
        return check_workflow(config)
    if config.algo.baseline == "prompt":
        return []
    rule = "has no effect: only workflows reward calls, and the environment is none"
    return [f"algo.baseline = {config.algo.baseline!r} {rule}"]


def check_workflow(config: Config) -> list[str]:
    """Return settings without effect for the workflow of `env.path`.

    Raises:
        ConfigError: settings that a workflow cannot have.
    """
    env, problems = config.env, []
    if budget := config.rollout.step_token_budget:
        rule = f"suspends conversations, and {env.path} is a workflow: a coroutine cannot be"
        fix = "set it to 0, or write an environment"
        problems.append(Problem("rollout.step_token_budget", budget, rule, fix))
    if env.workers:
        rule = f"runs environments in processes, and {env.path} is a workflow"
        fix = "set it to 0; await asyncio.to_thread(function) for what computes"
        problems.append(Problem("env.workers", env.workers, rule, fix))
    if problems:
        raise ConfigError(problems)
    if env.keep_reasoning == EnvConfig().keep_reasoning or any(config.eval.env):
        return []
    rule = "has no effect: the environment is a workflow, which builds its own prompts"
    return [f"env.keep_reasoning = {env.keep_reasoning!r} {rule}"]


def check_command(config: Config, errors: Findings) -> None:
    """`env.command` starts, and is the only environment."""
    from r3.envs.command import split

    env = config.env
    try:
        words, place = split(env.command)
    except ValueError as error:
        errors.add("env.command", f"is no command line: {error}", "close the quotation")
        return
    for field, is_set in (
        ("env.name", env.name != EnvConfig().name),
        ("env.path", env.path),
        ("env.args", place < 0 and env.args),
    ):
        if is_set:
            rule = "is set together with env.command, which takes the place of the environment"
            errors.add(field, rule, "give one of the two")
    if config.rollout.step_token_budget:
        rule = "suspends conversations, and env.command is set: a process cannot be"
        errors.add("rollout.step_token_budget", rule, "set it to 0, or write an environment")
    script = words[place].rpartition(":")[0] if place >= 0 else ""
    if not words or shutil.which(words[0]) is None:
        rule = f"there is no program {words[0] if words else ''!r} in PATH that can be executed"
        errors.add("env.command", rule, "give its path, or install it")
    elif Path(words[0]).name.startswith("python") and len(words) > 1:
        script = script or (words[1] if words[1].endswith(".py") else "")
    if script and not Path(script).is_file():
        errors.add("env.command", f"there is no file {script}", "give the path of the script")
