"""Rows of the training data, held-out sets, and settings under which evaluation means something.

Sources that must be downloaded or generated are read when the run starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from r3 import extras
from r3.checks.functions import (
    check_environment_name,
    check_environment_rewards,
    check_gym,
    check_reward_function,
)
from r3.config import EVAL_LISTS, SETTINGS, Config, EvalSet
from r3.config.rules import Findings
from r3.data.rows import Columns, Row, RowProblem, columns_of
from r3.data.sources import FILES, ReadsRows, read_rows
from r3.models.shape import ModelShape

_SHOWN_ROWS = 5  # of a data file with bad rows; the others are counted


def check_data(
    config: Config, errors: Findings, sets: Sequence[EvalSet], read: ReadsRows = read_rows
) -> tuple[list[Row], list[Row]]:
    """Check all rows that can be read at once, by `read`.

    Returns:
        Rows of training and rows of the held-out sets.
    """
    data, columns = config.data, columns_of(config)
    training = data.path if config.trains else ()
    if not data.path and config.trains:
        errors.add("data.path", "is empty", FILES, value="")
    if data.weights and len(data.weights) != len(data.path):
        rule = f"has {len(data.weights)} values for the {len(data.path)} paths of data.path"
        fix = "give one per path, or none: rows of all paths then form one pool"
        errors.add("data.weights", rule, fix)
    envs = config.environments if errors.sound("data.env") else (config.env,) * len(training)
    of_path = [columns_of(replace(config, env=env)) for env in envs]
    train = [
        row
        for path, how in dict.fromkeys(zip(training, of_path, strict=False))
        for row in _check_rows(path, how, errors, "data.path", read)
    ]
    # Sets may differ in sampling alone: a path is read once for each way of scoring it.
    held_out = dict.fromkeys((eval_set.path, columns_of(config, eval_set)) for eval_set in sets)
    if not sets:  # their lists do not fit together; problems of the files are reported all the same
        held_out = dict.fromkeys((path, columns) for path in config.eval.path)
    heldout = [
        row for path, how in held_out for row in _check_rows(path, how, errors, "eval.path", read)
    ]
    needed = config.rollout.prompts_per_step
    if (
        training
        and errors.sound("data.path", "rollout.prompts_per_step")
        and all(map(extras.sources().is_near, training))
        and len(train) < needed
    ):
        rule = f"has {len(train)} rows, and a step takes {needed} different prompts"
        errors.add("data.path", rule, "give more rows, or lower rollout.prompts_per_step")
    check_gym(config, errors, training, sets)
    return train, heldout


def _check_rows(
    path: str, columns: Columns, errors: Findings, name: str, read: ReadsRows
) -> list[Row]:
    if not extras.sources().is_near(path):
        return []
    rows, bad = read(path, columns)
    common = _faults_of_every_row(bad) if not rows else []
    for problem, count in common:
        # One wrong setting, such as the name of a column, not thousands of wrong rows.
        errors.add(
            name,
            f"{problem.rule}; so it is in all {count} rows",
            problem.fix,
            value=f"{path}:{problem.column}",
        )
        bad = [row for row in bad if (row.column, row.rule) != (problem.column, problem.rule)]
    for problem in bad[:_SHOWN_ROWS]:
        errors.add(name, problem.rule, problem.fix, value=problem.where)
    if len(bad) > _SHOWN_ROWS:
        rest = f"{len(bad) - _SHOWN_ROWS} more faults, {len(bad)} in all"
        errors.add(name, rest, "correct these rows as well", value=path)
    if not rows and not bad and not common:
        fix = "give a file with rows; for eval.path, '' disables evaluation"
        errors.add(name, "has no rows", fix, value=path)
    return rows


def _faults_of_every_row(bad: Sequence[RowProblem]) -> list[tuple[RowProblem, int]]:
    """Faults that all of several rows have, with the number of rows; `bad` is of rows that fail."""
    lines = len({problem.line for problem in bad})
    counts = Counter((problem.column, problem.rule) for problem in bad)
    first = {(problem.column, problem.rule): problem for problem in reversed(bad)}
    return [(first[fault], lines) for fault, count in counts.items() if count == lines > 1]


def check_evaluation(
    config: Config, errors: Findings, shape: ModelShape | None
) -> tuple[EvalSet, ...]:
    """Check `eval`; return the held-out sets, or none if their lists do not fit together."""
    settings = config.eval
    count = len(settings.path)
    if not count:
        if settings.only:
            rule = "eval.path is empty, so there is nothing to evaluate"
            errors.add("eval.only", rule, "give --eval.path")
        return ()
    _check_lists(errors, count)
    if errors.sound("eval.name") and len(set(settings.name)) != count:
        rule = f"must name each of the {count} sets differently"
        example = " ".join(f"set{i + 1}" for i in range(count))
        errors.add("eval.name", rule, f"add --eval.name {example}")
    if not errors.sound(*(f"eval.{name}" for name in EVAL_LISTS), "eval.env_args"):
        return ()
    if any(eval_set.samples > 1 and eval_set.temperature == 0 for eval_set in settings.sets):
        rule = "several samples at eval.temperature 0 are identical"
        errors.add("eval.samples", rule, "set it to 1, or use --eval.temperature 1.0")
    most = max(eval_set.samples for eval_set in settings.sets)
    if errors.sound("eval.pass_at") and (beyond := [k for k in settings.pass_at if k > most]):
        rule = f"pass@{beyond[0]} needs as many samples, and eval.samples is {most}"
        errors.add("eval.pass_at", rule, f"use at most {most}")
    longest = max(eval_set.max_tokens for eval_set in settings.sets)
    if shape and longest >= shape.max_position_embeddings:
        rule = f"does not fit the model's context of {shape.context}"
        errors.add("eval.max_tokens", rule, "set it lower, with room for the questions")
    for env in filter(None, dict.fromkeys(settings.env)):
        check_environment_name(env, "eval.env", errors)
    if not errors.sound("eval.env"):
        return ()
    for function in filter(None, dict.fromkeys(settings.function)):
        check_reward_function(function, errors, "eval.function")
    _check_env_args(config, errors)
    for eval_set in settings.sets:
        if eval_set.function or eval_set.env:
            functions, own = eval_set.functions(config.reward), eval_set.environment(config.env)
            check_environment_rewards(functions, own, errors, "eval.function")
    return settings.sets


def _check_lists(errors: Findings, count: int) -> None:
    """Every list has one value per set, or one for all sets."""
    for name in EVAL_LISTS:
        values = errors.values[f"eval.{name}"]
        may_be = {1, count} | ({0} if SETTINGS[f"eval.{name}"].default == () else set())
        if len(values) not in may_be:
            rule = f"has {len(values)} values for the {count} paths of eval.path"
            errors.add(f"eval.{name}", rule, "give one per set, or one for all sets")


def _check_env_args(config: Config, errors: Findings) -> None:
    """`eval.env_args` name sets, and those sets have environments of the user."""
    settings = config.eval
    names = [eval_set.name for eval_set in settings.sets]
    for item in settings.env_args:
        name, dot, _ = item.partition("=")[0].rpartition(".")
        if dot and name not in names:
            rule = f"names {name}, which is no held-out set"
            errors.add("eval.env_args", rule, f"use one of {', '.join(names)}", value=item)
    for eval_set in settings.sets:
        if eval_set.env_args and not eval_set.environment(config.env).path:
            rule = f"the environment of {eval_set.name} is a built-in one, which takes none"
            fix = "leave it out, or write SET.key=value for a set with a class of yours"
            errors.add("eval.env_args", rule, fix, value=eval_set.env_args)
