"""Long lines on a terminal: broken between words, so that commands can be copied."""

from __future__ import annotations

import re
import textwrap

# What stands before a value: `data       4096 prompts, ...`; spaces alone are no label.
_LABEL = re.compile(r".{,28}  (?=\S)")
# What a person copies, behind `continue with: ` or a number.
_COMMAND = re.compile(
    r"\s*(?:[^:]*with: |\d+\. )?(?:\w+=\S+ )*(?:--|(?:\S*/)?(?:torchrun|python|local\.sh|sbatch) )"
)


def fitted(text: str, width: int) -> str:
    """Break long lines between words. A path or an address that is longer than a line stays whole.

    Further lines stand below the first one's value. Those of a command begin with a flag, behind a
    backslash, so that it can be copied.
    """
    return "\n".join(
        line if len(line) <= width else _broken(line, width) for line in text.split("\n")
    )


def _broken(line: str, width: int) -> str:
    start = len(line) - len(line.lstrip())
    if is_command := bool(_COMMAND.match(line)):
        if "'" in line or '"' in line:
            return line  # a backslash between quotes would be part of the value
        indent, width = start + 4, width - len(" \\")
        line = re.sub(r"(?<=\S) (?!--)", "\xa0", line)
    elif (label := _LABEL.match(line)) and label[0].strip():
        indent = label.end()
    else:
        indent = start + 2
    lines = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(lines).replace("\xa0", " ") if is_command else "\n".join(lines)
