"""The checkpoint: config.json, tokenizer, weights that belong together."""

from __future__ import annotations

import json
import re
from pathlib import Path

from r3 import extras
from r3.config import Config
from r3.config.rules import Findings
from r3.errors import Problem
from r3.models.files import AbsentWeightsError, checkpoint_faults
from r3.models.hub import command, is_hub
from r3.models.shape import ModelShape, ShapeError
from r3.user_code.loading import path_fix

_SHOWN_TENSORS = 5  # of a checkpoint that does not fit
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_GIVE_FOLDER = "give the folder of a Hugging Face checkpoint"
SUPPORTED_FIX = (
    "use a checkpoint of a supported architecture, as its authors published it, or add the family: "
    "docs/adding-a-model-family.md"
)


def check_freeze(config: Config, errors: Findings, shape: ModelShape | None) -> None:
    """`train.freeze` matches parameters of the model and leaves some to train."""
    if shape and config.train.freeze:
        try:
            extras.frozen_tensors(shape, config.train.freeze)
        except Problem as error:
            errors.add("train.freeze", error.rule, error.fix, value=error.value)


def check_model(config: Config, errors: Findings) -> ModelShape | None:
    """Check `model.path`; return the shape of the model, or None if it cannot be read."""
    path = config.model.path
    if not path:
        errors.add("model.path", "is empty", _GIVE_FOLDER)
        return None
    try:
        folder = local_folder(path)
    except ShapeError as error:
        errors.add("model.path", error.rule, error.fix)
        return None
    if folder is None:
        folder = Path(path)
        fix = path_fix(path, _GIVE_FOLDER)
        if _HUB_ID.fullmatch(path) and not folder.parent.exists():
            fix = f"write hub:{path} for a model of the hub"
        errors.add("model.path", "there is no such folder", fix)
        return None
    # A FIFO would block its reader forever.
    odd = [path.name for path in folder.iterdir() if not (path.is_file() or path.is_dir())]
    if odd := [name for name in odd if (folder / name).exists()]:
        rule = f"{sorted(odd)[0]} is a device or a FIFO, not a file"
        errors.add("model.path", rule, "download or export the checkpoint again")
        return None
    if other := _what_instead(folder):
        errors.add("model.path", *other)
        return None
    may_come = not is_hub(path)  # what the hub has is here
    if not (folder / "tokenizer.json").is_file():
        from r3.data.template import TIKTOKEN, TIKTOKEN_FIX  # it imports numpy

        fix = "save the model's fast tokenizer beside its weights"
        if (folder / TIKTOKEN).is_file():
            fix = TIKTOKEN_FIX
        errors.add("model.path", "the folder has no tokenizer.json", fix, is_missing=may_come)
    if not has_chat_template(folder):
        fix = (
            "write chat_template.jinja into the folder; an instruction-tuned model of the same "
            "family has one"
        )
        errors.add("model.path", "the tokenizer has no chat template", fix, is_missing=may_come)
    try:
        shape = ModelShape.read(folder)
    except OSError:
        errors.add("model.path", "the folder has no config.json", _GIVE_FOLDER)
        return None
    except ShapeError as error:
        errors.add("model.path", str(error), SUPPORTED_FIX)
        return None
    try:
        faults = checkpoint_faults(folder, shape)
    except ShapeError as error:
        add_fault("model.path", path, error, errors)
        return shape
    if faults:
        shown = "; ".join(faults[:_SHOWN_TENSORS])
        more = f"; and {len(faults) - _SHOWN_TENSORS} more" if len(faults) > _SHOWN_TENSORS else ""
        errors.add(
            "model.path",
            f"its tensors differ from what config.json implies: {shown}{more}",
            "weights and config.json must belong together: download or export them again",
        )
    return shape


def _what_instead(folder: Path) -> tuple[str, str] | None:
    """What a folder is that a run or PEFT has written, and what to give in its place."""
    if (folder / "config.json").is_file():
        return None
    if (folder / "adapter_config.json").is_file():
        return "is an adapter and has no model", "give its model, and the adapter as lora.start"
    if (folder / "r3.json").is_file() and (folder / "manifest.json").is_file():
        fix = "export it with python -m r3.export RUN --step N, and give the export"
        return "is a checkpoint of a run, and no Hugging Face model", fix
    if (folder / "run.json").is_file():
        fix = "give a model in its folder hf, or write one with python -m r3.export RUN"
        return "is the folder of a run, and no Hugging Face model", fix
    return None


def add_fault(name: str, path: str, error: ShapeError, errors: Findings) -> None:
    """Add why the weights of a model cannot be read; a start downloads those of the hub."""
    rule, fix = str(error), "download or export the checkpoint again"
    absent = isinstance(error, AbsentWeightsError)
    if absent and is_hub(path):
        try:
            rule = extras.downloads().weights_note(path) or rule
            fix = f"a start downloads them; `hf download {command(path)}` does it before"
        except ShapeError as refused:
            rule, fix, absent = refused.rule, refused.fix, False
    errors.add(name, rule, fix, value=path, is_missing=absent)


def local_folder(path: str) -> Path | None:
    """The folder of a model; None if there is none. Small files of the hub are downloaded.

    Raises:
        ShapeError: the hub does not give them.
    """
    if is_hub(path):
        return Path(extras.downloads().fetch_small(path))
    return Path(path) if is_folder(Path(path)) else None


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; False for what cannot be a path at all."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long a name, a null byte
        return False


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a folder has a chat template, in its own file or in its config."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
