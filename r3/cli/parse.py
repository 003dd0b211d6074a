"""The command line: `train.py BASE [--section.field value ...]`, `--from RUN_DIR`, `--dry-run`.

Flags and their words are found here, since a parser that reads values stops at the first wrong one.
Values are read as in YAML (`r3.config.read_values`), so that everything wrong, from a misspelt flag
to a bad row of the data, is reported at once, before anything is written. Nothing gives way to
anything: settings that contradict each other are an error. Imports neither torch nor vllm nor
megatron.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from r3 import extras
from r3.checks import Report, examine, load_files
from r3.cli.base_config import Base, base_of_run, find_base
from r3.cli.words import Arguments, split_arguments
from r3.config import (
    HIDDEN,
    OF_OBJECTIVE,
    SETTINGS,
    Config,
    ConfigError,
    Problem,
    as_typed,
    flatten,
    overriding,
    read_values,
    with_values,
)
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.data.sources import ReadsRows, read_rows
from r3.models.hub import ShapeError, is_hub
from r3.models.shape import ModelShape
from r3.runtime.limits import too_small
from r3.runtime.process import die_with_launcher, is_leader
from r3.runtime.terminal import own_streams, say

MODELS = ("model.path", "algo.teacher", "reward.model_path")
_LOADED_BY_CHECK = ("reward.model_path",)


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A run to make, checked.

    Attributes:
        config: its settings.
        base: the settings that the flags override.
        differences: the base and how the run differs from it, one line each.
        overrides: the differences as YAML, for overrides.yaml of the run.
        world_size: number of ranks.
        check: read data and reward too, then end; run nothing.
        read: reads rows of data, and remembers those that were checked.
    """

    config: Config
    base: str
    differences: tuple[str, ...]
    overrides: str
    world_size: int
    check: bool = False
    read: ReadsRows | None = None


def parse(argv: Sequence[str]) -> Invocation:
    """The run that a command line asks for, with nothing wrong in it.

    Prints help and dry runs and ends the process with code 0; prints mistakes and ends it with code
    2. Under torchrun only the first rank prints.
    """
    problems: list[Problem] = []
    args = split_arguments(argv, problems)
    dry_run, check = (name in args.switches for name in ("dry_run", "check"))
    asks_help = "help" in args.switches
    has_base = bool(args.bases) or "from" in args.own
    if "columns" in args.topics:
        _leave(0, extras.help_texts().columns())
    if not argv or (asks_help and not has_base and not args.topics):
        _leave(0 if asks_help else 2, extras.help_texts().overview())
    if "models" in args.switches:
        _leave(0, extras.help_texts().models())
    base = _base(args, problems) if has_base or not args.topics else None
    if asks_help and problems:
        fix = f"a preset or file, then sections: {', '.join(extras.help_texts().TOPICS)}"
        _leave(2, str(ConfigError([replace(problem, fix=fix) for problem in problems])))
    if asks_help:
        name, config = (base.name, base.config) if base else ("", Config())
        _leave(0, extras.help_texts().settings(name, config, args.topics))
    values = read_values(args.flags, problems, args.warnings)
    config = laid_over(base, values)
    world_size = _world_size(args, config, problems)
    device_gib, host_gib = None, None
    if {"device_gib", "host_gib"} & {*args.own}:
        device_gib, host_gib = extras.planner().read_sizes(
            args.own, problems, plans=dry_run or check
        )
    if base is None:
        _warn(args.warnings)
        _leave(2, str(ConfigError(problems)))
    given = [*base.notes, *args.warnings]  # about words, whatever comes of them
    if "plan_for" in args.own:
        named, shape = {*args.flags, *base.values}, _known_shape(config)
        needed = functools.partial(_needs, base)
        answer = extras.planner().answer(
            args.own["plan_for"], config, shape, named, problems, needed
        )
        _warn(given)
        _leave(answer[0], f"{base.name}: {answer[1]}" if answer[0] < 2 else answer[1])

    fetched = () if dry_run else _LOADED_BY_CHECK if check else MODELS
    # Before torch is imported, by a file of the user's or by the run, which may end in a crash.
    limits = [] if dry_run else [Problem(*limit) for limit in too_small()]
    loads = not (dry_run or limits)
    report = examined(config, base, args.flags, world_size, problems, fetched=fetched, loads=loads)
    problems += limits
    if not dry_run:
        for problem in filter(_is_download, problems if check else ()):
            _say(f"note: {problem.place} {problem.value}: {problem.rule}. A start downloads them")
        problems = [problem for problem in problems if not _is_download(problem)]
    is_launched = check and "R3_RESUME" in os.environ  # the run that follows says the notes
    plans = dry_run or (check and not is_launched)
    config, note = extras.placed(
        config, problems, plans=plans, is_chosen=folder_is_chosen(base, values), argv=argv
    )
    doubts: list[str] = []
    if report.shape and not problems and (device_gib or host_gib):
        unfit, doubts = extras.planner().unfit(
            config, report.shape, world_size, device_gib, host_gib
        )
        problems += [] if dry_run else unfit
    needs = _needs(base, problems) if dry_run else []
    if len(problems) > len(needs):
        _warn(given)
        _leave(2, str(ConfigError(problems)))
    differences = base.describe(config)
    warnings = [*given, *report.warnings]
    if dry_run:
        assert report.shape is not None, (
            "a model that cannot be read is a problem, and only a need if its shape is known"
        )
        text = extras.dry_run().describe(config, report.shape, world_size, device_gib, differences)
        notes = [*(f"warning: {warning}" for warning in warnings), note]
        _leave(0, extras.dry_run().around(text, base.name, world_size, notes, needs))
    # The run that follows a launcher's check prints the warnings, all but those about --device-gib.
    _warn(doubts if is_launched else [*warnings, *doubts])
    if note and not is_launched:
        _say(note)
    invocation = invocation_of(base, config, differences, world_size, check=check)
    return replace(invocation, read=report.read)


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process without a traceback after Ctrl-C, while nothing has been trained yet.

    A rank also ends with its launcher from here on, before it imports anything that takes seconds.
    """
    die_with_launcher()
    try:
        yield
    except KeyboardInterrupt:
        _say("\ninterrupted before the first step", error=True)
        raise SystemExit(130) from None


def invocation_of(
    base: Base, config: Config, differences: Sequence[str], world_size: int, *, check: bool = False
) -> Invocation:
    return Invocation(
        config=config,
        base=base.name,
        differences=tuple(differences),
        overrides=base.overrides(config),
        world_size=world_size,
        check=check,
    )


def laid_over(base: Base | None, values: Mapping[str, object]) -> Config:
    """The settings of a base with other values, with those that the objective brings, and with a
    folder of the run.
    """
    start = base.config if base else Config()
    config = with_values(start, overriding(start, values))
    named = {*values, *(base.values if base else ())}
    brought = OF_OBJECTIVE[config.train.objective].items()
    config = with_values(config, {name: value for name, value in brought if name not in named})
    if base and not config.log.dir:
        folder = start.log.dir or os.environ.get("R3_LOG_DIR") or base.log_dir
        config = with_values(config, {"log.dir": folder})
    return config


def folder_is_chosen(base: Base, values: Mapping[str, object]) -> bool:
    """Whether a setting or R3_LOG_DIR names the run's folder; otherwise the base's name does."""
    return bool(values.get("log.dir") or base.config.log.dir or os.environ.get("R3_LOG_DIR"))


def examined(
    config: Config,
    base: Base,
    names: Collection[str],
    world_size: int,
    problems: list[Problem],
    *,
    fetched: Collection[str] = (),
    loads: bool,
) -> Report:
    """Add all that is wrong to `problems`, with the flag that ends a contradiction of the base.

    Args:
        names: the settings that the user gave in addition to the base.
        fetched: settings whose models of the hub are downloaded if nothing else is wrong.
        loads: whether users' files are loaded.
    """
    named = {*names, *base.values}
    is_other = base.config.trains and not config.trains
    warned = set(named) - set(base.values) if is_other else named
    read = functools.cache(read_rows)  # data files may be large

    def report_on(candidate: Config) -> Report:
        return examine(candidate, world_size, _known_shape(config), named=warned, read=read)

    report = report_on(config)
    problems_here = list(report.problems)
    if loads:
        report = replace(report, warnings=(*report.warnings, *load_files(config, problems_here)))
    at_fault = {problem.place for problem in problems}  # these fields still have the base's value
    for problem in problems_here:
        name, setting = problem.place, SETTINGS.get(problem.place)
        if name in at_fault:
            continue
        if setting and name not in names:  # else an environment variable
            origin = base.places.get(name, "") if name in named else base.root
            problem = replace(problem, origin=origin)
        if name not in named and setting and flatten(config)[name] != setting.default:
            flag = f"--{name} {as_typed(setting.default) or repr('')}"
            after = report_on(with_values(config, {name: setting.default})).problems
            if flag not in problem.fix and name not in {later.place for later in after}:
                problem = replace(problem, fix=f"{problem.fix}; or add {flag}")
        problems.append(problem)
    fix = "give it again; what your code reads from the environment needs no setting"
    problems += [
        Problem(name, value, f"has {HIDDEN}, which earlier versions wrote in place of a key", fix)
        for name, value in flatten(config).items()
        if HIDDEN in str(value)
    ]
    absent = [problem for problem in problems if _is_download(problem) and problem.place in fetched]
    if absent and all(map(_is_download, problems)):
        problems[:] = _downloaded(absent)
        return examined(config, base, names, world_size, problems, loads=loads)
    return report


def _known_shape(config: Config) -> ModelShape | None:
    """The shape of a model that a preset names, which need not be here for a plan."""
    known = KNOWN_SHAPES.get(config.model.path)
    return ModelShape.from_hf(known) if known else None


def _is_download(problem: Problem) -> bool:
    return problem.is_missing and is_hub(str(problem.value))


def _downloaded(absent: Sequence[Problem]) -> list[Problem]:
    """Download weights of the hub. Returns what went wrong."""
    for problem in absent:
        try:
            extras.downloads().fetch_weights(str(problem.value), say)
        except ShapeError as error:
            return [Problem(problem.place, problem.value, error.rule, error.fix)]
    return []


def _base(args: Arguments, problems: list[Problem]) -> Base | None:
    """The base that the flags override; None if there is none."""
    try:
        if (run_dir := args.own.get("from")) is not None:
            if args.bases:
                rule = "a run's folder and a preset are given"
                fix = f"leave out {' '.join(args.bases)}"
                problems.append(Problem("--from", run_dir, rule, fix))
            return base_of_run(run_dir)
        if not args.bases:
            known = f"one of {', '.join(PRESETS)}, or a .yaml file, or file.py:function"
            for name, value in args.flags.items():
                if isinstance(value, tuple) and value[-1] in PRESETS:
                    known = f"write {value[-1]} in front of --{name}, a list that ends at a flag"
            raise ConfigError.of("PRESET", "", "no preset is named", known)
        first, *more = args.bases
        problems += [
            Problem("PRESET", word, "is neither a flag nor a flag's value", "leave it out")
            for word in more
        ]
        base = find_base(first)
        problems += base.problems
        return base
    except ConfigError as error:
        problems += error.problems
        return None


def _world_size(args: Arguments, config: Config, problems: list[Problem]) -> int:
    """Ranks of the run: torchrun's; without it those asked for, or the fewest the layout takes."""
    plans = "dry_run" in args.switches or "check" in args.switches
    if (asked := args.own.get("world_size")) is not None:
        if plans and asked.isdecimal() and int(asked) > 0:
            return int(asked)
        rule, fix = "must be a positive integer", "such as 8"
        if not plans:
            rule = "is for --dry-run and --check: a run has the ranks that torchrun starts"
            fix = "torchrun --nproc_per_node N train.py ..."
        problems.append(Problem("--world-size", asked, rule, fix))
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    plans = plans or not {"world_size", "device_gib", "host_gib"}.isdisjoint(args.own)  # is meant
    return config.parallel.smallest_world if plans else 1


def _needs(base: Base, problems: list[Problem]) -> list[Problem]:
    """Problems that a download solves: what a preset names and the user has not changed, and files
    that a model's folder lacks in addition to its config.json.
    """
    named = flatten(base.root_config) if base.root in PRESETS else {}
    return [
        problem
        for problem in problems
        if problem.is_missing
        or (
            problem.place in named
            and problem.place in ("model.path", "data.path", "eval.path")
            and problem.value
            in (value if isinstance(value := named[problem.place], tuple) else (value,))
            and not Path(str(problem.value)).exists()
            and (problem.place != "model.path" or problem.value in KNOWN_SHAPES)
        )
    ]


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        _say(f"warning: {warning}", error=True)


def _say(text: str, *, error: bool = False) -> None:
    if is_leader():
        say(text, error=error)


def _leave(code: int, text: str) -> NoReturn:
    _say(text, error=code != 0)
    if code and not is_leader():
        time.sleep(5)  # torchrun kills all ranks when one fails: let the first one print
    raise SystemExit(code)


if __name__ == "__main__":
    own_streams()
    parse(sys.argv[1:])
