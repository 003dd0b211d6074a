"""The command line: `train.py PRESET [--section.field value ...]`, `train.py --from RUN_DIR`, `--help`, `--dry-run`.

tyro draws the help from the dataclasses in `config`. Whatever is wrong, from a misspelt flag to a bad row of the
data set, is gathered first and said once, before anything is written. Imports neither torch nor vllm nor megatron.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NoReturn

import tyro

from configs import KNOWN_SHAPES, PRESETS
from r3.cli import dry_run as plan
from r3.cli.checks import examine
from r3.config import (
    SETTINGS,
    Config,
    ConfigError,
    Problem,
    flatten,
    from_yaml,
    nearest_settings,
    parse_value,
    resume_problems,
    with_values,
)
from r3.models.shape import ModelShape

_USAGE = """\
usage: train.py PRESET [--section.field value ...]      run a preset; under torchrun for more than one rank
       train.py --from RUN_DIR [--section.field ...]    go on with a run from its newest checkpoint
       train.py PRESET --dry-run [--world-size N]       print config, rank layout, batch plan, memory; run nothing
       train.py PRESET --check [--world-size N]         read and check settings, data and reward; run nothing
       train.py PRESET --help                           every field with its meaning and default"""
_CHECKPOINT = re.compile(r"step_\d{6,}")  # as r3.run.checkpoint names complete ones


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A run to make, checked. `preset` is "" when the config came from a run's folder.

    `check`: settings are right; the data and the reward are to be read as well, and nothing is to be run.
    """

    config: Config
    preset: str
    world_size: int
    check: bool = False


@dataclass(kw_only=True)
class _Words:
    """The command line taken apart: names are known and every flag has a value, of whatever type."""

    presets: list[str] = field(default_factory=list)
    run_dir: str | None = None
    world_size: str | None = None
    dry_run: bool = False
    check: bool = False
    help: bool = False
    flags: dict[str, str | list[str]] = field(default_factory=dict)


def parse(argv: Sequence[str]) -> Invocation:
    """The run that a command line asks for, with nothing wrong in it.

    Help and dry runs are printed and end the process with code 0, mistakes with code 2; under torchrun the first rank
    speaks for all.
    """
    problems: list[Problem] = []
    words = _read(argv, problems)
    if not argv or (words.help and not words.presets and words.run_dir is None):
        _leave(0 if words.help else 2, _overview())
    preset, base = _base(words, problems)
    if words.help and base:
        _leave_with_fields(preset, base)
    config = _with_flags(base or Config(), words.flags, problems)
    if base and not config.log.dir:
        config = with_values(config, {"log.dir": base.log.dir or f"runs/{preset}"})
    world_size = _world_size(words, config, problems)
    if base is None:
        _leave(2, str(ConfigError(problems)))

    known = KNOWN_SHAPES.get(config.model.path)
    report = examine(
        config, world_size, ModelShape.from_hf(known) if known else None, given=words.flags
    )
    at_fault = {problem.field for problem in problems}  # such a field still has the preset's value
    problems += [problem for problem in report.problems if problem.field not in at_fault]
    problems += _resume_problems(config)
    needs = _needs(preset, problems) if words.dry_run else []
    if len(problems) > len(needs):
        _leave(2, str(ConfigError(problems)))
    if words.dry_run:
        assert report.shape is not None, (
            "a model that cannot be read is a problem, and no need unless its shape is known"
        )
        title = f"{preset or words.run_dir}: dry run on {world_size} rank{'s' if world_size > 1 else ''}"
        text = [
            title,
            plan.describe(config, report.shape, world_size),
            *map(_warning, report.warnings),
        ]
        if needs:
            header = "needs (not here yet; the files in configs/ say where the data of presets come from)"
            text.append("\n".join([header, *(f"  - {need}" for need in needs)]))
        _leave(0, "\n\n".join(text))
    for warning in () if words.check else report.warnings:  # the run that follows a check says them
        _say(_warning(warning), error=True)
    return Invocation(config=config, preset=preset, world_size=world_size, check=words.check)


def _read(argv: Sequence[str], problems: list[Problem]) -> _Words:
    words = _Words()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.presets.append(word)
            continue
        if word in ("-h", "--help"):
            words.help = True
            continue
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name in ("dry_run", "check") and not equals:
            setattr(words, name, True)
            continue
        has_value = bool(equals)
        if not equals and rest and not rest[0].startswith("--"):
            value, has_value = rest.pop(0), True
        if not has_value and name in SETTINGS and SETTINGS[name].kind is bool:
            value, has_value = "True", True  # `--eval.only` alone says what it means
        if name not in SETTINGS and name not in ("from", "world_size"):
            problems.append(Problem(flag, value, "there is no such flag", nearest_settings(name)))
        elif not has_value:
            problems.append(Problem(flag, "", "has no value", f"write {flag} VALUE"))
        elif name == "from":
            words.run_dir = value
        elif name == "world_size":
            words.world_size = value
        elif name in words.flags:
            problems.append(
                Problem(
                    name, value, f"is given twice, {words.flags[name]!r} before", "give it once"
                )
            )
        elif not SETTINGS[name].is_list:
            words.flags[name] = value
        else:
            values = [value]
            while rest and not rest[0].startswith("--") and rest[0] != "-h":
                values.append(rest.pop(0))
            words.flags[name] = values if len(values) > 1 else value
    return words


def _base(words: _Words, problems: list[Problem]) -> tuple[str, Config | None]:
    """The name of the preset, "" for a run's folder, and the config that flags are laid over; None if there is none."""
    if words.run_dir is not None:
        if words.presets:
            rule = "a run's folder and a preset are given"
            problems.append(
                Problem("--from", words.run_dir, rule, f"leave out {' '.join(words.presets)}")
            )
        file = Path(words.run_dir) / "config.yaml"
        try:
            # The folder is the run, wherever it was moved since it wrote its config.
            return "", with_values(
                from_yaml(file.read_text(encoding="utf-8")), {"log.dir": words.run_dir}
            )
        except (OSError, UnicodeDecodeError):
            fix = "give the folder of a run, such as runs/tiny"
            problems.append(
                Problem("--from", words.run_dir, "there is no config.yaml to read", fix)
            )
        except ConfigError as error:
            problems.extend(error.problems)
        return "", None
    known = ", ".join(PRESETS)
    if not words.presets:
        problems.append(Problem("PRESET", "", "no preset is named", f"one of {known}"))
        return "", None
    preset, *more = words.presets
    problems.extend(
        Problem("PRESET", word, "is neither a flag nor a flag's value", "leave it out")
        for word in more
    )
    if preset not in PRESETS:
        problems.append(Problem("PRESET", preset, "there is no such preset", f"one of {known}"))
        return preset, None
    return preset, PRESETS[preset]()


def _with_flags(base: Config, flags: Mapping[str, object], problems: list[Problem]) -> Config:
    """The config with the flags' values. Those of a wrong type are left out and reported, all of them."""
    values = {}
    for name, text in flags.items():
        try:
            values[name] = parse_value(name, text)
        except ValueError as error:
            problems.append(Problem(name, text, str(error), "see --help"))
    return with_values(base, values)


def _world_size(words: _Words, config: Config, problems: list[Problem]) -> int:
    """Ranks of the run: torchrun's, or for a dry run those asked for, or else the fewest that the layout takes."""
    if words.world_size is not None:
        if not (words.dry_run or words.check):
            rule = "is for --dry-run and --check: a run has the ranks that torchrun starts"
            problems.append(
                Problem(
                    "--world-size",
                    words.world_size,
                    rule,
                    "torchrun --nproc_per_node N train.py ...",
                )
            )
        elif words.world_size.isdecimal() and int(words.world_size) > 0:
            return int(words.world_size)
        else:
            problems.append(
                Problem("--world-size", words.world_size, "must be a positive integer", "such as 8")
            )
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return config.parallel.smallest_world if words.dry_run or words.check else 1


def _resume_problems(config: Config) -> list[Problem]:
    """What differs from the run in log.dir and may not, when it has a checkpoint to go on from."""
    folder = Path(config.log.dir)
    if not any(_CHECKPOINT.fullmatch(path.name) for path in folder.glob("checkpoints/step_*")):
        return []
    try:
        return resume_problems(
            from_yaml((folder / "config.yaml").read_text(encoding="utf-8")), config
        )
    except (OSError, UnicodeDecodeError):
        fix = "restore its config.yaml, or give another --log.dir"
        return [
            Problem(
                "log.dir",
                config.log.dir,
                "has checkpoints, but no config.yaml to compare with",
                fix,
            )
        ]
    except ConfigError as error:
        return list(error.problems)


def _needs(preset: str, problems: list[Problem]) -> list[Problem]:
    """Problems that are only a download away: what a preset names, is not here, and the user has not changed."""
    if preset not in PRESETS:
        return []
    named = flatten(PRESETS[preset]())
    return [
        problem
        for problem in problems
        if problem.field in ("model.path", "data.path", "eval.path")
        and problem.value
        in (value if isinstance(value := named[problem.field], tuple) else (value,))
        and not Path(str(problem.value)).exists()
        and (problem.field != "model.path" or problem.value in KNOWN_SHAPES)
    ]


def _overview() -> str:
    """The help that no preset is needed for."""
    presets = [
        f"  {name:20s}{(build.__doc__ or '').splitlines()[0]}" for name, build in PRESETS.items()
    ]
    sections = [
        f"  {section.name:20s}{(section.default_factory.__doc__ or '').splitlines()[0]}"
        for section in fields(Config)
    ]
    return "\n".join([_USAGE, "", "presets", *presets, "", "sections", *sections])


def _leave_with_fields(preset: str, base: Config) -> NoReturn:
    """Help for every field, with the defaults of the preset."""
    tyro.cli(
        Config,
        default=base,
        args=["--help"],
        prog=f"train.py {preset or '--from RUN_DIR'}",
        description=f"{_USAGE}\n\nDefaults below are those of {preset or 'the run'}.",
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
        console_outputs=_is_first_rank(),
    )
    raise SystemExit(0)


def _warning(text: str) -> str:
    return f"warning: {text}"


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(text: str, *, error: bool = False) -> None:
    if _is_first_rank():
        print(text, file=sys.stderr if error else sys.stdout, flush=True)


def _leave(code: int, text: str) -> NoReturn:
    _say(text, error=code != 0)
    if code and not _is_first_rank():
        time.sleep(5)  # torchrun kills all ranks when one fails: let the first one speak
    raise SystemExit(code)


if __name__ == "__main__":
    parse(sys.argv[1:])
