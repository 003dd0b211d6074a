"""Errors that a person can act on: what is wrong, where, and what to do about it.

`Problem` is the class of users' mistakes, and has one way to print them. Code that does not know
which setting, flag or row is at fault raises a `Fault`; its caller adds the place. `ConfigError`
lists every problem of a start at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(unsafe_hash=True)  # not frozen: Python sets the traceback of what is raised
class Problem(ValueError):
    """One mistake of a user.

    Attributes:
        place: full name of the setting, or the flag, or file, line and column of a row.
        value: its value; ... if it is not shown.
        rule: the rule that the value breaks.
        fix: what to do; "" if the rule says so.
        origin: the preset, or file and line, that set the value, if no flag did.
        is_missing: a file is not there yet, which a run needs and a plan does not.
    """

    place: str = ""
    value: object = ...
    rule: str = ""
    fix: str = ""
    origin: str = ""
    is_missing: bool = False

    def __str__(self) -> str:
        value = "" if self.value is ... else f" = {self.value!r}"
        origin = f" (set by {self.origin})" if self.origin else ""
        end = "    " if self.rule.endswith("\n") else ". "  # a rule of several lines
        what = f"{self.rule}{end}Fix: {self.fix}" if self.fix else self.rule
        return f"{self.place}{value}{origin}: {what}" if self.place else what


class Fault(Problem):
    """A rule that is broken, and a fix. The place is in the rule, or the caller adds it."""

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule=rule, fix=fix)


class ConfigError(ValueError):
    """Everything that is wrong with a config, at once."""

    subject = "config"
    shown: int | None = None  # most problems that are printed

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)  # what unpickling gives to __init__

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"{self.subject}: {count} problem{'s' if count != 1 else ''}"]
        lines += [f"  - {problem}" for problem in self.problems[: self.shown]]
        if self.shown and count > self.shown:
            lines.append(f"  ... and {count - self.shown} more")
        return "\n".join(lines)

    @classmethod
    def of(cls, place: str, value: object, rule: str, fix: str) -> ConfigError:
        """The error of one setting or flag."""
        return cls([Problem(place, value, rule, fix)])


class Explained(RuntimeError):
    """Why a run cannot go on. The message says enough: no traceback is shown."""


EXPLAINED = (ConfigError, Explained, Problem)
"""Errors whose message is enough for a person."""
