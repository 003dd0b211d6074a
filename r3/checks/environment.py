"""The environment. `r3.envs.find` checks more when it loads the file, before the first step."""

from __future__ import annotations

import ast
import shlex
import shutil
from pathlib import Path

from r3.checks.findings import Findings
from r3.checks.sources import parse_file
from r3.config import Config, EnvConfig

_ENVIRONMENT = {"reset": ("prompt",), "step": ("message",)}


def check_environment(config: Config, found: Findings) -> None:
    """One environment, with turns that fit into a response."""
    env = config.env
    longest = config.rollout.max_response_tokens
    if env.max_turn_tokens > longest and found.sound("env.max_turn_tokens"):
        rule = f"exceeds rollout.max_response_tokens = {longest}, the limit of all turns together"
        fix = "set it to 0 for what is left, or allow more response tokens"
        found.add("env.max_turn_tokens", rule, fix)
    own = env.command or env.path or (env.name if env.name != EnvConfig().name else "")
    if config.data.continue_final_message and own:
        rule = f"continues a message of the row, and {own} decides what messages there are"
        found.add("data.continue_final_message", rule, "leave it out")
    if env.command:
        check_command(config, found)
    if env.path and env.name != EnvConfig().name:
        rule = "is set together with env.path: a conversation has one environment"
        found.add("env.name", rule, "give one of the two")
    if env.path and not env.command and check_environment_file(env.path, "env.path", found):
        if config.rollout.step_token_budget:
            rule = f"suspends conversations, and {env.path} is a workflow: a coroutine cannot be"
            found.add("rollout.step_token_budget", rule, "set it to 0, or write an environment")
        if env.workers:
            rule = f"runs environments in processes, and {env.path} is a workflow"
            fix = "set it to 0; await asyncio.to_thread(function) for what computes"
            found.add("env.workers", rule, fix)


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


def check_environment_file(spec: str, field: str, found: Findings) -> bool:
    """`file.py:Class` must define an environment, `reset(self, prompt)` and `step(self, message)`,
    or a workflow, `async def run(self, task, model)`.

    Returns:
        Whether it is a workflow.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        found.add(field, "is not file.py:Class", "write path/to/my_env.py:MyEnv", spec)
        return False
    if (tree := parse_file(path, field, found)) is None:
        return False
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        fix = f"it defines {', '.join(classes) or 'none'}; write the class at the top level"
        found.add(field, f"{path} defines no class {name!r}", fix, spec)
        return False
    methods = {
        node.name: node
        for node in classes[name].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    is_workflow = "run" in methods and not methods.keys() & {"reset", "step"}
    wanted = {"run": ("task", "model")} if is_workflow else _ENVIRONMENT
    for method, parameters in wanted.items():
        keyword = "async def" if is_workflow else "def"
        fix = f"write `{keyword} {method}(self, {', '.join(parameters)})` in it"
        if method in methods:
            arguments = methods[method].args
            positional = [*arguments.posonlyargs, *arguments.args]
            needed = len(positional) - len(arguments.defaults)
            count = 1 + len(parameters)
            if needed > count or (len(positional) < count and arguments.vararg is None):
                takes = " and ".join(parameters)
                found.add(field, f"{name}.{method} does not take self, {takes}", fix, spec)
            elif is_workflow and not isinstance(methods[method], ast.AsyncFunctionDef):
                found.add(field, f"{name}.{method} is not async", fix, spec)
        elif not classes[name].bases:
            found.add(field, f"class {name} has no method {method}", fix, spec)
    return is_workflow
