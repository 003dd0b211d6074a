"""Rows of a data set: one JSON object per line, or one array. `r3.data.rows` checks each of them.

`r3.tools.rows` reads other sources: tables, compressed files, folders, patterns, parts of a source,
data sets of the hub. Imports nothing heavy until a source needs it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from r3 import extras
from r3.data.rows import Columns, Row, RowProblem, check_row, strict_json
from r3.errors import Fault

FILES = "give a JSONL, CSV or parquet file, FOLDER[:SPLIT], hub:OWNER/NAME or gym:TASK"

Read = TypeVar("Read")
ReadsRows = Callable[[str, Columns], tuple[list[Row], list[RowProblem]]]
Numbered = Iterator[tuple[int, Any]]
"""Lines, each with an object or the bytes of a line of JSON."""

_JSON = (".jsonl", ".json", ".ndjson")


def read_once(key: object, make: Callable[[], Read]) -> Read:
    """Return what `make` returns; a start that has a launcher makes it once on each machine.

    The launcher gives its check and its ranks a folder (R3_READ), so that the ranks take what the
    check has read, also where the files change in between. Machines share nothing: each sees its
    own files. Without a launcher each process reads by itself.

    Args:
        key: what decides the result.
    """
    folder = os.environ.get("R3_READ", "")
    if not os.path.isdir(folder):  # none, or one that a cleaner of old files has removed
        return make()
    path = Path(folder) / hashlib.sha256(repr(key).encode()).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            result: Read = pickle.loads(path.read_bytes())
            return result
        result = make()
        with suppress(OSError):  # a full disk costs the others their own reading
            path.with_suffix(".new").write_bytes(pickle.dumps(result))
            path.with_suffix(".new").replace(path)
    return result


def read_rows(source: str, columns: Columns) -> tuple[list[Row], list[RowProblem]]:
    """Return the good rows of a source, and the problems of the others or of the whole source."""
    return read_once((source, columns), lambda: _read_rows(source, columns))


def _read_rows(source: str, columns: Columns) -> tuple[list[Row], list[RowProblem]]:
    rows: list[Row] = []
    problems: list[RowProblem] = []
    if source.startswith("gym:"):  # its rows have fixed column names
        fixed = Columns()
        columns = replace(columns, prompt=fixed.prompt, answer=fixed.answer, tools="", verifiers=())
    try:
        for number, file, line, content in islice(_numbered(source), columns.first or None):
            row = check_row(file, line, number, content, columns)
            if isinstance(row, Row):
                rows.append(row)
            else:
                problems += row
    except Fault as error:
        problems.append(RowProblem(source, 0, "file", error.rule, error.fix))
    return rows, problems


def _numbered(source: str) -> Iterator[tuple[int, str, int, Any]]:
    """Yield number, file, line and content of the rows of a source."""
    if not (source.endswith(_JSON) and os.path.isfile(source)):
        yield from extras.sources().numbered(source)
        return
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        rule = f"{source} cannot be read ({error.strerror or error})"
        raise Fault(rule, FILES) from error
    yield from ((line, source, line, row) for line, row in json_rows(content))


def json_rows(content: bytes) -> Numbered:
    """Yield the rows of a JSON array, or of lines that are no white space.

    Raises:
        Fault: it begins as an array and is none.
    """
    if content[:1000].lstrip().startswith(b"["):
        yield from _array(content)
        return
    lines = enumerate(content.split(b"\n"), 1)
    yield from ((number, line) for number, line in lines if line.strip())


def _array(content: bytes) -> Numbered:
    try:
        return enumerate(strict_json(content), 1)
    except Fault:
        raise
    except RecursionError:
        raise Fault("is nested too deeply", "flatten the objects") from None
    except ValueError as error:
        rule = f"begins with '[' and is not one JSON array ({error})"
        raise Fault(rule, "write one array, or one JSON object per line") from None
