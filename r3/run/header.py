"""The header of a run, printed before its first step, and the summary after its last."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from math import prod

from r3.config import Config
from r3.data.sources import files_of
from r3.metrics.glossary import headlines
from r3.models.freeze import frozen_tensors
from r3.models.lora import adapted_tensors
from r3.models.shape import ModelShape
from r3.rollout.task import Task
from r3.run.finished import result
from r3.run.folder import RunDir
from r3.run.resume import Start
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh


def closing(
    config: Config, run_dir: RunDir, seconds: float, step: int, row: Mapping[str, float]
) -> str:
    """The last line of a run: its duration, its result, its files. `row` is its last one."""
    if config.eval.only:
        figures = ", ".join(
            f"{name} {key.rpartition('/')[2]} {row[key]:.3f}"
            for name, key in headlines(row).items()
        )
        return f"done       in {seconds:.0f} s: {figures}; answers in {run_dir.eval(step)}"
    places = [str(run_dir.hf(step))] if run_dir.hf(step).exists() else []
    places += [
        str(run_dir.metrics),
        *([str(run_dir.tensorboard)] if config.log.tensorboard else []),
    ]
    return f"done       in {seconds:.0f} s: {result(config, run_dir, step)}; {', '.join(places)}"


def reward_text(config: Config) -> str:
    """The reward functions in one line: `math` or `math + 0.1 my.py:short`."""
    reward = config.reward
    if reward.function == ("none",):
        return "of the environment"
    weights = reward.weights or (1.0,) * len(reward.function)
    terms = zip(reward.function, weights, strict=True)
    return " + ".join(
        function if weight == 1.0 else f"{weight:g} {function}" for function, weight in terms
    )


def judge_lines(config: Config) -> list[str]:
    """The models that score responses, one line each."""
    reward, functions = config.reward, config.reward_functions
    judges = {
        "http": f"{reward.model} at {reward.url}",
        "self_judge": "the policy itself (self_judge)",
        "model": f"reward model {reward.model_path}",
    }
    return [f"judge      {text}" for name, text in judges.items() if name in functions]


def frozen_lines(shape: ModelShape, patterns: Sequence[str]) -> list[str]:
    """The lines of the header about the routers and about `train.freeze`."""
    names = frozen_tensors(shape, patterns)
    ending = f".{shape.moe_names.router}.weight"
    router = {name for name in shape.tensor_shapes if name.endswith(ending)}
    trained = "trained" if not router & names else "frozen" if router <= names else "partly frozen"
    count = sum(prod(shape.tensor_shapes[name]) for name in names)
    frozen = f"{count:,} parameters in {len(names)} tensors (train.freeze {' '.join(patterns)})"
    routers = [f"routers    {trained}; no load-balancing loss, expert biases frozen"]
    return [
        *(routers if shape.moe_layers else []),
        *([f"frozen     {frozen}"] if names else []),
    ]


def adapter_lines(config: Config, shape: ModelShape) -> list[str]:
    """The line of the header about adapters."""
    ranks = adapted_tensors(shape, config.lora, config.train.freeze)
    values = sum(rank * sum(shape.tensor_shapes[name]) for name, rank in ranks.items())
    share = f"{values:,} parameters ({values / shape.num_params:.2%})"
    base = "" if config.model.base == "dtype" else f"; base in {config.model.base}"
    return [f"adapters   {share} on {len(ranks)} matrices: {' '.join(config.lora.targets)}{base}"]


def source_lines(paths: Sequence[str], read: Sequence[tuple[str, int]]) -> list[str]:
    """Rows and files per source, if there are several of either."""
    files = [len(files_of(path)) for path, _ in zip(paths, read, strict=False)]
    if len(files) < 2 and max(files, default=0) < 2:
        return []
    return [
        f"{rows} of {label}{f' ({count} files)' if count else ''}"
        for (label, rows), count in zip(read, files, strict=True)
    ]


def header(config: Config, task: Task, mesh: Mesh, device: Device, start: Start) -> list[str]:
    """The lines that describe a run before its first step."""
    shape, parallel = task.shape, config.parallel
    moe = (
        f", {shape.num_experts} experts top-{shape.topk} in {len(shape.moe_layers)} layers"
        if shape.moe_layers
        else ", dense"
    )
    not_loaded = [f"left out   {shape.left_out}, not trained or exported"] if shape.left_out else []
    read_as = [f"read as    bfloat16, from {shape.quantised}"] if shape.quantised else []
    left_out = f"{task.prompts.dropped_too_long} dropped as too long"
    if config.data.drop_duplicates:
        left_out += f", {task.prompts.dropped_duplicates} as duplicates"
    sources = f" from {len(config.data.path)} sources" if len(config.data.path) > 1 else ""
    held_out = (
        ", ".join(f"{len(each.prompts)} held out in {each.settings.name}" for each in task.heldout)
        or "none held out"
    )
    sizes = [len(piece) for piece in parallel.pieces(shape.num_layers)]
    pipeline = f"pp {parallel.pp}"
    if parallel.vpp > 1 or len(set(sizes)) > 1:
        pipeline += f" ({parallel.vpp} piece(s) per stage of {'+'.join(map(str, sizes))} layers)"
    supervised = config.train.objective == "sft"
    what = "conversations" if supervised else "prompts"
    if config.uses_engine:
        engines = f"{mesh.engine_dp.size} engine(s) of {parallel.engine_tp}"
    else:
        engines = "no engine"
    epochs = f" x {n} epochs" if (n := config.train.epochs_per_step) > 1 else ""
    updates = f"{config.train.updates_per_step} update(s){epochs}, {config.train.steps} steps"
    read = task.prompts.read
    environment = config.env.path or config.env.command or config.env.name
    task_line = f"task       {environment}, reward {reward_text(config)}"
    step_lines = [f"step       {config.rollout.prompts_per_step} conversations to learn, {updates}"]
    if not supervised:
        samples = f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} samples"
        replay = (
            f"{config.replay.mode}; missing routes: {config.replay.on_missing}; reference "
            f"{'replays' if config.replay.reference else 'routes live'}; evaluation routes live"
        )
        off = "off (a dense model has no routes)"
        step_lines = [
            f"step       {samples}, {updates}",
            f"replay     {replay if shape.moe_layers else off}",
        ]
    return [
        f"python     {platform.python_version()}, {sys.executable}",
        f"model      {config.model.path} ({shape.num_params / 1e6:,.1f} M parameters{moe})",
        *not_loaded,
        *read_as,
        f"layout     {device.world_size} rank(s) on {device.torch.type}: dp {mesh.dp.size} ep "
        f"{parallel.ep} tp {parallel.tp} "
        f"{pipeline} cp {parallel.cp}; {engines}",
        f"precision  policy {config.model.dtype}"
        f"{f', engine {config.engine.dtype}' if config.uses_engine else ''}"
        f"{', head float32' if config.model.fp32_head else ''}"
        f"{', deterministic kernels' if config.debug.deterministic else ''}",
        *(
            [f"data       {held_out}"]
            if config.eval.only
            else [
                f"data       {len(task.prompts)} {what}{sources} ({left_out}), {held_out}",
                *(f"           {each}" for each in source_lines(config.data.path, read)),
            ]
        ),
        *([] if supervised else [task_line]),
        *([] if config.eval.only else step_lines),
        *judge_lines(config),
        *([f"teacher    {' '.join(teachers)}"] if (teachers := config.algo.teacher) else []),
        f"turns      end with {' or '.join(task.conversation_setup.renderer.end_texts)}",
        *(
            adapter_lines(config, shape)
            if config.lora.rank
            else frozen_lines(shape, config.train.freeze)
        ),
        f"folder     {config.log.dir}",
        *start.notes,
    ]
