"""What the folder of a run holds: settings, metric rows, dumps.

Every mistake of a user is one line in a `ViewError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from r3.run.folder import RunDir, read_jsonl, read_jsonl_and_notes
from r3.view.samples import Sample, sample_of

Kind = Literal["train", "eval"]


class ViewError(ValueError):
    """Something is missing; one line names it and what exists instead."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Settings and metrics of a run.

    Attributes:
        name: last part of the folder's path.
        settings: resolved settings by `section.field`, as text.
        base: preset or file that the run started from; empty if it is not known.
        overrides: names of the settings that differ from it.
        rows: one object per step, in order.
        notes: what a reader should know about the files, such as an incomplete last line.
    """

    name: str
    path: Path
    settings: Mapping[str, str]
    rows: Sequence[Mapping[str, float]]
    base: str = ""
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def model_path(self) -> str:
        """Folder or hub name of the model, which also has the tokenizer."""
        return self.settings.get("model.path", "")


def read_run(path: Path) -> RunFacts:
    """Settings and metrics of the run in `path`.

    Raises:
        ViewError: `path` is not the folder of a run.
    """
    run_dir = RunDir(path)
    if not run_dir.config.exists():
        raise ViewError(
            f"{path}: no config.yaml in this folder. Give the folder of a run, such as runs/tiny"
        )
    settings = flatten_settings(yaml.safe_load(run_dir.config.read_text(encoding="utf-8")))
    overrides: dict[str, str] = {}
    if run_dir.overrides.exists():
        tree = yaml.safe_load(run_dir.overrides.read_text(encoding="utf-8"))
        overrides = flatten_settings(tree or {})
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    if run_dir.metrics.exists():
        rows, notes = read_jsonl_and_notes(run_dir.metrics)
    if not rows:
        notes.append("metrics.jsonl has no rows yet")
    return RunFacts(
        name=path.resolve().name,
        path=path,
        settings=settings,
        rows=rows,
        base=overrides.pop("base", ""),
        overrides=tuple(overrides),
        notes=tuple(notes),
    )


def flatten_settings(tree: Mapping[str, Any]) -> dict[str, str]:
    """Settings by `section.field`, each as the text that a person would type."""
    flat: dict[str, str] = {}
    for section, fields in tree.items():
        if isinstance(fields, Mapping):
            flat |= {f"{section}.{name}": setting_text(value) for name, value in fields.items()}
        else:
            flat[section] = setting_text(fields)
    return flat


def differing_settings(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of settings that are not equal in all runs, in the order of the first run."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    return [name for name in names if len({settings.get(name) for settings in runs}) > 1]


def dumped_steps(path: Path, kind: Kind) -> list[int]:
    """Steps with a dump, ascending."""
    run_dir = RunDir(path)
    folder = (run_dir.rollouts(0) if kind == "train" else run_dir.eval(0)).parent
    return sorted(int(file.stem.removeprefix("step_")) for file in folder.glob("step_*.jsonl"))


def read_samples(path: Path, kind: Kind, step: int) -> dict[str, list[Sample]]:
    """Return the samples of a dump by data set; rollouts of training have the one key "train".

    Raises:
        ViewError: there is no such folder or dump.
    """
    run_dir = RunDir(path)
    if not path.is_dir():
        raise ViewError(f"{path}: no such folder. Give the folder of a run, such as runs/tiny")
    file = run_dir.rollouts(step) if kind == "train" else run_dir.eval(step)
    if not file.exists():
        what, fix = (
            ("rollouts", "set --log.rollouts_every to dump more steps")
            if kind == "train"
            else ("evaluation", "set --eval.every to evaluate more often")
        )
        steps = dumped_steps(path, kind)
        there = f"steps with one: {', '.join(map(str, steps))}" if steps else "the run has none"
        raise ViewError(
            f"--step {step}: no dump of {what} at this step; {there}. Choose one, or {fix}"
        )
    sets: dict[str, list[Sample]] = {}
    for number, row in enumerate(read_jsonl(file)):
        sets.setdefault(row["set"] if kind == "eval" else "train", []).append(
            sample_of(number, row)
        )
    return sets


def setting_text(value: Any) -> str:
    """Return the value of a setting as a person would type it."""
    if isinstance(value, list | tuple):
        return " ".join(setting_text(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
