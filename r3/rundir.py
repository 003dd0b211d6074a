"""The folder of a run: where everything lies, written so that a reader never meets a half-written file.

Whole files appear under a temporary name and are renamed into place. `metrics.jsonl` is the one file that grows:
a line is synced before the step counts as reported, and a line that a kill tore is recognised, left out, and said.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from r3.types import Rollout


@dataclass(frozen=True)
class RunDir:
    """Names every file of a run and writes those that hold rows. Folders are made when the first file goes in."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

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
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        rewards: Sequence[float],
        advantages: Sequence[float],
        parts: Sequence[Mapping[str, float]] = (),
    ) -> Path:
        """Dump a step: text and figures as jsonl, tokens, logprobs and routes as safetensors.

        `parts` are what the components of each reward gave; none = they are not known.
        Arrays are concatenated over rollouts: rollout i has tokens `cu_tokens[i] : cu_tokens[i + 1]` and routes
        `cu_rows[i] : cu_rows[i + 1]`. Where the jsonl is, the whole dump is.
        """
        if not (len(rollouts) == len(rewards) == len(advantages)) or not rollouts:
            raise ValueError(
                f"a dump needs a reward and an advantage for each of its rollouts, and at least one rollout; "
                f"got {len(rollouts)} rollouts, {len(rewards)} rewards, {len(advantages)} advantages"
            )
        arrays = {
            "tokens": np.concatenate([rollout.tokens_T for rollout in rollouts]),
            "loss_mask": np.concatenate([rollout.loss_mask_T for rollout in rollouts]),
            "logprobs": np.concatenate([rollout.logprobs_T for rollout in rollouts]),
            "routed_experts": np.concatenate([rollout.routed_experts for rollout in rollouts]),
            "cu_tokens": _offsets(len(rollout.tokens_T) for rollout in rollouts),
            "cu_rows": _offsets(len(rollout.routed_experts) for rollout in rollouts),
            "versions": np.array([rollout.version for rollout in rollouts], dtype=np.int64),
        }
        rows = [
            {
                "prompt_id": rollout.prompt_id,
                "group": rollout.group,
                "member": rollout.member,
                "response": rollout.response,
                "reward": float(reward),
                "rewards": dict(given),
                "advantage": float(advantage),
                "finish_reason": rollout.finish_reason,
                "version": rollout.version,
                "segments": rollout.segments,
                "tokens": len(rollout.tokens_T),
                "response_tokens": rollout.num_response_tokens,
            }
            for rollout, reward, advantage, given in zip(
                rollouts, rewards, advantages, parts or [{}] * len(rollouts), strict=True
            )
        ]
        path = self.rollouts(step)
        # Both are whole before either appears; the inner one, the arrays, appears first.
        with replacing(path) as text, replacing(path.with_suffix(".safetensors")) as tensors:
            # safetensors writes the raw buffer and ignores strides: another memory order would be scrambled silently.
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, tensors)
            text.write_bytes(b"".join(map(_line, rows)))
        return path

    def write_eval(self, step: int, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write one line per answer, each with the name of its set; other sets of the same step stay."""
        path = self.eval(step)
        others = [row for row in read_jsonl(path) if row.get("set") != name] if path.exists() else []
        with replacing(path) as temporary:
            temporary.write_bytes(b"".join(map(_line, [*others, *({"set": name, **row} for row in rows)])))
        return path


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary name beside `path`; the file written there takes its place only when the block succeeds.

    `durable` also waits until the disk has it, so that not even a power cut leaves an empty file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            _sync(temporary)
        os.replace(temporary, path)
        if durable:
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a whole text file, or leave what was there."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write a whole JSON file, or leave what was there."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=durable)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file. A last line torn by a kill is left out with a warning; any other bad line raises."""
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in numbered:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
        except ValueError as error:  # also UnicodeDecodeError: a line may be torn inside a character
            if number != numbered[-1][0]:
                raise ValueError(f"{path}:{number}: not a JSON object ({error})") from error
            warnings.warn(f"{path}:{number}: the last line is torn and was left out", stacklevel=2)
            break
        rows.append(row)
    return rows


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl, or of the run folder that holds one, in order."""
    return read_jsonl(RunDir(path).metrics if path.is_dir() else path)


def read_rollouts(path: Path) -> tuple[list[Rollout], list[float], list[float]]:
    """Rollouts, rewards and advantages of a dump, exactly as `RunDir.write_rollouts` was given them."""
    rows = read_jsonl(path)
    arrays = load_file(path.with_suffix(".safetensors"))
    rollouts = []
    for index, row in enumerate(rows):
        tokens = slice(*arrays["cu_tokens"][index : index + 2])
        routes = slice(*arrays["cu_rows"][index : index + 2])
        rollouts.append(
            Rollout(
                prompt_id=row["prompt_id"],
                group=row["group"],
                member=row["member"],
                tokens_T=arrays["tokens"][tokens],
                loss_mask_T=arrays["loss_mask"][tokens],
                logprobs_T=arrays["logprobs"][tokens],
                routed_experts=arrays["routed_experts"][routes],
                finish_reason=row["finish_reason"],
                version=row["version"],
                segments=tuple((token, version) for token, version in row.get("segments", ())),
                response=row["response"],
            )
        )
    return rollouts, [row["reward"] for row in rows], [row["advantage"] for row in rows]


def truncate_metrics(run_dir: RunDir, step: int) -> list[str]:
    """Drop the rows of `step` and later, and a torn last line; returns what a person should know about it."""
    if not run_dir.metrics.exists():
        return [f"{run_dir.metrics.name} is missing: rows before step {step} are lost"] if step > 1 else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_metrics(run_dir.metrics)
    said = [str(warning.message) for warning in caught]
    kept = [row for row in rows if row["step"] < step]
    if dropped := len(rows) - len(kept):
        said.append(
            f"{run_dir.metrics.name}: {dropped} rows from step {step} on were dropped, to be made again"
        )
    last = kept[-1]["step"] if kept else -1
    if last + 1 < step:
        said.append(f"{run_dir.metrics.name}: rows of steps {last + 1:.0f} to {step - 1} are missing")
    with replacing(run_dir.metrics) as temporary:
        temporary.write_bytes(b"".join(map(_line, kept)))
    return said


def _line(row: Mapping[str, Any]) -> bytes:
    # Python's JSON writes floats so that they read back bit for bit; NaN and Infinity stay visible as such. Half a
    # surrogate pair, which a response may hold, becomes its JSON escape.
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
