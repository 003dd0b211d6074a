"""The environment. `r3.envs.find` checks more when it loads the file, before the first step."""

from __future__ import annotations

import ast

from r3.cli.checks.findings import Findings
from r3.cli.checks.sources import parse_file
from r3.config import Config, EnvConfig


def check_environment(config: Config, found: Findings) -> None:
    """One environment, with turns that fit into a response."""
    env = config.env
    longest = config.rollout.max_response_tokens
    if env.max_turn_tokens > longest and found.sound("env.max_turn_tokens"):
        rule = f"exceeds rollout.max_response_tokens = {longest}, the limit of all turns together"
        fix = "set it to 0 for what is left, or allow more response tokens"
        found.add("env.max_turn_tokens", rule, fix)
    if env.path and env.name != EnvConfig().name:
        rule = "is set together with env.path: a conversation has one environment"
        found.add("env.name", rule, "give one of the two")
    if env.path:
        check_environment_file(env.path, "env.path", found)


def check_environment_file(spec: str, field: str, found: Findings) -> None:
    """`file.py:Class` must define a class with `reset(self, prompt)` and `step(self, message)`."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        found.add(field, "is not file.py:Class", "write path/to/my_env.py:MyEnv", spec)
        return
    if (tree := parse_file(path, field, found)) is None:
        return
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        fix = f"it defines {', '.join(classes) or 'none'}; write the class at the top level"
        found.add(field, f"{path} defines no class {name!r}", fix, spec)
        return
    methods = {
        node.name: node
        for node in classes[name].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for method, argument in (("reset", "prompt"), ("step", "message")):
        fix = f"write `def {method}(self, {argument})` in it"
        if method in methods:
            arguments = methods[method].args
            positional = [*arguments.posonlyargs, *arguments.args]
            needed = len(positional) - len(arguments.defaults)
            if needed > 2 or (len(positional) < 2 and arguments.vararg is None):
                rule = f"{name}.{method} does not take self and one argument, the {argument}"
                found.add(field, rule, fix, spec)
        elif not classes[name].bases:
            found.add(field, f"class {name} has no method {method}", fix, spec)
