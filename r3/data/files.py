"""Rows of data files: JSON lines, one JSON array, CSV, parquet; compressed or not; folders, globs.

A file is read the same way alone, in a folder and by a glob: texts stay texts (`007`, dates), and
every file is read or refused by name.
"""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from r3.user_code.loading import path_fix

FILES = "give a JSONL, CSV or parquet file, FOLDER[:SPLIT], hub:OWNER/NAME or gym:TASK"
_COMPRESSED: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": lambda content: _without_zstd(content),
}
_LINES = (".jsonl", ".json", ".ndjson")
_TABLES = {".csv": ",", ".tsv": "\t"}
_FOREIGN = re.compile(
    r"\.(7z|arrow|avro|bin|db|feather|h5|npy|npz|orc|pickle|pkl|pt|pth|rar|safetensors|sqlite|tar|"
    r"tgz|xlsx?|zip)"
)
# Beside data files in a folder of the hub or of a repository.
_NO_DATA = re.compile(
    r"[._].*|(README|LICENSE|NOTICE|Makefile)\b.*|.*\.(md|ya?ml|lock)|dataset_infos?\.json"
)
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}


class SourceError(ValueError):
    """A source cannot be read at all."""

    def __init__(self, rule: str, fix: str) -> None:
        self.rule, self.fix = rule, fix
        super().__init__(rule, fix)  # what unpickling gives to __init__

    def __str__(self) -> str:
        return f"{self.rule}. Fix: {self.fix}"


def imported(name: str, rule: str) -> Any:
    """Import a module that some sources need.

    Raises:
        SourceError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise SourceError(rule, f"pip install {package}") from None


def read_json(content: bytes) -> Any:
    """Read JSON.

    Raises:
        SourceError: an object has a key twice.
        ValueError, RecursionError: it is no JSON, or nested too deeply.
    """
    return json.loads(content, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        rule = f"has an object with two keys {twice!r}"
        raise SourceError(rule, "remove one: one of the values would be lost")
    return found


def read_file(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their lines: objects, or the bytes of a line of JSON.

    Raises:
        SourceError: the file cannot be read.
    """
    kind, compression = kind_of(path)
    if _FOREIGN.fullmatch(kind):
        raise SourceError(f"is a {kind} file, which R3 does not read", FILES)
    _require_file(path)
    if kind == ".parquet" and not compression:
        yield from _parquet(path)
        return
    if kind == ".parquet":
        raise SourceError("is a compressed parquet file", "decompress it")
    content = _content(path, compression)
    if kind in _TABLES:
        yield from _table(content, _TABLES[kind])
    elif content[:1000].lstrip().startswith(b"["):
        yield from _array(content)
    else:
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip():
                yield number, line


def kind_of(path: Path) -> tuple[str, str]:
    """The endings of a name that tell format and compression, such as .csv and .gz."""
    *_, before, last = ["", "", *(each.lower() for each in path.suffixes)]
    return (before, last) if last in _COMPRESSED else (last, "")


def is_glob(source: str) -> bool:
    """Whether a source is a pattern and no file of that very name."""
    return any(letter in source for letter in "*?[") and not os.path.lexists(source)


def files_of_glob(pattern: str) -> list[Path]:
    """The files that a pattern names, in order.

    Raises:
        SourceError: there is none.
    """
    found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in found if path.is_file()]
    if not files:
        fix = path_fix(pattern, "correct the pattern, or put it in quotes")
        raise SourceError("matches no file", fix)
    return files


def files_of_folder(folder: Path, split: str) -> list[Path]:
    """The data files of a folder, or those of a split, in order.

    A file belongs to a split if its name, or that of a folder in between, has the word, as in
    `train.jsonl`, `data/test-00000-of-00002.parquet` and `train/algebra.jsonl`.

    Raises:
        SourceError: files cannot be read, or it is not clear which are meant.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    inside = {path: path.relative_to(folder) for path in found}
    files = [path for path in found if not any(map(_NO_DATA.fullmatch, inside[path].parts))]
    known = (*_LINES, *_TABLES, ".parquet")
    if others := [str(inside[path]) for path in files if kind_of(path)[0] not in known]:
        rule = f"holds {_listed(others)}, which R3 does not read"
        raise SourceError(rule, f"remove them, or name the files: {folder}/*.jsonl")
    if not files:
        raise SourceError("holds no data file", FILES)
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(inside[path]), []).append(path)
    named = [name for name in by_split if name]
    if split:
        split = _SPLITS.get(split.lower(), split)
        chosen = by_split.get(split) or [path for path in files if _stem(path) == split]
        if not chosen:
            splits = ", ".join(named) or "none"
            raise SourceError(f"has no files of a split {split!r}", f"its splits: {splits}")
        return chosen
    if len(named) > 1:
        fix = f"name one: {folder}:{named[0]}"
        raise SourceError(f"has the splits {', '.join(named)}", fix)
    if named and "" in by_split:
        one = _listed([path.name for path in by_split[named[0]]])
        rest = _listed([path.name for path in by_split[""]])
        rule = f"has {one} of the split {named[0]}, and {rest} of none"
        fix = f"name the split, {folder}:{named[0]}, or all files, {folder}/*"
        raise SourceError(rule, fix)
    return files


def _split_of(path: Path) -> str:
    """The split of a file by its name or that of a folder, as datasets has them; "" for none."""
    for part in reversed((*path.parts[:-1], _stem(path))):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return ""


def _stem(path: Path) -> str:
    """`train` of `train-00000-of-00002.parquet` and of `train.jsonl.gz`."""
    kind, compression = kind_of(path)
    stem = path.name[: len(path.name) - len(kind) - len(compression)]
    return re.sub(r"-\d+-of-\d+$", "", stem)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _require_file(path: Path) -> None:
    """Raise SourceError unless there is such a file. Reading a FIFO would never end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise SourceError("there is no such file", path_fix(path, FILES)) from error
    except ValueError as error:  # a null byte in the name
        raise SourceError(f"is no path ({error})", FILES) from error
    except OSError as error:
        raise SourceError(_unreadable(path, error), FILES) from error
    if not stat.S_ISREG(mode):
        raise SourceError("is a device or a FIFO, not a file", FILES)


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read ({error.strerror or error})"


def _content(path: Path, compression: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(_unreadable(path, error), FILES) from error
    if not compression:
        return content
    try:
        return _COMPRESSED[compression](content)
    except SourceError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise SourceError(f"is no whole {compression} file ({error})", "copy it again") from error


def _array(content: bytes) -> Iterator[tuple[int, Any]]:
    try:
        found = read_json(content)
    except SourceError:
        raise
    except RecursionError:
        raise SourceError("is nested too deeply", "flatten the objects") from None
    except ValueError as error:
        rule = f"begins with '[' and is not one JSON array ({error})"
        raise SourceError(rule, "write one array, or one JSON object per line") from None
    yield from enumerate(found, 1)


def _table(content: bytes, delimiter: str) -> Iterator[tuple[int, Any]]:
    """Rows of a table with a header. Every value is a text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"is not UTF-8 at byte {error.start}", "save it as UTF-8") from None
    limit = csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        rule = f"is no table at line {reader.line_num} ({error})"
        raise SourceError(rule, "close the quotation marks") from None
    finally:
        csv.field_size_limit(limit)
    names = lines[0][1] if lines else []
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SourceError(f"has two columns {twice[0]!r}", "rename one of them")
    for line, cells in lines:
        if len(cells) != len(names):
            rule = f"has {len(cells)} values in line {line} for the {len(names)} columns of line 1"
            raise SourceError(rule, "put values with the separator in quotation marks")
    for line, cells in lines[1:]:
        yield line, dict(zip(names, cells, strict=True))


def _without_zstd(content: bytes) -> bytes:
    pyarrow = imported("pyarrow", ".zst files need pyarrow")
    return bytes(pyarrow.input_stream(io.BytesIO(content), compression="zstd").read())


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    parquet = imported("pyarrow.parquet", "parquet files need pyarrow")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    yield (number := number + 1), row
    except OSError as error:
        raise SourceError(_unreadable(path, error), "give the path of a parquet file") from error
    except ValueError as error:  # pyarrow's own errors are
        raise SourceError(
            f"is not a parquet file ({error})", "write it again, or name it .jsonl"
        ) from error
