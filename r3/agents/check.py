"""What `env.command` and workflows cannot go together with."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from r3.config import Config, ConfigError, EnvConfig, Problem
from r3.config.check import Findings


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


def check_command(config: Config, found: Findings) -> None:
    """`env.command` starts, and is the only environment."""
    env = config.env
    for field, is_set in (
        ("env.name", env.name != EnvConfig().name),
        ("env.path", env.path),
        ("env.args", env.args),
    ):
        if is_set:
            rule = "is set together with env.command, which takes the place of the environment"
            found.add(field, rule, "give one of the two")
    if config.rollout.step_token_budget:
        rule = "suspends conversations, and env.command is set: a process cannot be"
        found.add("rollout.step_token_budget", rule, "set it to 0, or write an environment")
    try:
        words = shlex.split(env.command)
    except ValueError as error:
        found.add("env.command", f"is no command line: {error}", "close the quotation")
        return
    if not words or shutil.which(words[0]) is None:
        rule = f"there is no program {words[0] if words else ''!r} in PATH that can be executed"
        found.add("env.command", rule, "give its path, or install it")
    elif Path(words[0]).name.startswith("python") and len(words) > 1:
        if words[1].endswith(".py") and not Path(words[1]).is_file():
            found.add("env.command", f"there is no file {words[1]}", "give the path of the script")
