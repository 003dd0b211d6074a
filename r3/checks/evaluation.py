"""Held-out sets: lists that fit together, and settings under which evaluation means something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from r3.checks.findings import Findings
from r3.checks.functions import (
    check_environment_file,
    check_environment_rewards,
    check_reward_function,
)
from r3.config import EVAL_LISTS, SETTINGS, Config, EvalSet
from r3.models.shape import ModelShape


def check_evaluation(
    config: Config, found: Findings, shape: ModelShape | None
) -> tuple[EvalSet, ...]:
    """Check `eval`; return the held-out sets, or none if their lists do not fit together."""
    settings = config.eval
    count = len(settings.path)
    if not count:
        if settings.only:
            rule = "eval.path is empty, so there is nothing to evaluate"
            found.add("eval.only", rule, "give --eval.path")
        return ()
    _check_lists(found, count)
    if found.sound("eval.name") and len(set(settings.name)) != count:
        rule = f"must name each of the {count} sets differently"
        example = " ".join(f"set{i + 1}" for i in range(count))
        found.add("eval.name", rule, f"add --eval.name {example}")
    if not found.sound(*(f"eval.{name}" for name in EVAL_LISTS), "eval.env_args"):
        return ()
    if any(each.samples > 1 and each.temperature == 0 for each in settings.sets):
        rule = "several samples at eval.temperature 0 are identical"
        found.add("eval.samples", rule, "set it to 1, or use --eval.temperature 1.0")
    most = max(each.samples for each in settings.sets)
    if found.sound("eval.pass_at") and (beyond := [k for k in settings.pass_at if k > most]):
        rule = f"pass@{beyond[0]} needs as many samples, and eval.samples is {most}"
        found.add("eval.pass_at", rule, f"use at most {most}")
    longest = max(each.max_tokens for each in settings.sets)
    if shape and longest >= shape.max_position_embeddings:
        rule = f"does not fit the model's context of {shape.context}"
        found.add("eval.max_tokens", rule, "set it lower, with room for the questions")
    for env in filter(None, dict.fromkeys(settings.env)):
        if ":" in env:
            check_environment_file(env, "eval.env", found)
        elif env not in (names := get_args(SETTINGS["env.name"].kind)):
            fix = f"use one of {', '.join(names)}, or path/to/my_env.py:MyEnv"
            found.add("eval.env", "there is no such environment", fix, value=env)
    if not found.sound("eval.env"):
        return ()
    for function in filter(None, dict.fromkeys(settings.function)):
        check_reward_function(function, found, "eval.function")
    _check_env_args(config, found)
    for each in settings.sets:
        if each.function or each.env:
            functions = (each.function,) if each.function else config.reward.function
            own = each.environment(config.env)
            check_environment_rewards(functions, own, found, "eval.function")
    return settings.sets


def check_best(config: Config, found: Findings, sets: Sequence[EvalSet]) -> None:
    """`checkpoint.keep_best` names a figure of one of the sets, and `train.patience` needs it."""
    metric = config.checkpoint.keep_best
    if config.train.patience and not metric:
        rule = "needs checkpoint.keep_best, which names the metric that must become better"
        found.add("train.patience", rule, "add --checkpoint.keep_best eval/heldout/accuracy")
    if not metric or config.eval.only or not found.sound("checkpoint.keep_best"):
        return
    name, _, figure = metric.removeprefix("eval/").partition("/")
    of_set = {each.name: each for each in sets}.get(name)
    if not config.eval.path:
        rule = "eval.path is empty, so nothing is evaluated"
        found.add("checkpoint.keep_best", rule, "give --eval.path")
    elif of_set is not None:
        counts = config.eval.pass_at or (of_set.samples,)
        figures = ["accuracy", "reward", "unjudged"]
        if of_set.samples > 1:
            figures.append(f"avg_at_{of_set.samples}")
            figures += [f"pass_at_{k}" for k in counts if k <= of_set.samples]
        if figure not in figures and not figure.startswith(("env/", "reward/")):
            fix = f"use {', '.join(figures)}, or env/NAME or reward/NAME of your code"
            found.add("checkpoint.keep_best", f"evaluations have no {figure}", fix)
    elif sets:
        fix = f"use one of {', '.join(each.name for each in sets)}"
        found.add("checkpoint.keep_best", f"{name} is no held-out set", fix)


def _check_lists(found: Findings, count: int) -> None:
    """Every list has one value per set, or one for all sets."""
    for name in EVAL_LISTS:
        values = found.values[f"eval.{name}"]
        may_be = {1, count} | ({0} if SETTINGS[f"eval.{name}"].default == () else set())
        if len(values) not in may_be:
            rule = f"has {len(values)} values for the {count} paths of eval.path"
            found.add(f"eval.{name}", rule, "give one per set, or one for all sets")


def _check_env_args(config: Config, found: Findings) -> None:
    """`eval.env_args` name sets, and those sets have environments of the user."""
    settings = config.eval
    names = [each.name for each in settings.sets]
    for item in settings.env_args:
        name, dot, _ = item.partition("=")[0].rpartition(".")
        if dot and name not in names:
            rule = f"names {name}, which is no held-out set"
            found.add("eval.env_args", rule, f"use one of {', '.join(names)}", value=item)
    for each in settings.sets:
        if each.env_args and not each.environment(config.env).path:
            rule = f"the environment of {each.name} is a built-in one, which takes none"
            fix = "leave it out, or write SET.key=value for a set with a class of yours"
            found.add("eval.env_args", rule, fix, value=each.env_args)
