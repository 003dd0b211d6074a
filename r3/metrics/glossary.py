"""Which metrics there are: R3's own, explained in `glossary.txt`, and those that users report.

A key of `glossary.txt` may have a placeholder: SET is a held-out set, SOURCE a source
of rows, COMPONENT a reward function,
NAME a metric of a user's function (`env/NAME`, `reward/NAME`), LAYER a decoder layer, K a number,
DEPTH a range of positions in the conversation.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Literal

MOST = 32
"""Most metrics that one call may report: each becomes a curve."""
_CAUSES = ("length", "turns", "invalid", "hung_up", "aborted")
REFUSED = {cause: f"env/refused_{cause}" for cause in _CAUSES}
"""Metrics of a workflow's requests that got no message of the model, by cause."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_FILLED = {
    "SET": "[A-Za-z0-9_.-]+",
    "SOURCE": "[A-Za-z0-9_.-]+",
    "COMPONENT": r"\w+",
    "NAME": r"[A-Za-z]\w*",
    "LAYER": "[0-9]+",
    "_K": "_[1-9][0-9]*",
    "DEPTH": "(0-1k|1-4k|4-16k|16k_up)",
}


def _read() -> dict[str, str]:
    """Read `glossary.txt`: a key per paragraph, its meaning indented below."""
    text = resources.files("r3.metrics").joinpath("glossary.txt").read_text(encoding="utf-8")
    paragraphs = (paragraph.split() for paragraph in re.split(r"\n(?=\S)", text))
    return {key: " ".join(words) for key, *words in paragraphs}


def _pattern(key: str) -> re.Pattern[str]:
    pattern = re.escape(key)
    for placeholder, filled in _FILLED.items():
        pattern = pattern.replace(placeholder, filled)
    return re.compile(pattern)


GLOSSARY: dict[str, str] = _read()
"""Meaning of each key."""
_PATTERNS = {
    _pattern(key): key for key in GLOSSARY if any(placeholder in key for placeholder in _FILLED)
}


class UnknownMetricError(ValueError):
    """A key that GLOSSARY does not explain."""


def explain(key: str, *, users: bool = True) -> str:
    """The meaning of a key, its placeholders filled in or not.

    Args:
        users: whether the key may be one that users' functions report. Any NAME is.

    Raises:
        UnknownMetricError: there is none.
    """
    if key in GLOSSARY:
        return GLOSSARY[key]
    for pattern, name in _PATTERNS.items():
        if pattern.fullmatch(key) and (users or not name.endswith("/NAME")):
            return GLOSSARY[name]
    near = difflib.get_close_matches(key, GLOSSARY, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "give it a line in r3/metrics/glossary.txt"
    raise UnknownMetricError(f"unknown metric {key!r}: {hint}")


def headlines(keys: Iterable[str]) -> dict[str, str]:
    """The figure of each held-out set: its mean reward where there is one, else its accuracy."""
    figures: dict[str, str] = {}
    for key in sorted(keys):  # accuracy before reward
        section, _, rest = key.partition("/")
        name, _, figure = rest.rpartition("/")
        if section == "eval" and figure in ("accuracy", "reward") and "/" not in name:
            figures[name] = key
    return figures


def checked_metrics(value: Any, area: Literal["env", "reward"]) -> dict[str, float]:
    """Check the metrics that a user's function returned.

    Args:
        area: who reports them.

    Returns:
        The metrics by their full names, `env/NAME` or `reward/NAME`.

    Raises:
        ValueError: they are not a mapping of at most `MOST` names to finite numbers, or a name is
            one of R3's own.
    """
    from r3.user_code.calls import number  # it brings numpy, which help does without

    if not isinstance(value, Mapping):
        raise ValueError(f"metrics must be a dict of numbers by name, returned {value!r}")
    if len(value) > MOST:
        raise ValueError(f"it returned {len(value)} metrics, and {MOST} are the maximum")
    metrics = {}
    for name, reported in value.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"metric {name!r}: a name has letters, digits and '_', begins with a letter and "
                "has at most 64 characters"
            )
        try:
            figure = number(reported)
        except ValueError as error:
            raise ValueError(f"metric {name!r} is {error}") from None
        if (key := f"{area}/{name}") in GLOSSARY:
            raise ValueError(f"metric {name!r}: {key} is a metric of R3. Use another name")
        metrics[key] = figure
    return metrics
