"""Rows that a library reads or makes: `hub:`, `gym:`, saved data sets, clones of the hub."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from r3.config.arguments import argument_value, arguments_fault
from r3.data.sources import Numbered
from r3.errors import Fault


def rows_of(source: str, folder: Path | None, split: str) -> Numbered:
    """Yield the rows of a source.

    Args:
        folder: where it lies, unless a library gets it elsewhere.
        split: of the folder.

    Raises:
        Fault: the source cannot be read, or its library is not installed.
    """
    if folder is None:
        return _gym(source) if source.startswith("gym:") else _hub(source)
    if is_saved(folder):
        return _saved(folder, split)
    fix = "give its files, or a folder that datasets can load"
    return _load_dataset(str(folder), None, split or "train", fix)


def imported(name: str, rule: str) -> Any:
    """Import a module that some sources need.

    Raises:
        Fault: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise Fault(rule, f"pip install {package}") from None


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved it (save_to_disk)."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _datasets() -> Any:
    datasets = imported("datasets", "Hugging Face data sets need the package datasets")
    # It prints every retry into the progress bar; the error says it once.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return datasets


def _saved(folder: Path, split: str) -> Numbered:
    datasets = _datasets()
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise Fault(f"cannot be read by datasets ({error})", "save it again") from error
    if isinstance(dataset, datasets.DatasetDict):
        names = ", ".join(dataset)
        if not split and len(dataset) > 1:
            raise Fault(f"has the splits {names}", f"name one: {folder}:{next(iter(dataset))}")
        if split and split not in dataset:
            raise Fault(f"has no split {split!r}", f"one of {names}")
        dataset = dataset[split or next(iter(dataset))]
    elif split:
        raise Fault(f"has no splits, and {split!r} was given", f"give {folder}")
    return enumerate(dataset, 1)


def _hub(source: str) -> Numbered:
    named, *more = source.removeprefix("hub:").split(":")
    name, at, revision = named.partition("@")
    if name.count("/") > 1 or not name or len(more) > 2 or not all(more) or (at and not revision):
        form = "hub:OWNER/NAME[@REVISION][:CONFIG][:SPLIT]"
        raise Fault("is not a name on the hub", f"write {form}")
    config = more[0] if len(more) == 2 else None
    fix = "check the name, and whether the hub can be reached (HF_ENDPOINT, HF_HUB_OFFLINE)"
    return _load_dataset(name, config, more[-1] if more else "train", fix, revision or None)


def _load_dataset(
    name: str, config: str | None, split: str, fix: str, revision: str | None = None
) -> Numbered:
    datasets = _datasets()
    # The cache of a folder knows sizes and times of its files, not what they hold.
    mode = "force_redownload" if os.path.isdir(name) else None
    try:
        dataset = datasets.load_dataset(
            name, config, split=split, revision=revision, download_mode=mode
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise Fault(f"cannot be loaded by datasets ({error})", fix) from error
    return enumerate(dataset, 1)


def _gym(source: str) -> Numbered:
    """Rows of `gym:TASK,size=N,...`; values are read as those of arguments are."""
    reasoning_gym = imported("reasoning_gym", "procedural tasks need reasoning-gym")
    task, *settings = source.removeprefix("gym:").split(",")
    if fault := arguments_fault(settings):
        item, rule, fix = fault
        raise Fault(f"{item!r} {rule}", fix)
    values: dict[str, Any] = {"size": 1000, "seed": 0}
    for setting in settings:
        name, _, text = setting.partition("=")
        if not (name and text):
            raise Fault(f"{setting!r} is not NAME=VALUE", "write gym:TASK,size=1000,seed=0")
        values[name] = argument_value(text)
    if task == "composite":
        fix = "give each task as a source of its own, with data.weights"
        raise Fault("a composite has tasks of its own, which this form cannot name", fix)
    try:
        if "level" in values:
            values = _of_level(reasoning_gym, task, values.pop("level")) | values
        entries = reasoning_gym.create_dataset(task, **values)
    except (ValueError, TypeError, AssertionError) as error:
        # An unknown task, an unknown setting, a bad value
        fix = "see the names in reasoning_gym.factory.DATASETS, and the task's config"
        raise Fault(f"is refused by reasoning-gym ({error})", fix) from error
    # Some tasks have no single answer: their scorer reads the whole entry.
    for index in range(len(entries)):
        entry = entries[index]
        row = {"question": entry["question"], "answer": str(entry["answer"] or "")}
        yield index + 1, {**row, "gym": task, "entry": dict(entry)}


def _of_level(reasoning_gym: Any, task: str, level: Any) -> dict[str, Any]:
    """The settings of a task at a level of its own curriculum, which ends at its hardest attribute.

    Raises:
        ValueError: the task has no curriculum, or the curriculum no such level.
    """
    curriculum = reasoning_gym.factory.create_curriculum(task)
    count = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=0)
    if type(level) is not int or not 0 <= level < count:
        raise ValueError(f"level = {level!r}: {task} has levels 0 to {count - 1}")
    curriculum.set_global_level(level)
    return asdict(curriculum.generate_configuration())
