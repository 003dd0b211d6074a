"""The folder of a run: where everything lies, written so that a reader never meets a half-written
file.

Whole files appear under a temporary name and are renamed into place. `metrics.jsonl` is the one
file that grows: a line is synced before the step counts as reported, and a line that a kill tore is
recognised, left out, and said.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunDir:
    """Names every file of a run and writes those that hold rows. Folders are made when the first
    file goes in.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def overrides(self) -> Path:
        """The settings that differ from the preset or file the run started from, and its name."""
        return self.path / "overrides.yaml"

    @property
    def metrics(self) -> Path:
        """One object per step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    def rollouts(self, step: int) -> Path:
        """The step's dump; its arrays lie beside it with the ending .safetensors."""
        return self.path / "rollouts" / f"step_{step:06d}.jsonl"

    def scores(self, step: int) -> Path:
        """Log-probabilities and live routes of the step's dump, by `r3.rescore --save`."""
        return self.path / "rollouts" / f"step_{step:06d}.scores.safetensors"

    def eval(self, step: int) -> Path:
        """The step's evaluation answers."""
        return self.path / "eval" / f"step_{step:06d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint taken after `step` steps."""
        return self.checkpoints / f"step_{step:06d}"

    def hf(self, step: int) -> Path:
        """The Hugging Face export taken after `step` steps."""
        return self.path / "hf" / f"step_{step:06d}"

    def heartbeat(self, rank: int) -> Path:
        """Where a rank says what it is doing."""
        return self.path / "heartbeats" / f"rank_{rank:05d}.json"

    def append_metrics(self, row: Mapping[str, float]) -> None:
        """Add one line to metrics.jsonl; when this returns, the line survives a power cut."""
        self.metrics.parent.mkdir(parents=True, exist_ok=True)
        with self.metrics.open("ab") as file:
            file.write(jsonl_line(row))
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, *, durable: bool = True, private: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside `path`; the file written there takes its place only when the
    block succeeds.

    `durable` also waits until the disk has it, so that not even a power cut leaves an empty file.
    `private`: its owner alone may read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if private:
            temporary.chmod(0o600)
        if durable:
            sync_to_disk(temporary)
        os.replace(temporary, path)
        if durable:
            sync_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = True, private: bool = False) -> None:
    """Write a whole text file, or leave what was there. `private`: its owner alone may read it."""
    with replacing(path, durable=durable, private=private) as temporary:
        temporary.touch(mode=0o600 if private else 0o666)
        temporary.write_bytes(text.encode())


def write_json(path: Path, value: Any, *, durable: bool = True, private: bool = False) -> None:
    """Write a whole JSON file, or leave what was there."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_text(path, text, durable=durable, private=private)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file. A last line torn by a kill is left out with a warning; any other
    bad line raises.
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in numbered:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
        except (
            ValueError
        ) as error:  # also UnicodeDecodeError: a line may be torn inside a character
            if number != numbered[-1][0]:
                raise ValueError(f"{path}:{number}: not a JSON object ({error})") from error
            warnings.warn(f"{path}:{number}: the last line is torn and was left out", stacklevel=2)
            break
        rows.append(row)
    return rows


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl, or of the run folder that holds one, in order."""
    return read_jsonl(RunDir(path).metrics if path.is_dir() else path)


def truncate_metrics(run_dir: RunDir, step: int) -> list[str]:
    """Drop the rows of `step` and later, and a torn last line; returns what a person should know
    about it.
    """
    if not run_dir.metrics.exists():
        return (
            [f"{run_dir.metrics.name} is missing: rows before step {step} are lost"]
            if step > 1
            else []
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_metrics(run_dir.metrics)
    said = [str(warning.message) for warning in caught]
    kept = [row for row in rows if row["step"] < step]
    if dropped := len(rows) - len(kept):
        said.append(
            f"{run_dir.metrics.name}: {dropped} rows from step {step} on were dropped, to be made "
            "again"
        )
    last = kept[-1]["step"] if kept else -1
    if last + 1 < step:
        said.append(
            f"{run_dir.metrics.name}: rows of steps {last + 1:.0f} to {step - 1} are missing"
        )
    with replacing(run_dir.metrics) as temporary:
        temporary.write_bytes(b"".join(map(jsonl_line, kept)))
    return said


def jsonl_line(row: Mapping[str, Any]) -> bytes:
    """One row as a line of a jsonl file, newline included."""
    # Python's JSON writes floats so that they read back bit for bit; NaN and Infinity stay visible
    # as such. Half a surrogate pair, which a response may hold, becomes its JSON escape.
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def sync_to_disk(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
