"""The header of a run, printed before its first step."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from math import prod

from r3 import extras
from r3.config import Config, EnvConfig, RewardConfig
from r3.models.shape import ModelShape
from r3.rollout.task import Task
from r3.run.open import Opened
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh
from r3.tools.dry_run import left_out
from r3.tools.rows.sources import files_of


def frozen_lines(shape: ModelShape, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """The lines of the header about the routers and about `train.freeze`."""
    names = extras.frozen_tensors(shape, patterns)
    ending = f".{shape.moe_names.router}.weight"
    router = {name for name in shape.tensor_shapes if name.endswith(ending)}
    trained = "trained" if not router & names else "frozen" if router <= names else "partly frozen"
    count = sum(prod(shape.tensor_shapes[name]) for name in names)
    frozen = f"{count:,} parameters in {len(names)} tensors (train.freeze {' '.join(patterns)})"
    routers = f"{trained}; no load-balancing loss, expert biases frozen"
    return [("routers", routers if shape.moe_layers else ""), ("frozen", frozen if names else "")]


def adapter_text(config: Config, shape: ModelShape) -> str:
    """The adapters in one line."""
    ranks = extras.adapter_plan().ranks_of(config, shape)
    values = sum(rank * sum(shape.tensor_shapes[name]) for name, rank in ranks.items())
    share = f"{values:,} parameters ({values / shape.num_params:.2%})"
    base = f"; base in {config.model.base}" if config.quantises_base else ""
    of_target = extras.adapter_plan().matrices(shape)
    there = dict.fromkeys(map(of_target.__getitem__, ranks))
    return f"{share} on {len(ranks)} matrices: {' '.join(there)}{base}"


def source_lines(paths: Sequence[str], read: Sequence[tuple[str, int]]) -> list[str]:
    """Rows and files per source, if there are several of either."""
    files = [len(files_of(path)) for path, _ in zip(paths, read, strict=False)]
    if len(files) < 2 and max(files, default=0) < 2:
        return []
    return [
        f"{rows} of {label}{f' ({count} files)' if count > 1 else ''}"
        for (label, rows), count in zip(read, files, strict=True)
    ]


def header(config: Config, task: Task, mesh: Mesh, device: Device, opened: Opened) -> list[str]:
    """The lines that describe a run before its first step."""
    shape, prompts = task.shape, task.prompts
    is_moe, samples = bool(shape.moe_layers), not config.learns_rows
    moe = ", dense"
    if is_moe:
        layers = f"in {len(shape.moe_layers)} layers"
        moe = f", {shape.num_experts} experts top-{shape.topk} {layers}"
    held_out = (
        ", ".join(f"{len(each.prompts)} held out in {each.settings.name}" for each in task.heldout)
        or "none held out"
    )
    data = held_out
    if config.trains:
        sources = f" from {len(config.data.path)} sources" if len(config.data.path) > 1 else ""
        dropped = f"{prompts.dropped_too_long} dropped as too long"
        if config.data.drop_duplicates:
            dropped += f", {prompts.dropped_duplicates} as duplicates"
        what = "prompts" if samples else "conversations"
        data = f"{len(prompts)} {what}{sources} ({dropped}), {held_out}"
    judges = {
        "http": f"{config.reward.model} at {config.reward.url}",
        "self_judge": "the policy itself (self_judge)",
        "model": f"reward model {config.reward.model_path}",
    }
    named = config.environments if config.trains else (config.env,)
    environments = dict.fromkeys(env.path or env.command or env.name for env in named)
    task_line = f"{' and '.join(environments)}, reward {_rewards(config.reward)}"
    precision = f"policy {config.model.dtype}"
    precision += f", engine {config.engine.dtype}" if config.uses_engine else ""
    precision += ", head float32" if config.model.fp32_head else ""
    precision += ", deterministic kernels" if config.debug.deterministic else ""
    lines = [
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("model", f"{shape.source} ({shape.num_params / 1e6:,.1f} M parameters{moe})"),
        ("left out", f"{absent}, not trained or exported" if (absent := left_out(shape)) else ""),
        ("kept", "indexers, in exports as they were, not trained" if shape.index_topk else ""),
        ("read as", f"bfloat16, from {shape.quantised}" if shape.quantised else ""),
        ("layout", _layout(config, task, mesh, device)),
        ("precision", precision),
        ("data", data),
        *(("", line) for line in source_lines(config.data.path, prompts.read)),
        ("task", task_line if samples else ""),
        ("endpoint", _reached(config.env) if samples else ""),
        ("step", _step(config) if config.trains else ""),
        ("replay", _replay(config, is_moe) if samples and config.trains else ""),
        *(("judge", text) for name, text in judges.items() if name in config.reward_functions),
        ("teacher", " ".join(config.checkpoints[1:])),
        ("turns", f"end with {' or '.join(task.conversation_setup.renderer.end_texts)}"),
        *(
            [("adapters", adapter_text(config, shape))]
            if config.uses_lora
            else frozen_lines(shape, config.train.freeze)
        ),
        ("folder", config.log.dir),
    ]
    return [*(f"{label:11}{text}" for label, text in lines if text), *opened.notes]


def _rewards(settings: RewardConfig) -> str:
    """The reward functions in one line: `math` or `math + 0.1 my.py:short`."""
    if settings.function == ("none",):
        return "of the environment"
    weights = settings.weights or (1.0,) * len(settings.function)
    return " + ".join(
        function if weight == 1.0 else f"{weight:g} {function}"
        for function, weight in zip(settings.function, weights, strict=True)
    )


def _reached(env: EnvConfig) -> str:
    """Say who can reach the endpoint of agents, where that is more than this machine."""
    if env.listen == EnvConfig().listen:
        return ""
    told = f", told to agents as {env.advertise}" if env.advertise else ""
    return (
        f"listens on {env.listen}{told}: who reaches that address can call the model with the "
        "token of an episode, unencrypted"
    )


def _layout(config: Config, task: Task, mesh: Mesh, device: Device) -> str:
    parallel = config.parallel
    sizes = [len(piece) for piece in parallel.pieces(task.shape.num_layers)]
    pipeline = f"pp {parallel.pp}"
    if parallel.vpp > 1 or len(set(sizes)) > 1:
        pipeline += f" ({parallel.vpp} piece(s) per stage of {'+'.join(map(str, sizes))} layers)"
    engines = "no engine"
    if config.uses_engine:
        engines = f"{mesh.engine_dp.size} engine(s) of {mesh.engine_tp.size}"
    return (
        f"{device.world_size} rank(s) on {device.torch.type}: dp {mesh.dp.size} ep {parallel.ep} "
        f"tp {parallel.tp} {pipeline} cp {parallel.cp}; {engines}"
    )


def _step(config: Config) -> str:
    rollout, train = config.rollout, config.train
    sampled = f"{rollout.prompts_per_step} prompts x {rollout.group_size} samples"
    if config.learns_rows:
        sampled = f"{rollout.prompts_per_step} conversations to learn"
    epochs = f" x {train.epochs_per_step} epochs" if train.epochs_per_step > 1 else ""
    return f"{sampled}, {train.updates_per_step} update(s){epochs}, {train.steps} steps"


def _replay(config: Config, is_moe: bool) -> str:
    if not is_moe:
        return "off (a dense model has no routes)"
    reference = "replays" if config.replay.reference else "routes live"
    return (
        f"{config.replay.mode}; missing routes: {config.replay.on_missing}; reference {reference}; "
        "evaluation routes live"
    )
