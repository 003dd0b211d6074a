"""The output streams of R3. A closed or full stream never ends a run.

A reader may leave (`| head`, a closed terminal), the disk of a log file may be full, the streams
may be closed from the start, and users' code may replace `sys.stdout` in several threads.
"""

from __future__ import annotations

import io
import os
import re
import select
import shutil
import sys
from typing import TextIO

from r3 import extras

_own: dict[int, TextIO] = {}  # by descriptor, in a program that has called `own_streams`
_open: list[TextIO] = []  # the stream with a line that has no end yet


class _Lossy(io.FileIO):
    """A descriptor that drops what it cannot write."""

    def write(self, data: object) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        try:
            while (count := super().write(data)) is None:  # type: ignore[arg-type]
                # Another program has switched the terminal to non-blocking, and it is full.
                select.select([], [self.fileno()], [])
        except OSError:
            return size
        return count


def open_missing() -> None:
    """Open standard streams that were closed from the start as /dev/null.

    The next file that is opened would otherwise become the console.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)


def own_streams() -> None:
    """Make stdout and stderr of this program drop what they cannot write, users' lines too.

    R3 continues to write to them when users' code has replaced `sys.stdout` or `sys.stderr`.
    """
    open_missing()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        if before is not None:
            before.flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(descriptor, "wb", closefd=False)),
            encoding=before.encoding if before is not None else "utf-8",
            errors="backslashreplace",  # a text that the terminal cannot show is no error either
            line_buffering=True,
        )
        setattr(sys, name, stream)
        _own[descriptor] = stream


def out() -> TextIO:
    """The stream for what a person reads."""
    return _own.get(1) or sys.stdout


def err() -> TextIO:
    """The stream for warnings and errors."""
    return _own.get(2) or sys.stderr


# Characters that a terminal obeys instead of showing them: C0 without tab and line feed, DEL, C1,
# marks and overrides of the writing direction, line separators; and halves of surrogate pairs.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: object) -> str:
    """The text with its control characters as escapes: a model's output moves no cursor, changes no
    colour or title, and does not reverse the text next to it.
    """
    return _OBEYED.sub(lambda match: ascii(match[0])[1:-1], str(text))


def say(text: object, *, error: bool = False, end: str = "\n", continues: bool = False) -> None:
    """Write a text and a line end at once, on a line of its own; control characters as escapes.

    On a terminal, long lines are broken between words.

    Args:
        end: "" leaves the line open.
        continues: the text continues an open line.
    """
    stream = err() if error else out()
    if _open and not continues:
        _open[0].write("\n")
        _open[0].flush()
    _open[:] = [] if end else [stream]
    shown = visible(text)
    if stream.isatty():
        shown = extras.fitted(shown, shutil.get_terminal_size().columns)
    stream.write(f"{shown}{end}")
    stream.flush()


def is_line_open() -> bool:
    """Whether nobody has written since a `say` that left its line open."""
    return bool(_open)


def say_in_handler(text: str) -> None:
    """Write a line to stderr from a signal handler, which may run in the middle of a `say`."""
    try:
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
    except OSError:
        return  # nobody reads


def flush() -> None:
    """Write what is left in the streams of R3."""
    for stream in (out(), err()):
        stream.flush()
