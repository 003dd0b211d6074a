"""Tables of cases in text files beside the tests, one case per line."""

import re
from pathlib import Path


def table(name: str) -> list[list[str]]:
    """Return the rows of `tests/unit/NAME.txt`: columns between " | ", no lines that begin with #.

    `<U+2009>` stands for a character.
    """
    lines = (Path(__file__).parent / f"unit/{name}.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("# ")]
    return [re.sub(r"<U\+([0-9A-F]{4})>", _character, line).split(" | ") for line in lines]


def _character(match: re.Match[str]) -> str:
    return chr(int(match[1], 16))
