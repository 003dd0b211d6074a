"""The run folder: names of its files, and atomic writes.

Whole files are written under a temporary name and renamed. `metrics.jsonl` is the one file that
grows: a line is synced before the step counts as reported. An incomplete last line, which a kill
may leave, is left out with a note.
"""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the watcher imports this module in a Python without packages
    from r3.config import Config

_STEP = re.compile(r"step_(\d{6,})")


class RunDir:
    """Names of the files of a run. Folders are created with their first file.

    Attributes:
        config: the resolved configuration.
        overrides: the settings that differ from the preset or file the run started from, and its
            name.
        metrics: one object per step.
        tensorboard: event files.
        checkpoints: one folder per checkpoint.
        exports: one Hugging Face folder per export.
        evaluated: metrics of the last evaluation without training (eval.only).
        stopped: one line about the signal that ended the last attempt.
        first_failure: the block that the first failing rank of the last attempt printed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.overrides = path / "overrides.yaml"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.exports = path / "hf"
        self.evaluated = path / "eval" / "alone.json"
        self.stopped = path / "errors" / "stopped"
        self.first_failure = path / "errors" / "first_failure"

    def rollouts(self, step: int) -> Path:
        """The step's dump; its arrays have the same name with the ending .safetensors."""
        return self.path / "rollouts" / f"step_{step:06d}.jsonl"

    def scores(self, step: int) -> Path:
        """Log-probabilities and live routes of the step's dump, by `r3.rescore --save`."""
        return self.path / "rollouts" / f"step_{step:06d}.scores.safetensors"

    def eval(self, step: int) -> Path:
        """The step's evaluation samples."""
        return self.path / "eval" / f"step_{step:06d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint taken after `step` steps."""
        return self.checkpoints / f"step_{step:06d}"

    def hf(self, step: int) -> Path:
        """The Hugging Face export taken after `step` steps."""
        return self.exports / f"step_{step:06d}"

    def trace(self, step: int, rank: int) -> Path:
        """Operations of one rank in one step (debug.profile)."""
        return self.path / "traces" / f"step_{step:06d}_rank_{rank:05d}.json.gz"

    def heartbeat(self, rank: int) -> Path:
        """The file in which a rank writes its phase."""
        return self.path / "heartbeats" / f"rank_{rank:05d}.json"

    @classmethod
    def of(cls, config: Config) -> RunDir:
        """The folder of a run with these settings."""
        return cls(Path(config.log.dir))

    def append_metrics(self, row: Mapping[str, float]) -> bool:
        """Add one line to metrics.jsonl; when this returns, the line survives a power cut.

        Returns:
            Whether it is the only line of the file.

        Raises:
            OSError: the line cannot be written; nothing of it is in the file.
        """
        line = jsonl_line(row)
        with self.metrics.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.metrics))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        return end == 0


@contextmanager
def replacing(path: Path, *, durable: bool = True, private: bool = False) -> Iterator[Path]:
    """Yield a temporary name; if the block succeeds, the file there replaces `path`.

    Args:
        durable: wait until the disk has it, so that not even a power cut leaves an empty file.
        private: only its owner may read it; others get the mode that the umask says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch(mode=0o600 if private else 0o666)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # a library's writer may make a new file, with a mode of its own
        if durable:
            sync_to_disk(temporary)
        os.replace(temporary, path)
        if durable:
            sync_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = True, private: bool = False) -> None:
    """Write a whole text file or change nothing; see `replacing`."""
    with replacing(path, durable=durable, private=private) as temporary:
        # Half a surrogate pair, which a response may hold, becomes an escape.
        temporary.write_bytes(text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any, *, durable: bool = True, private: bool = False) -> None:
    """Write a whole JSON file or change nothing; see `replacing`."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_text(path, text, durable=durable, private=private)


def read_jsonl(path: Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the objects of a jsonl file, without an incomplete last line.

    Args:
        notes: gets a line about that; without it, it is a warning.

    Raises:
        ValueError: a line before the last is no JSON object.
    """
    lines = read_jsonl_lines(path)
    if lines and isinstance(lines[-1][1], str):
        number, _ = lines.pop()
        note = f"{path}:{number}: the last line is torn and was left out"
        if notes is None:
            warnings.warn(note, stacklevel=2)
        else:
            notes.append(note)
    rows = []
    for number, row in lines:
        if isinstance(row, str):
            raise ValueError(f"{path}:{number}: not a JSON object ({row})")
        rows.append(row)
    return rows


def read_jsonl_lines(path: Path) -> list[tuple[int, dict[str, Any] | str]]:
    """Return the lines of a jsonl file that are not empty: number, and object or what is wrong."""
    rows: list[tuple[int, dict[str, Any] | str]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Also UnicodeDecodeError: a line may end inside a character.
            rows.append((number, str(error)))
            continue
        if not isinstance(row, dict):
            # Late: the process that watches a rank has no packages, which r3.config imports.
            from r3.config.arguments import kind_of

            row = f"{kind_of(row)}, not an object"
        rows.append((number, row))
    return rows


def read_metrics(path: Path, notes: list[str] | None = None) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl, or of the run folder that holds one, in order of their steps.

    Of several rows of one step the last counts.

    Args:
        notes: gets a line about such rows, rows in another order and an incomplete last line.

    Raises:
        ValueError: a line before the last is no JSON object, or a row has no step.
    """
    file = RunDir(path).metrics if path.is_dir() else path
    rows = read_jsonl(file, notes)
    if odd := [row for row in rows if type(row.get("step")) is not int]:
        raise ValueError(f"{file}: a row has no step: {str(odd[0])[:80]}")
    steps = [row["step"] for row in rows]
    by_step = {row["step"]: row for row in rows}
    if notes is not None:
        if again := sorted(step for step, count in Counter(steps).items() if count > 1):
            text = f"step {again[0]} and {len(again) - 1} more" if again[1:] else f"step {again[0]}"
            notes.append(f"{file.name}: several rows of {text}: the last one counts")
        if list(by_step) != sorted(by_step):
            notes.append(f"{file.name}: its rows were not in the order of their steps")
    return [by_step[step] for step in sorted(by_step)]


def truncate_metrics(run_dir: RunDir, step: int) -> list[str]:
    """Drop the rows of `step` and later, and an incomplete last line; return notes for the user."""
    name = run_dir.metrics.name
    if not run_dir.metrics.exists():
        return [f"{name} is missing: rows before step {step} are lost"] if step > 1 else []
    notes: list[str] = []
    rows = read_metrics(run_dir.metrics, notes)
    kept = [row for row in rows if row["step"] < step]
    if dropped := len(rows) - len(kept):
        notes.append(f"{name}: {dropped} rows from step {step} on were dropped, to be made again")
    # Step 0 has a row only if the run has held-out prompts.
    if missing := sorted({*range(1, step)} - {row["step"] for row in kept}):
        text = f"{len(missing)} rows between steps {missing[0]} and {missing[-1]} are missing"
        notes.append(f"{name}: {text}")
    with replacing(run_dir.metrics) as temporary:
        temporary.write_bytes(b"".join(map(jsonl_line, kept)))
    return notes


def jsonl_line(row: Mapping[str, Any]) -> bytes:
    """One row as a line of a jsonl file, newline included."""
    # Python's JSON writes floats so that they read back bit for bit; NaN and Infinity stay visible
    # as such. Half a surrogate pair, which a response may hold, becomes its JSON escape.
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def write_eval(run_dir: RunDir, step: int, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write one line per sample, each with the name of its set; other sets of the same step
    stay.
    """
    path = run_dir.eval(step)
    others = [row for row in read_jsonl(path) if row.get("set") != name] if path.exists() else []
    with replacing(path, private=True) as temporary:
        lines = [*others, *({"set": name, **row} for row in rows)]
        temporary.write_bytes(b"".join(map(jsonl_line, lines)))
    return path


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first. A checkpoint gets its final name when it is complete."""
    return sorted(
        (int(match[1]), path)
        for path in checkpoints.glob("step_*")
        if (match := _STEP.fullmatch(path.name))
    )


def samples_after(run_dir: RunDir, step: int) -> list[Path]:
    """Files with rollouts and evaluation samples of later steps."""
    files = [*run_dir.path.glob("rollouts/step_*"), *run_dir.path.glob("eval/step_*")]
    return [file for file in files if (at := _STEP.match(file.name)) and int(at[1]) > step]


def owner_of(path: Path) -> str:
    """The name of the user that a file belongs to, or its number."""
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def sync_to_disk(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
