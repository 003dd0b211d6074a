"""Files of rows and of users' code, and how rows are loaded unless a test says otherwise."""

from pathlib import Path
from typing import Any

from r3.data import Columns

OPTIONS: dict[str, Any] = {"columns": Columns(), "max_prompt_tokens": 100, "on_too_long": "error"}


def write(folder: Path, *lines: str | bytes, name: str = "rows.jsonl") -> Path:
    """Write a file with these lines."""
    path = folder / name
    path.write_bytes(
        b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n"
    )
    return path


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Write `rows.parquet` with these rows; keys that a row lacks become None."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")
