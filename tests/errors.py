"""The messages of errors that a test provokes, and the terminal that shows them."""

import io
import re
import shutil
from collections.abc import Callable

import pytest

from r3.tools import fitted

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
Caplog = pytest.LogCaptureFixture

NOTHING = "nothing was raised"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def too_wide(text: str) -> list[str]:
    """Lines that a terminal breaks in the middle of a word, but for those with a long path."""
    width = shutil.get_terminal_size().columns  # 80 if there is no terminal
    lines = [line for line in fitted(text, width).split("\n") if len(line) > width]
    return [line for line in lines if not re.search(r"/\S{40}", line)]


def message_of(action: Callable[[], object], *kinds: type[Exception]) -> str:
    """Return "Class: message" of the error that an action raises, or `NOTHING`."""
    try:
        action()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return NOTHING
