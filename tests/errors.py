"""The messages of errors that a test provokes."""

from __future__ import annotations

from collections.abc import Callable

NOTHING = "nothing was raised"


def message_of(action: Callable[[], object], *kinds: type[Exception]) -> str:
    """Return "Class: message" of the error that an action raises, or `NOTHING`."""
    try:
        action()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return NOTHING
