"""The arguments of a command line: flags of train.py, settings, and the base.

They are found here, since a parser that reads values stops at the first wrong one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from r3 import extras
from r3.config import SETTINGS, Problem, as_typed, nearest_settings
from r3.configs import PRESETS

SWITCHES = ("dry_run", "check", "help", "models")
_OF_ONE_WORD = ("from", "world_size", "device_gib", "host_gib", "plan_for")


@dataclass(kw_only=True)
class Arguments:
    """The command line taken apart. Values are words, of whatever type."""

    bases: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)  # flags of train.py itself, with one word
    switches: set[str] = field(default_factory=set)
    topics: list[str] = field(default_factory=list)
    flags: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def split_arguments(argv: Sequence[str], problems: list[Problem]) -> Arguments:
    """The words of every flag: all up to the next one. A value behind `=` may begin with a dash."""
    args = Arguments()
    times: Counter[str] = Counter()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            args.bases.append(word)
            continue
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
        while rest and not _is_flag(rest[0]):
            values.append(rest.pop(0))
        name = "help" if flag == "-h" else flag.removeprefix("--").replace("-", "_")
        setting = SETTINGS.get(name)
        times[name] += 1
        if setting is None and (name not in (*SWITCHES, *_OF_ONE_WORD) or flag == name):
            value = values.pop(0) if values and (equals or values[0] not in PRESETS) else ""
            fix = nearest_settings(name)
            if not flag.startswith("--"):
                fix = "write --section.field=VALUE where a value begins with -"
            problems.append(Problem(flag, value, "there is no such flag", fix))
            args.bases += values
        elif name in SWITCHES:
            args.switches.add(name)
            for value in values:
                is_topic = name == "help" and value in extras.help_texts().TOPICS
                (args.topics if is_topic else args.bases).append(value)
        elif setting and setting.is_list and values:
            args.flags[name] = tuple(values) if len(values) > 1 else values[0]
        elif not values and not (setting and setting.kind is bool):
            empty = f", or {flag} '' for an empty list" if setting and setting.is_list else ""
            problems.append(Problem(flag, "", "has no value", f"write {flag} VALUE{empty}"))
        else:  # a switch alone means true
            first, *others = values or ("True",)
            args.bases += others
            (args.flags if setting else args.own)[name] = first
    args.warnings += [
        f"--{name} is given {times[name]} times: the last value counts, {as_typed(value)}"
        for name, value in args.flags.items()
        if times[name] > 1
    ]
    return args


def _is_flag(word: str) -> bool:
    """Whether a word begins with a dash and is no negative number."""
    return re.fullmatch(r"-(?![\d.]|inf\b|nan\b).+", word, re.DOTALL) is not None
