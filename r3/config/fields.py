"""How a setting is declared, and what is wrong with one.

    steps: int = setting(100, ge=1, resume=True, fix="...")

The type of a field says what its values are, `setting` which of them are legal, how to fix
others, and whether a resumed run may change them. All that checks, resumes, help and pages know of
a setting comes from there. A rule on a list holds for each of its values. Every number must be
finite without saying so. Choices are a `Literal`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from r3.config.arguments import arguments_fault
from r3.errors import Problem

# vLLM takes lower temperatures for 0.01, which the policy would not know, and refuses higher ones.
TEMPERATURES = {"ge": 0.01, "le": 2.0}
TYPES = {
    str: ((str,), "text"),
    int: ((int,), "an integer"),
    float: ((float, int), "a number"),
    bool: ((bool,), "True or False"),
}
"""The types of values, those that Python gives for them, and what they are called."""
ALWAYS = " "  # it needs nothing of what its section needs
# 11 days: clocks, sockets and collectives take no number of seconds.
LONGEST_S = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, as its field declares it.

    Attributes:
        name: full name, "section.field".
        kind: its type: str, int, float, bool, a Literal, or a tuple of one of them.
        default: its value in an empty preset.
        ge, gt, le, lt: bounds of a number: at least, above, at most, below.
        zero: 0 is legal beside the bounds: it switches something off.
        pattern, words: what a whole text matches, and the same in words behind "must be".
        why: the reason of the rule.
        fix: what to do when the rule is broken, where the default says too little.
        resume: it does not shape what is learnt, so a resumed run may change it.
        unless: whether it does after all, given the config the run was started with; and in words.
        path: it names files: `~` and variables of the environment are filled in.
        none: the word none has a meaning of its own; for other texts it is the empty text.
        needs: what must hold that it has an effect (`r3.tools.beside.notes`); "" as its section.
        arguments: key=value items, keyword arguments of a user's code (`r3.config.arguments`).
    """

    name: str = ""
    kind: Any = None
    default: Any = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    zero: bool = False
    pattern: str = ""
    words: str = ""
    why: str = ""
    fix: str = ""
    resume: bool = False
    unless: tuple[Callable[[Any], bool], str] | None = None
    path: bool = False
    none: bool = False
    needs: str = ""
    arguments: bool = False

    @property
    def is_list(self) -> bool:
        """Whether it holds any number of values, written `--name a b` and, in YAML, as a list."""
        return get_origin(self.kind) is tuple

    @property
    def one(self) -> Any:
        """The type of its value, or of each value of a list."""
        return get_args(self.kind)[0] if self.is_list else self.kind

    @property
    def type_in_words(self) -> str:
        """Such as text, path, integer, list of number; or the choices."""
        if get_origin(self.one) is Literal:
            return ", ".join(map(str, get_args(self.one)))
        text = "path" if self.path else "text"
        word = {str: text, int: "integer", float: "number", bool: "true or false"}[self.one]
        return f"list of {word}" if self.is_list else word

    @property
    def rule(self) -> str:
        """The rule in words, beginning with "must"; "" without one."""
        low = self.gt if self.ge is None else self.ge
        high = self.lt if self.le is None else self.le
        excluded = " and ".join(str(end) for end in (self.gt, self.lt) if end is not None)
        if low is None:
            words = self.words
        elif high is not None:
            words = f"between {low} and {high}" + (f" ({excluded} excluded)" if excluded else "")
        else:
            words = f"above {low}" if excluded else f"at least {low}"
        rule = f"must be {'0 or ' * self.zero}{words}" if words else ""
        return f"{rule}: {self.why}" if self.why else rule

    def may_change(self, started_with: Any) -> bool:
        """Whether a run that was started with this config may change it when it is resumed."""
        return self.resume and not (self.unless and self.unless[0](started_with))

    def type_problem(self, value: Any) -> Problem | None:
        """What is wrong with the type of a value, which a Python program may give."""
        if self.is_list and not isinstance(value, tuple):
            return Problem(self.name, value, "must be a list (in Python, a tuple)", self.fix)
        choices = get_args(self.one)
        kinds, description = TYPES.get(self.one, ({type(each) for each in choices}, ""))
        for entry in value if self.is_list else (value,):
            if type(entry) not in kinds or (choices and entry not in choices):  # True is no number
                rule = f"must be {description or f'one of {self.type_in_words}'}"
                return Problem(self.name, value, rule, self.fix)
        return None

    def problem(self, value: Any) -> Problem | None:
        """What is wrong with a value of the right type; None if nothing is."""
        values = value if self.is_list else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in values):
            return Problem(self.name, value, "must be a finite number", self.fix)
        if not all(map(self._accepts, values)):
            return Problem(self.name, value, self.rule, self.fix)
        if self.arguments and (fault := arguments_fault(value)):
            return Problem(self.name, *fault)
        return None

    def _accepts(self, value: Any) -> bool:
        if isinstance(value, str):
            return not self.pattern or re.fullmatch(self.pattern, value) is not None
        return (self.zero and value == 0) or (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


def setting(default: Any, **marks: Any) -> Any:
    """The default of a field, and what else is declared of it: attributes of `Setting`."""
    fix = f"correct it; the default is {as_typed(default) or 'empty'}"
    declared = Setting(default=default, **{"fix": fix, **marks})
    return field(default=default, metadata={"setting": declared})


def as_typed(value: Any) -> str:
    """A value as one writes it on the command line; "" for an empty one."""
    if isinstance(value, list | tuple):
        return " ".join(map(as_typed, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def shown(value: Any) -> str:
    """A value as one writes it, from its end if it is long; "empty" for none."""
    text = as_typed(value).removeprefix(os.getcwd() + os.sep)
    return (text if len(text) <= 60 else f"...{text[-57:]}") or "empty"


# ---- keys and passwords, which files of the run, trackers and errors would show

HIDDEN = "[hidden]"
"""What earlier versions wrote into the files of a run in place of a key."""

_NAME = (
    r"(?:(?:api|access|secret|private|openai|account|subscription)[_-]?key|pass(?:word|wd)s?"
    r"|passphrase|_pass|pwd|secret|credentials?|(?:access|api|auth|hf|private)[_-]?token"
    r"|(?<![\w-])token|(?<=--)token)"
)
# Not $NAME, <NAME>, a path, a number or an empty value.
_VALUE = r"['\"]?(?![$<{\[/~.*]|\d+\b)[^\s'\"]{4}"
_PATTERNS = (  # NAME=VALUE, "NAME": "VALUE", NAME: VALUE; --NAME VALUE; headers
    re.compile(rf"(?i){_NAME}(?:['\"]?=|['\"]\s?:\s?|:\s?(?=\S*\d)){_VALUE}"),
    re.compile(rf"(?i)--[\w.-]{{0,40}}{_NAME}\s+{_VALUE}"),
    re.compile(rf"(?i)\b(?:authorization['\"]?\s?[=:]\s?|bearer\s+(?=\S*\d)){_VALUE}"),
    re.compile(r"://[^\s/?#@'\"]*:[^\s/?#@'\"$<{]+@"),  # https://user:password@host
    # The forms of OpenAI, Anthropic, Hugging Face, GitHub, Slack, AWS and Google.
    re.compile(r"\b(?:sk-(?=[\w-]*\d)[\w-]{16,}|hf_[A-Za-z]{20,}|gh[opusr]_[A-Za-z0-9]{20,})"),
    re.compile(r"\b(?:xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,})"),
)


def looks_like_key(text: str) -> bool:
    """Whether a text contains a key or a password. A path that exists contains none."""
    found = any(pattern.search(text) for pattern in _PATTERNS)
    return found and not Path(text.partition(":")[0]).exists()


def key_problems(values: Mapping[str, object]) -> list[Problem]:
    """Settings that contain a key, without showing it."""
    return [
        Problem(
            name,
            f"{text[:2]}... ({len(text)} characters)",
            "looks like a key or a password, which config.yaml, trackers and errors would show",
            "put it into an environment variable that your code or agent reads; "
            "reward.api_key_env names one for the HTTP judge",
        )
        for name, value in values.items()
        for text in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(text, str) and looks_like_key(text)
    ]
