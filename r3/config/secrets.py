"""Refuse keys and passwords in settings: files of the run, trackers and errors show settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from r3.config.fields import Problem

HIDDEN = "[hidden]"
"""What earlier versions wrote into the files of a run in place of a key."""

_NAME = (
    r"[\w.-]*(?:(?:api|access|secret|private|openai|account|subscription)[_-]?key|pass(?:word|wd)s?"
    r"|passphrase|_pass|pwd|secret|credentials?|(?:access|api|auth|hf|private)[_-]?token"
    r"|(?<![\w-])token|(?<=--)token)"
)
# Not $NAME, <NAME>, a path, a number or an empty value.
_VALUE = r"['\"]?(?![$<{\[/~.*]|\d+\b)[^\s'\"]{4}"
_PATTERNS = (  # NAME=VALUE, "NAME": "VALUE", NAME: VALUE; --NAME VALUE; headers
    re.compile(rf"(?i){_NAME}(?:['\"]?=|['\"]\s?:\s?|:\s?(?=\S*\d)){_VALUE}"),
    re.compile(rf"(?i)--{_NAME}\s+{_VALUE}"),
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
