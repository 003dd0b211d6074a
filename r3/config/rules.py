"""Rules written at a setting: which values it accepts, and whether it may change on resume.

    steps: Annotated[int, AtLeast(1), MayChangeOnResume()] = 100

The checks, the resume logic and the generated documentation read them from the annotation. A rule
on a list holds for each of its values. Every float must be finite without saying so. Choices are
a `Literal`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# vLLM takes lower temperatures for 0.01, which the policy would not know, and refuses higher ones.
TEMPERATURES = (0.01, 2.0)
# 11 days: clocks, sockets and collectives take no number of seconds.
LONGEST_S = 1_000_000


@dataclass(frozen=True)
class Rule:
    """Values a setting accepts. `why` follows the rule in an error message."""

    def accepts(self, value: Any) -> bool:
        """Whether one value obeys the rule."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The rule in words, beginning with "must"."""
        raise NotImplementedError


@dataclass(frozen=True)
class AtLeast(Rule):
    """The value is `minimum` or more."""

    minimum: int | float
    why: str = ""

    def accepts(self, value: Any) -> bool:
        return bool(value >= self.minimum)

    def __str__(self) -> str:
        return _with_reason(f"must be at least {self.minimum}", self.why)


@dataclass(frozen=True)
class Above(Rule):
    """The value is greater than `bound`."""

    bound: int | float
    why: str = ""

    def accepts(self, value: Any) -> bool:
        return bool(value > self.bound)

    def __str__(self) -> str:
        return _with_reason(f"must be above {self.bound}", self.why)


@dataclass(frozen=True)
class Between(Rule):
    """The value is in [low, high] and none of `exclude`."""

    low: int | float
    high: int | float
    exclude: tuple[int | float, ...] = ()
    why: str = ""

    def accepts(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high) and value not in self.exclude

    def __str__(self) -> str:
        excluded = f" ({' and '.join(map(str, self.exclude))} excluded)" if self.exclude else ""
        return _with_reason(f"must be between {self.low} and {self.high}{excluded}", self.why)


@dataclass(frozen=True)
class ZeroOr(Rule):
    """The value is 0, which switches something off, or obeys the other rule."""

    other: AtLeast | Above | Between

    def accepts(self, value: Any) -> bool:
        return value == 0 or self.other.accepts(value)

    def __str__(self) -> str:
        return str(self.other).replace("must be", "must be 0 or", 1)


@dataclass(frozen=True)
class Not(Rule):
    """The value differs from `value`."""

    value: object
    why: str = ""

    def accepts(self, value: Any) -> bool:
        return bool(value != self.value)

    def __str__(self) -> str:
        forbidden = "empty" if self.value == "" else self.value
        return _with_reason(f"must not be {forbidden}", self.why)


@dataclass(frozen=True)
class Matches(Rule):
    """The whole text matches `pattern`, which `words` describe."""

    pattern: str
    words: str

    def accepts(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return f"must be {self.words}"


@dataclass(frozen=True)
class KeyValue(Matches):
    """Each value is key=value, a keyword argument of a user's code (`r3.config.arguments`)."""


@dataclass(frozen=True)
class Fix:
    """What to do when the rule is broken, where "use 1 or more" would say too little."""

    text: str


@dataclass(frozen=True)
class IsPath:
    """The text names files: `~`, `$VAR` and `${VAR}` are filled in."""


@dataclass(frozen=True)
class NoneIsAValue:
    """The word none has a meaning of its own; for other texts it is the empty text."""


@dataclass(frozen=True)
class MayChangeOnResume:
    """The setting does not shape what is learnt, so a resumed run may change it.

    Attributes:
        unless: whether the setting is fixed after all, given the config the run was started with.
        exception: the same in words.
    """

    # Called with a `Config`, which this module cannot import: the settings import their rules.
    unless: Callable[[Any], bool] | None = None
    exception: str = ""

    def allows(self, started_with: Any) -> bool:
        """Whether a run that was started with this config may change the setting."""
        return self.unless is None or not self.unless(started_with)


def _with_reason(rule: str, why: str) -> str:
    return f"{rule}: {why}" if why else rule
