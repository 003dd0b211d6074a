"""Everything a run needs before its first step: data read and checked, then devices, engine and policy, then where it resumes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3 import rewards
from r3.config import Config, ConfigError
from r3.data import DataError, Dataset, load_prompts
from r3.device import Device
from r3.hf import CheckpointError
from r3.mesh import Mesh
from r3.resume import ResumeError, Start, open_run
from r3.rollout import Judge
from r3.rundir import RunDir, read_metrics
from r3.shape import ModelShape
from r3.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learnt, read from disk: questions, held-out questions, judge, tokenizer, sizes of the model.

    `max_model_len` is the longest conversation any question can become.
    """

    prompts: Dataset
    heldout: tuple[Prompt, ...]
    judge: Judge
    tokenizer: Any
    shape: ModelShape
    max_model_len: int


def read_task(config: Config) -> Task:
    """Read and check model facts, tokenizer, data and reward. Touches no device.

    Raises:
        ConfigError, DataError: what a user can mend; each names field or row, rule and fix.
    """
    from transformers import AutoTokenizer

    shape = ModelShape.read(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    room = config.longest_prompt(shape.max_position_embeddings)
    data = config.data

    def read(path: str) -> Dataset:
        return load_prompts(
            path,
            tokenizer,
            prompt_key=data.prompt_key,
            answer_key=data.answer_key,
            system_prompt=data.system_prompt,
            max_prompt_tokens=data.max_prompt_tokens or room,
            on_too_long=data.on_too_long,
        )

    prompts = read(data.path)
    heldout = read(config.eval.path).prompts if config.eval.path else ()
    heldout = heldout[: config.eval.max_prompts or None]
    function = rewards.resolve(config.reward.function)

    def judge(rollout: Rollout, prompt: Prompt) -> float:
        return rewards.score(function, rollout.response, prompt, rollout.member)

    longest = max(len(prompt.tokens_T) for prompt in (*prompts.prompts, *heldout))
    return Task(
        prompts=prompts,
        heldout=heldout,
        judge=judge,
        tokenizer=tokenizer,
        shape=shape,
        max_model_len=config.engine.max_model_len or longest + config.rollout.max_response_tokens,
    )


@contextmanager
def refusing() -> Iterator[None]:
    """What a user can mend ends the run here: one message on rank 0, exit code 2, nothing written."""
    try:
        yield
    except (ConfigError, DataError, ResumeError, CheckpointError) as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(error, file=sys.stderr, flush=True)
        sys.exit(2)


def begin(config: Config) -> tuple[Task, RunDir, Start]:
    """Read the task, then make the run's folder ready to start or to resume.

    A run that has made all its steps ends here, in a second, with its result: exit code 0.
    """
    speaks = int(os.environ.get("RANK", "0")) == 0
    run_dir = RunDir(Path(config.log.dir))
    with refusing():
        task = read_task(config)
        start = open_run(run_dir, config, writes=speaks)
    exported = not config.checkpoint.export or run_dir.hf(config.train.steps).exists()
    if start.found is not None and start.found.step >= config.train.steps and exported:
        if speaks:
            print(_finished(run_dir, start.found.step), flush=True)
        sys.exit(0)
    return task, run_dir, start


def _finished(run_dir: RunDir, step: int) -> str:
    accuracy = [
        f"{key.split('/')[1]} accuracy {rows[0][key]:.3f} -> {rows[-1][key]:.3f}"
        for rows in [read_metrics(run_dir.metrics)]
        for key in rows[-1]
        if key.startswith("eval/") and key.endswith("/accuracy") and key in rows[0]
    ]
    return (
        f"{run_dir.path} is finished: {', '.join([f'{step} steps', *accuracy])}. "
        "Give a larger --train.steps to go on, or another --log.dir to start afresh."
    )


def header(config: Config, task: Task, mesh: Mesh, device: Device, start: Start) -> list[str]:
    """What a person should know before the first step, a line each."""
    shape, parallel = task.shape, config.parallel
    moe = (
        f", {shape.num_experts} experts top-{shape.topk} in {len(shape.moe_layers)} layers"
        if shape.moe_layers
        else ", dense"
    )
    mtp = (
        [f"left out   {shape.num_mtp_layers} multi-token-prediction layers: neither trained nor exported"]
        if shape.num_mtp_layers
        else []
    )
    replay = config.replay.mode if shape.moe_layers else "off (a dense model has no routes)"
    return [
        f"model      {config.model.path} ({shape.num_params / 1e6:,.1f} M parameters{moe})",
        *mtp,
        f"layout     {device.world_size} ranks on {device.torch.type}: dp {mesh.dp.size} ep {parallel.ep} tp {parallel.tp} "
        f"pp {parallel.pp} cp {parallel.cp}; {mesh.engine_dp.size} engines of {parallel.engine_tp}",
        f"precision  policy {config.model.dtype}, engine {config.engine.dtype}"
        f"{', head float32' if config.model.fp32_head else ''}"
        f"{', deterministic kernels' if config.debug.deterministic else ''}",
        f"data       {len(task.prompts)} prompts ({task.prompts.dropped_too_long} dropped as too long), "
        f"{len(task.heldout)} held out",
        f"step       {config.rollout.prompts_per_step} prompts x {config.rollout.group_size} answers, "
        f"{config.train.updates_per_step} update(s), {config.train.steps} steps",
        f"replay     {replay}; missing routes: {config.replay.on_missing}; reference "
        f"{'replays' if config.replay.reference else 'routes live'}; evaluation routes live",
        "routers    trained; no load-balancing loss, expert biases frozen",
        f"folder     {config.log.dir}",
        *start.said,
    ]
