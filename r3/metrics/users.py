"""Metrics that users' environments and reward functions report: `env/NAME` and `reward/NAME`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from r3.metrics.glossary import GLOSSARY
from r3.metrics.reduce import UsersMean
from r3.user_code.values import number

MOST = 32
"""Most metrics that one call may report: each becomes a curve."""
REFUSED = {cause: f"env/refused_{cause}" for cause in ("length", "turns", "invalid", "hung_up")}
"""Metrics of a workflow's requests that got no message of the model, by cause."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_AREAS = ("env/", "reward/")


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
            found = number(reported)
        except ValueError as error:
            raise ValueError(f"metric {name!r} is {error}") from None
        if (key := f"{area}/{name}") in GLOSSARY:
            raise ValueError(f"metric {name!r}: {key} is a metric of R3. Use another name")
        metrics[key] = found
    return metrics


def is_users(key: str) -> bool:
    """Whether a user's function reports this metric of training."""
    return key.startswith(_AREAS) and key.count("/") == 1 and key not in GLOSSARY


def means(reported: Iterable[Mapping[str, float]]) -> dict[str, UsersMean]:
    """Return the partial of every metric, over the conversations that report it.

    Without `REFUSED`: a conversation has them where they are not 0, and the round counts them.
    """
    values: dict[str, list[float]] = {}
    for metrics in reported:
        for key, value in metrics.items():
            values.setdefault(key, []).append(value)
    for key in REFUSED.values():
        values.pop(key, None)
    return {key: UsersMean(tuple(found)) for key, found in sorted(values.items())}
