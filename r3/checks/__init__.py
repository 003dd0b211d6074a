"""Check a config: report all its problems at once, before any device is used.

Each module reads the settings and, where it must, the checkpoint's config.json and file headers, or
the data files. Nothing is changed. `load_files` loads users' files; a dry run does not. Rules for a
single setting are at its field (r3/config). Prompts are not tokenised here: prompts
that are too long are found when the data set is built. Imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection
from dataclasses import dataclass

from r3 import extras
from r3.checks.data import check_data, check_evaluation
from r3.checks.functions import (
    check_environment_code,
    check_own_algorithm,
    check_rewards,
    load_files,
)
from r3.checks.model_files import check_freeze, check_model
from r3.config import SETTINGS, Config, Problem, key_problems
from r3.config.layout import check_layout, check_lengths
from r3.config.rules import (
    Findings,
    check_algorithm,
    check_batch,
    check_best,
    check_environment,
    check_objective,
    check_reward_terms,
    check_run_folder,
)
from r3.data.sources import ReadsRows, read_rows
from r3.models.shape import ModelShape
from r3.runtime.kernel_switch import switch_notes, switch_problems


@dataclass(frozen=True)
class Report:
    """Problems and warnings of a config. `shape` is None if the model cannot be read."""

    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    shape: ModelShape | None
    read: ReadsRows = read_rows


def problems(config: Config, world_size: int) -> list[Problem]:
    """Everything that keeps this config from running on this many ranks."""
    return list(examine(config, world_size).problems)


def warnings(config: Config, world_size: int) -> list[str]:
    """Settings without effect, and settings that work but are seldom meant."""
    return list(examine(config, world_size).warnings)


def examine(
    config: Config,
    world_size: int,
    known_shape: ModelShape | None = None,
    named: Collection[str] | None = None,
    read: ReadsRows = read_rows,
) -> Report:
    """Problems and warnings, with every file read once.

    Args:
        config: the settings.
        world_size: number of ranks.
        known_shape: shape to check against if there is no folder of a model, for a dry run of a
            model that is not downloaded. The missing folder is a problem all the same.
        named: settings that the user named, as opposed to those of a preset; None: all of them.
            A preset's own settings without effect are not warned of.
        read: reads the rows of data files; one that remembers them serves several configs.
    """
    errors = Findings(config)
    typed = (setting.type_problem(errors.values[name]) for name, setting in SETTINGS.items())
    if wrong := [problem for problem in typed if problem]:  # of a Python program: no rule reads it
        return Report(tuple(wrong), (), None, read)
    shape = check_model(config, errors) or known_shape
    for name, setting in SETTINGS.items():
        if errors.sound(name) and (problem := setting.problem(errors.values[name])):
            errors.problems.append(problem)
    errors.problems += switch_problems() + key_problems(errors.values)
    check_batch(config, errors, world_size)
    check_objective(config, errors)
    check_algorithm(config, errors)
    check_own_algorithm(config, errors)
    check_layout(config, errors, shape, world_size)
    check_lengths(config, errors, shape)
    if config.has_teacher or config.distils:
        extras.teacher_rules().check_teacher(config, errors, shape, world_size)
    check_freeze(config, errors, shape)
    of_adapter = []
    if config.uses_lora or config.quantises_base:
        of_adapter = extras.check_lora(config, errors, shape)
    check_environment_code(config, errors)
    check_environment(config, errors)
    check_reward_terms(config, errors)
    check_rewards(config, errors, world_size)
    sets = check_evaluation(config, errors, shape)
    check_best(config, errors, sets)
    training, heldout = check_data(config, errors, sets, read)
    check_run_folder(config, errors)
    if config.log.tracker != "none" and not _is_installed(config.log.tracker):
        fix = f"{sys.executable} -m pip install {config.log.tracker}"
        errors.add("log.tracker", "this package is not installed", fix)
    notes = switch_notes() + extras.notes_on(config, named, shape, training, heldout) + of_adapter
    return Report(tuple(errors.problems), tuple(dict.fromkeys(notes)), shape, read)


def _is_installed(package: str) -> bool:
    # A folder of that name, such as the one that wandb writes, is a package without an origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
