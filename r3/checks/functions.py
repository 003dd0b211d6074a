"""Losses, advantages, environments and rewards: built-in ones, and those of users' files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from r3 import extras
from r3.config import Config, ConfigError, EnvConfig, EvalSet, Problem, RewardConfig, with_values
from r3.config.arguments import ENVIRONMENT, JUDGES
from r3.config.rules import Findings
from r3.user_code.loading import file_fault, functions_of_algorithm, path_fix

BUILTIN_REWARDS = ("gsm8k", "exact", "row", *JUDGES, *ENVIRONMENT)
"""Those of r3.rewards, which imports numpy, and those with a class."""


def load_files(config: Config, problems: list[Problem]) -> list[str]:
    """Load the users' files that settings name, as a run does; they run as far as an import does.

    Args:
        problems: what is wrong with the settings already; gets what is wrong with the files.

    Returns:
        Settings without effect.
    """
    if not config.users_code:
        return []
    from r3.rewards import own_functions  # numpy comes with it

    known = {(problem.place, str(problem.value)) for problem in problems}
    arguments = {"algo.args", "env.args", "reward.args"}.intersection(field for field, _ in known)
    config = with_values(config, dict.fromkeys(arguments, ()))  # they cannot be read
    notes: list[str] = []

    def collect(load: Callable[[], object], fields: dict[str, str] | None = None) -> None:
        """Add what is wrong, under the settings that name the files."""
        try:
            load()
        except ConfigError as error:
            for problem in error.problems:
                spec = str(problem.value)
                renamed = replace(problem, place=(fields or {}).get(spec, problem.place))
                if not known & {(renamed.place, spec), (renamed.place, spec.rpartition(":")[0])}:
                    problems.append(renamed)

    def load_rewards() -> None:
        loaded = own_functions(config.named_rewards, config.reward.args)
        budget = config.rollout.step_token_budget
        for (_, spec), function in loaded.items():
            if budget and function.is_of_group and spec in config.reward.function:
                rule = (
                    "scores all samples of a prompt at once, and rollout.step_token_budget = "
                    f"{budget} suspends some of them"
                )
                fix = "score one response, def f(response, prompt), or set the budget to 0"
                raise ConfigError.of("reward.function", spec, rule, fix)

    if config.trains:
        collect(lambda: functions_of_algorithm(config.algo))
    if config.env.path and not config.env.command:
        collect(lambda: notes.extend(extras.environments().environment_notes(config.env, config)))
    if config.data.env and config.trains:
        extras.mixture().load_environments(config, collect)
    named = {spec: "eval.function" for spec in config.eval.function}
    named |= {spec: "reward.row_functions" for spec in config.reward.row_functions}
    collect(load_rewards, named | {spec: "reward.function" for spec in config.reward.function})
    if not any(field.startswith("eval.") for field, _ in known):
        for eval_set in config.eval.sets:
            if ":" in eval_set.env:
                own = eval_set.environment(config.env)
                collect(
                    partial(extras.environments().environment_notes, own),
                    {eval_set.env: "eval.env"},
                )
    return notes


def check_own_algorithm(config: Config, errors: Findings) -> None:
    """The files of a loss and an advantage are there."""
    for role, spec in config.algo.own_functions.items():
        check_file(spec, f"algo.{role}", errors)


def check_file(spec: str, field: str, errors: Findings) -> None:
    """The file of `file.py:name` is one."""
    path = spec.rpartition(":")[0]
    if fault := file_fault(path):
        errors.add(field, fault, path_fix(path), value=path)


def check_environment_code(config: Config, errors: Findings) -> None:
    """The command or the file of the environment, and those of sources."""
    env = config.env
    if config.data.env or config.data.curriculum:
        extras.mixture().check_sources(config, errors)
    if env.command:
        extras.environments().check_command(config, errors)
    if env.path and not env.command:
        check_environment_file(env.path, "env.path", errors)


def check_environment_name(env: str, field: str, errors: Findings) -> None:
    """A built-in environment, or a class of a file that is there."""
    try:
        EnvConfig().named(env)
    except ValueError as error:
        errors.add(field, "there is no such environment", str(error), value=env)
    if ":" in env:
        check_environment_file(env, field, errors)


def check_environment_file(spec: str, field: str, errors: Findings) -> None:
    """`file.py:Class` of a file that is there."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        errors.add(field, "is not file.py:Class", "write path/to/my_env.py:MyEnv", spec)
    else:
        check_file(spec, field, errors)


def check_rewards(config: Config, errors: Findings, world_size: int) -> None:
    """Check every function of `reward.function`, and what judges need."""
    reward = config.reward
    envs = config.environments if config.trains and errors.sound("data.env") else ()
    for env in dict.fromkeys(envs):
        check_environment_rewards(reward.function, env, errors, "reward.function")
    for function in dict.fromkeys(reward.function):
        check_reward_function(function, errors, "reward.function")
    used = config.reward_functions
    if errors.sound("reward.args") and reward.args and not any(":" in spec for spec in used):
        rule = "is for a function or class of yours, and none is set"
        errors.add("reward.args", rule, "leave it out", value=reward.args[0])
    if "row" in used:
        _check_row_functions(reward, errors)
    if set(JUDGES).intersection(used):
        extras.check_judges(config, errors, world_size)


def _check_row_functions(reward: RewardConfig, errors: Findings) -> None:
    """Functions that rows name, each by a name of its own."""
    names = [spec.rpartition(":")[2] for spec in reward.row_functions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        rule = f"rows cannot tell two functions named {twice[0]} apart"
        errors.add("reward.row_functions", rule, "rename one of them")
    if "self_judge" in reward.row_functions and "self_judge" in reward.function:
        rule = "names self_judge, and so does reward.function: a response would be judged twice"
        errors.add("reward.row_functions", rule, "name it in one of them")
    for spec in reward.row_functions:
        if spec in ("row", "env", "none"):
            rule = "is no function that scores a response"
            errors.add("reward.row_functions", rule, "leave it out", value=spec)
        else:
            check_reward_function(spec, errors, "reward.row_functions")


def check_environment_rewards(
    functions: Sequence[str], env: EnvConfig, errors: Findings, field: str
) -> None:
    """`env` and `none` need an environment that gives rewards."""
    if {"env", "none"}.intersection(functions) and not env.may_reward:
        fix = "use a reward function, or an environment that gives rewards"
        errors.add(field, f"the environment {env.name} gives no reward", fix, value=functions)


def check_gym(
    config: Config, errors: Findings, training: Sequence[str], sets: Sequence[EvalSet]
) -> None:
    """The reward gym scores tasks of reasoning-gym and nothing else."""
    scored = [("reward.function", config.reward.function, training)]
    scored += [("eval.function", each.functions(config.reward), (each.path,)) for each in sets]
    for name, used, paths in scored:
        others = [path for path in paths if not path.startswith("gym:")]
        if "gym" in used and others:
            rule = f"gym scores only tasks of reasoning-gym, and {others[0]} is none"
            fix = "use another function, or paths such as gym:chain_sum"
            errors.add(name, rule, fix, value="gym")


def check_reward_function(reward: str, errors: Findings, name: str) -> None:
    """A built-in function, or `file.py:function` of a file that is there."""
    path, colon, _ = reward.rpartition(":")
    if reward in BUILTIN_REWARDS:
        return
    if colon and path.endswith(".py"):
        check_file(reward, name, errors)
    else:
        fix = f"use one of {', '.join(BUILTIN_REWARDS)}, or path/to/file.py:function"
        rule = "is neither a built-in reward nor file.py:function"
        errors.add(name, rule, fix, value=reward)
