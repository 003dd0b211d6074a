"""The folder of a start: that of a run which these settings continue, or the next free one."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from r3.config import Config, ConfigError, Problem, changes_of_run, other_run, with_values
from r3.run.folder import step_folders
from r3.runtime.process import start_command


def placed(
    config: Config,
    problems: list[Problem],
    *,
    is_chosen: bool,
    argv: Sequence[str] | None = None,
    plans: bool = False,
) -> tuple[Config, str]:
    """Compare with the run that the folder has, if it can be resumed.

    A run with other settings is a problem, or else the config gets the next folder that is free or
    has a run which these settings continue.

    Args:
        problems: what else is wrong. A setting that is wrong by itself is not compared.
        is_chosen: the user named the folder.
        argv: the words of the command line; None in a Python program.
        plans: nothing is to start, so that another run is a note.

    Returns:
        The config, and a note or "".
    """
    at_fault = {problem.place for problem in problems}
    if "log.dir" in at_fault:
        return config, ""
    try:
        changes = _changes(config, at_fault)
        if not changes:
            return config, ""
    except ConfigError as error:
        problems += error.problems
        return config, ""
    folder = config.log.dir
    numbered = (with_values(config, {"log.dir": f"{folder}-{n}"}) for n in itertools.count(2))
    other = next(folder for folder in numbered if _is_free(folder, at_fault))
    # An evaluation is of the checkpoint in its folder, and allow_changed is for a resume.
    stays = is_chosen or not config.trains or bool(config.checkpoint.allow_changed)
    if stays and not plans:
        fix = (
            "set them back to continue that run, or start a new one:\n"
            f"      {_again(argv, other.log.dir)}\n    {_first_weights(config)}"
        )
        problems.append(other_run(folder, changes, fix))
        return config, ""
    end = f"This one: {other.log.dir}. {_first_weights(config)}"
    if stays:
        end = f"A start there is refused. Free: --log.dir {other.log.dir}"
    return other, f"note: {folder} {other_run(folder, changes).rule}  {end}"


def _first_weights(config: Config) -> str:
    """What a new run starts from, beside one in its folder that a user may mean to go on with."""
    folder = Path(config.log.dir)
    export = folder / "hf" / step_folders(folder / "checkpoints")[-1][1].name
    made = "" if export.exists() else f" (python -m r3.export {folder} writes it)"
    merged = " --lora.start ''" if config.lora.start else ""  # the export has that adapter already
    return (
        f"It starts from the weights of {config.model.path}. To start from those of {folder}, add "
        f"--model.path {export}{merged}{made}"
    )


def _is_free(config: Config, at_fault: Collection[str]) -> bool:
    try:
        return not _changes(config, at_fault)
    except ConfigError:
        return False


def _changes(config: Config, at_fault: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those of the run to resume in log.dir, although they must not.

    Raises:
        ConfigError: the settings of that run cannot be read.
    """
    folder = Path(config.log.dir)
    changes = changes_of_run(folder, config) if step_folders(folder / "checkpoints") else {}
    return {name: change for name, change in changes.items() if name not in at_fault}


def _again(argv: Sequence[str] | None, folder: str) -> str:
    """How to start in another folder: the command, without what a launcher's check adds."""
    if argv is None:
        return f"the same call with log.dir {folder}"
    others = ("--log.dir", "--world-size")
    kept = [
        word
        for before, word in zip(("", *argv), argv, strict=False)
        if before not in others and word.partition("=")[0] not in (*others, "--check")
    ]
    return start_command(shlex.join([*kept, "--log.dir", folder]))
