"""Contents of a run folder: settings, metrics, dumps.

Every mistake of a user is one line in a `Fault`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from r3.config import (
    Config,
    ConfigError,
    as_typed,
    flatten,
    from_yaml,
    load_yaml,
    path_from_start,
    with_values,
)
from r3.config.resume import STARTED_FROM
from r3.errors import Fault
from r3.run.folder import RunDir, read_jsonl_lines
from r3.run.goal import Goal
from r3.tools.view.samples import Sample, sample_of

Kind = Literal["train", "eval"]
_SHOWN = 5  # numbers of lines or steps in a note
_LARGEST = 1e300


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Settings and metrics of a run.

    Attributes:
        name: last part of the folder's path.
        settings: resolved settings by `section.field`, as text.
        base: preset or file that the run started from; empty if it is not known.
        overrides: names of the settings that differ from it.
        rows: one object per step, in order.
        notes: what a reader should know about the files, such as lines that were left out.
    """

    name: str
    path: Path
    settings: Mapping[str, str]
    rows: Sequence[Mapping[str, float]]
    base: str = ""
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Steps that the run is to make; 0 if it is not known."""
        text = self.settings.get("train.steps", "")
        return int(text) if text.isdecimal() else 0

    @property
    def is_finished(self) -> bool:
        """Whether the last step is made."""
        return bool(self.rows) and 0 < self.steps <= self.rows[-1]["step"]

    @property
    def end(self) -> str:
        """Why the last attempt ended before `train.steps`; "" if it did not, or was killed."""
        run_dir = RunDir(self.path)
        for file, prefix in ((run_dir.stopped, ""), (run_dir.first_failure, "failed: ")):
            with suppress(OSError):
                lines = file.read_text(errors="replace").split("\n")
                if first := next(filter(None, map(str.strip, lines)), ""):
                    return f"{prefix}{first}; see errors/" if prefix else first
        goal = Goal.of(self.settings)
        return goal.end(goal.values(self.rows))

    @property
    def model_path(self) -> str:
        """Folder or hub name of the model, which also has the tokenizer."""
        return path_from_start(self.path, self.settings, "model.path")


def config_of_run(folder: Path) -> Config:
    """The settings of a run for a command that reads its folder, in whatever working folder.

    Raises:
        ConfigError: config.yaml is not as R3 wrote it.
        OSError: there is none.
    """
    config = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    values = flatten(config)
    started = {name: path_from_start(folder, values, name) for name in STARTED_FROM}
    return with_values(config, started)


def read_run(path: Path) -> RunFacts:
    """Settings and metrics of the run in `path`.

    Raises:
        Fault: `path` is not the folder of a run.
    """
    run_dir = RunDir(path)
    if not run_dir.config.exists():
        raise Fault(
            f"{path}: no config.yaml in this folder. Give the folder of a run, such as runs/tiny"
        )
    notes: list[str] = []
    settings = _read_settings(run_dir.config, notes)
    overrides = _read_settings(run_dir.overrides, notes) if run_dir.overrides.exists() else {}
    rows = _read_rows(run_dir.metrics, notes) if run_dir.metrics.exists() else []
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


def _read_settings(file: Path, notes: list[str]) -> dict[str, str]:
    """The settings of a YAML file; what cannot be read is noted."""
    try:
        return flatten_settings(load_yaml(file.read_text(encoding="utf-8"), file.name))
    except ConfigError as error:
        notes.append(f"{file.name} cannot be read: it {error.problems[0].rule}")
    except (OSError, UnicodeDecodeError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
    return {}


def _read_rows(file: Path, notes: list[str]) -> list[dict[str, float]]:
    """One row per step, in order; what is left out of the file is noted."""
    rows: dict[int, dict[str, float]] = {}
    broken, again, texts = [], [], []
    for number, row in read_jsonl_lines(file):
        if isinstance(row, str) or type(step := row.get("step")) is not int:
            broken.append(number)
            continue
        if step in rows and step not in again:
            again.append(step)
        rows[step] = {key: value for key, value in row.items() if _is_number(value)}
        texts += [f"{key} of step {step}" for key in row if key not in rows[step]]
    if broken:
        notes.append(f"{file.name}: {_listed('line', broken)} cannot be read (torn?): left out")
    if again:
        notes.append(f"{file.name}: {_listed('step', again)} more than once: the last row counts")
    if texts:
        notes.append(f"{file.name}: {len(texts)} values are no numbers, such as {texts[0]}")
    return [rows[step] for step in sorted(rows)]


def _is_number(value: Any) -> bool:
    # A larger integer has no floating-point number.
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _listed(what: str, numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    plural = "s" if len(numbers) > 1 else ""
    return f"{what}{plural} {', '.join(map(str, numbers[:_SHOWN]))}{more}"


def flatten_settings(tree: Mapping[str, Any]) -> dict[str, str]:
    """Settings by `section.field`, each as the text that a person would type."""
    flat: dict[str, str] = {}
    for section, fields in tree.items():
        if isinstance(fields, Mapping):
            flat |= {f"{section}.{name}": as_typed(value) for name, value in fields.items()}
        else:
            flat[section] = as_typed(fields)
    return flat


def differing_settings(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of settings that are not equal in all runs, in the order of the first run."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    return [name for name in names if len({settings.get(name) for settings in runs}) > 1]


def dumped_steps(path: Path, kind: Kind) -> list[int]:
    """Steps with a dump, ascending."""
    run_dir = RunDir(path)
    folder = (run_dir.rollouts(0) if kind == "train" else run_dir.eval(0)).parent
    numbers = (file.stem.removeprefix("step_") for file in folder.glob("step_*.jsonl"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_samples(path: Path, kind: Kind, step: int, notes: list[str]) -> dict[str, list[Sample]]:
    """Return the samples of a dump by data set; rollouts of training have the one key "train".

    Args:
        notes: gets a line about rows that cannot be read.

    Raises:
        Fault: there is no such folder or dump, or none of its rows can be read.
    """
    run_dir = RunDir(path)
    if not path.is_dir():
        raise Fault(f"{path}: no such folder. Give the folder of a run, such as runs/tiny")
    file = run_dir.rollouts(step) if kind == "train" else run_dir.eval(step)
    if not file.exists():
        what, fix = (
            ("rollouts", "set --log.rollouts_every to dump more steps")
            if kind == "train"
            else ("evaluation", "set --eval.every to evaluate more often")
        )
        if not (steps := dumped_steps(path, kind)):
            raise Fault(f"{path}: no dump of {what}. Only a run that samples has some: {fix}")
        there = f"steps with one: {', '.join(map(str, steps))}"
        raise Fault(f"--step {step}: no dump of {what} at this step; {there}. Choose one, or {fix}")
    sets: dict[str, list[Sample]] = {}
    broken = []
    for place, (number, row) in enumerate(read_jsonl_lines(file)):
        try:
            if isinstance(row, str):
                raise ValueError(row)
            name = str(row["set"]) if kind == "eval" else "train"
            sets.setdefault(name, []).append(sample_of(place, row))
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
            broken.append(number)
    if broken:
        note = f"{file.name} in {file.parent.name}/: {_listed('line', broken)} cannot be read"
        if not any(sets.values()):
            raise Fault(f"{note}, and no other has a sample. Choose another step")
        notes.append(f"{note}: left out")
    return {name: samples for name, samples in sets.items() if samples}
