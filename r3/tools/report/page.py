"""The data of a report as plain objects, and the HTML page that contains them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import r3
from r3.config import Config, as_typed, flatten
from r3.data.template import load_tokenizer
from r3.errors import Fault
from r3.metrics.glossary import GLOSSARY, UnknownMetricError, explain
from r3.models.shape import ModelShape, ShapeError
from r3.run.folder import RunDir
from r3.tools.mismatch.jumps import MismatchWatch
from r3.tools.report.tokens import Arrays, expert_load, read_arrays, token_facts, vocabulary
from r3.tools.view.runs import (
    Kind,
    RunFacts,
    differing_settings,
    dumped_steps,
    read_run,
    read_samples,
)
from r3.tools.view.samples import Sample, counted

ASSETS = ("report.css", "page.js", "charts.js", "rollouts.js")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of the dumps a page holds.

    Attributes:
        steps: steps whose dumps are shown; empty = `dumps` of them, evenly spaced.
        dumps: most dumps per run and kind.
        samples: most samples per dump; whole groups, evenly spaced.
        tokens: most tokens per dump that can be coloured; further samples have their text alone.
    """

    steps: tuple[int, ...] = ()
    dumps: int = 8
    samples: int = 128
    tokens: int = 60_000


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Metric rows as one list per key, `step` among them; None where there is no finite number."""
    keys = sorted({key for row in rows for key in row})
    return {key: [_number(row.get(key)) for row in rows] for key in keys}


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spaced, the first and the last included."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def shown_samples(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most `most` samples: whole groups, evenly spaced over the dump, at least one group."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    largest = max(map(len, groups.values()))
    kept = evenly(sorted(groups), max(1, most // largest))
    return [sample for group in kept for sample in groups[group]]


def sample_row(sample: Sample) -> dict[str, Any]:
    """A sample as the page wants it; keys without a value are left out."""
    messages = [
        {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
        for message in sample.messages
    ]
    row = {
        "prompt": sample.prompt_id,
        "group": sample.group,
        "sample": sample.sample_index,
        "sequence": sample.sequence or None,
        "question": sample.question,
        "reference": sample.reference,
        "messages": messages,
        "reward": _number(sample.reward),
        "components": {name: _number(part) for name, part in sample.components.items()},
        "metrics": {name: _number(number) for name, number in sample.metrics.items()},
        "turns": list(sample.turn_rewards),
        "advantage": _number(sample.advantage),
        "finish": sample.finish_reason,
        "length": sample.response_tokens,
    }
    return {key: value for key, value in row.items() if value not in (None, "", [], {})}


def dump_data(
    samples: Sequence[Sample],
    *,
    kind: Kind,
    name: str,
    step: int,
    arrays: Arrays | None,
    limits: Limits,
) -> dict[str, Any]:
    """One dump of the browser: its samples, with facts per token up to the limit."""
    shown = shown_samples(samples, limits.samples)
    rewards = {sample.row: sample.reward for sample in counted(samples)}
    rows, tokens = [], 0
    for sample in shown:
        row = sample_row(sample)
        if sample.row not in rewards:
            row["uncounted"] = True  # a further sequence of an episode that has one reward
        if arrays is not None:
            facts = token_facts(arrays, sample.row)
            tokens += len(facts["ids"])
            if tokens <= limits.tokens:
                row["tokens"] = facts
        rows.append(row)
    return {
        "kind": kind,
        "name": name,
        "step": step,
        "total": len(samples),
        "mean": sum(rewards.values()) / len(rewards),
        "samples": rows,
        "has_differences": arrays is not None and arrays.policy_logprobs is not None,
        "has_disagreement": arrays is not None and arrays.live_routes is not None,
    }


def run_data(path: Path, limits: Limits) -> dict[str, Any]:
    """Everything the page holds about one run.

    Raises:
        Fault: `path` is not the folder of a run.
    """
    facts = read_run(path)
    notes = [*filter(None, [facts.end]), *facts.notes]
    dumps, loads, ids = [], [], set()
    shape = _shape(facts, notes)
    for kind in ("train", "eval"):
        for step in _steps(facts, kind, limits):
            arrays = None
            try:
                if kind == "train":
                    arrays = read_arrays(RunDir(path), step)
                    ids.update(arrays.tokens.tolist())
                    if arrays.routed_experts.size:
                        loads.append({"step": step, **_load(arrays, shape)})
            except Fault as error:
                notes.append(str(error))
            try:
                sets = read_samples(path, kind, step, notes)
            except Fault as error:  # all of its rows are damaged
                notes.append(str(error))
                continue
            for name, samples in sets.items():
                dumps.append(
                    dump_data(
                        samples, kind=kind, name=name, step=step, arrays=arrays, limits=limits
                    )
                )
    watch = MismatchWatch()
    notes += [line for row in facts.rows for line in watch.lines(row, int(row["step"]))]
    texts: dict[int, str] = {}
    if ids:
        tokenizer = _tokenizer(facts)
        if tokenizer is None:
            notes.append(f"no tokenizer at {facts.model_path}: tokens are shown by their numbers")
        else:
            texts = vocabulary(tokenizer, sorted(ids))
    return {
        "name": facts.name,
        "path": str(facts.path),
        "settings": dict(facts.settings),
        "base": facts.base,
        "changed": list(facts.overrides) if facts.base else changed_settings(facts.settings),
        "metrics": columns(facts.rows),
        "dumps": dumps,
        "loads": loads,
        "vocabulary": texts,
        "notes": notes,
    }


def page_data(paths: Sequence[Path], limits: Limits) -> dict[str, Any]:
    """The whole report; raises Fault when one of `paths` is not the folder of a run."""
    runs = [run_data(path, limits) for path in paths]
    _tell_apart(runs)
    keys = sorted({key for run in runs for key in run["metrics"]} - {"step"})
    return {
        "version": r3.__version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": runs,
        "differing": differing_settings([run["settings"] for run in runs]),
        "users": [key for key in keys if _is_users(key)],
        "glossary": {key: formula for key in keys if (formula := _formula(key))},
    }


def _is_users(key: str) -> bool:
    """Whether a user's function reports this metric of training."""
    return key.startswith(("env/", "reward/")) and key.count("/") == 1 and key not in GLOSSARY


def changed_settings(settings: Mapping[str, str]) -> list[str]:
    """Settings that are not R3's defaults, in order; those R3 no longer has are among them."""
    defaults = {name: as_typed(value) for name, value in flatten(Config()).items()}
    return [name for name, value in settings.items() if defaults.get(name) != value]


def render(data: Mapping[str, Any], plotly_js: str) -> str:
    """The page: styles, data, Plotly and our scripts in one file that refers to nothing outside."""
    template = _asset("report.html")
    parts = {
        "STYLES": _asset("report.css"),
        "PLOTLY": plotly_js,
        # "<" must not occur inside the script element: a sample may hold "</script>" or "<!--".
        "DATA": json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPTS": "\n".join(_asset(name) for name in ASSETS if name.endswith(".js")),
        "TITLE": "R3: " + ", ".join(run["name"] for run in data["runs"]).replace("<", "&lt;"),
    }
    pieces = template.split("@@")
    assert set(pieces[1::2]) == set(parts), (
        f"report.html names {pieces[1::2]}, this function {sorted(parts)}"
    )
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _number(value: float | None) -> float | None:
    """Six significant digits are more than a picture shows; counts are compared with each other, so
    they stay exact. NaN and infinity have no JSON.
    """
    if value is None or not math.isfinite(value):
        return None
    return float(value if float(value).is_integer() else f"{value:.6g}")


def _formula(key: str) -> str:
    try:
        return explain(key)
    except UnknownMetricError:  # written by another version
        return ""


def _steps(facts: RunFacts, kind: Kind, limits: Limits) -> list[int]:
    there = dumped_steps(facts.path, kind)
    if not limits.steps:
        return evenly(there, limits.dumps)
    return [step for step in limits.steps if step in there]


def _load(arrays: Arrays, shape: ModelShape | None) -> dict[str, Any]:
    layers, experts = arrays.routed_experts.shape[1], int(arrays.routed_experts.max()) + 1
    numbers = list(range(layers))
    if shape is not None and len(shape.moe_layers) == layers:
        numbers, experts = list(shape.moe_layers), shape.num_experts
    return {"layers": numbers, "tokens": expert_load(arrays.routed_experts, experts)}


def _shape(facts: RunFacts, notes: list[str]) -> ModelShape | None:
    """Sizes of the model, when its config.json is still where the run found it."""
    if not (Path(facts.model_path) / "config.json").exists():
        return None
    try:
        return ModelShape.read(facts.model_path)
    except (OSError, ShapeError) as error:
        notes.append(f"{facts.model_path}: {error}: layers are counted from 0")
        return None


def _tokenizer(facts: RunFacts) -> Any:
    """The tokenizer of the run's model or of its export, if one is on this machine; no download."""
    exports = sorted(RunDir(facts.path).exports.glob("step_*"))
    for folder in (Path(facts.model_path), *exports):
        if (folder / "tokenizer_config.json").exists():
            # What transformers raises for a folder that has changed since the run.
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                return load_tokenizer(folder)
    return None


def _tell_apart(runs: Sequence[dict[str, Any]]) -> None:
    """Runs whose folders have the same name get their whole paths as names."""
    names = [run["name"] for run in runs]
    for run in runs:
        if names.count(run["name"]) > 1:
            run["name"] = run["path"]


def _asset(name: str) -> str:
    return resources.files("r3.tools.report").joinpath("assets", name).read_text(encoding="utf-8")
