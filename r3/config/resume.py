"""Settings of a run that is resumed: what it was started with, and what may not have changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r3.config.reading import from_yaml
from r3.config.settings import SETTINGS, Config, flatten
from r3.errors import ConfigError, Problem

STARTED_FROM = ("model.path", "lora.start")
"""Settings that name what a run starts from."""
ANOTHER_FOLDER = "another --log.dir"
"""What a user gives who starts a new run."""
_SHOWN_CHANGES = 12


def path_from_start(folder: Path, settings: Mapping[str, str], name: str) -> str:
    """A relative path of the settings of a run as it was where the run was started.

    Args:
        settings: of the run. `log.dir`, if it is relative, tells that working folder.
        name: of a setting that names a folder.
    """
    path = settings.get(name, "")
    here, end = Path(os.path.abspath(folder)).parts, Path(settings.get("log.dir", "")).parts
    if path and end and here[-len(end) :] == end:
        there = Path(*here[: -len(end)]) / path
        return str(there) if there.exists() else path
    return path


def require_same_settings(folder: Path, config: Config, step: int) -> None:
    """Raise ConfigError if settings changed that may not, or the run would end before `step`, that
    of its newest checkpoint: its result would be another step's.
    """
    problems, steps = [], config.train.steps
    if steps < step and config.trains:
        rule = f"the newest checkpoint is of step {step}, so the run would end with its weights"
        fix = (
            f"set at least {step}; an earlier checkpoint that is kept becomes a model folder with: "
            f"python -m r3.export {folder} --step {steps}"
        )
        problems.append(Problem("train.steps", steps, rule, fix))
    if (folder / "config.yaml").exists() and (changes := changes_of_run(folder, config)):
        problems.append(other_run(folder, changes))
    if problems:
        raise ConfigError(problems)


def changes_of_run(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those of the run in a folder although a resumed run may not change
    them: name -> (value, the run's value).

    Raises:
        ConfigError: the settings of that run cannot be read.
    """
    try:
        before = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        rule = "has checkpoints, but no config.yaml to compare with"
        fix = "restore its config.yaml, or give another --log.dir"
        raise ConfigError.of("log.dir", str(folder), rule, fix) from None
    return fixed_changes(before, config)


def fixed_changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that differ although a run may not change them: name -> (value, the run's value).

    Args:
        old: the config the run was started with.
        new: the config it is to be resumed with.
    """
    before, now = flatten(old), flatten(new)
    return {
        name: (now[name], before[name])
        for name, setting in SETTINGS.items()
        if now[name] != before[name] and not setting.may_change(old)
    }


def folder_error(folder: object, rule: str, fix: str) -> ConfigError:
    """The error of a folder that a run cannot use."""
    return ConfigError.of("log.dir", str(folder), rule, fix)


def other_run(folder: object, changes: Mapping[str, tuple[Any, Any]], fix: str = "") -> Problem:
    """A folder that has another run: what differs, one line each, and what to do."""
    lines = [
        f"      {name} = {now!r} (that run: {before!r})\n"
        for name, (now, before) in list(changes.items())[:_SHOWN_CHANGES]
    ]
    if len(changes) > _SHOWN_CHANGES:
        lines.append(f"      and {len(changes) - _SHOWN_CHANGES} more\n")
    rule = "has a run with other settings, which may not change on resume:\n"
    fix = fix or f"set them back to continue that run, or start a new one with {ANOTHER_FOLDER}"
    return Problem("log.dir", str(folder), rule + "".join(lines), fix)
