"""Steps under a token budget with the real engine and other weights in each, compared with
transformers' under those weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from r3 import assets
from r3.config import Config
from r3.handover.rollouts import PackingSpec, distribute
from r3.rewards.scorer import Scorer
from r3.rollout.conversation import ConversationSetup
from r3.rollout.partial import from_checkpoint
from r3.rollout.scored import score_all
from r3.rollout.step import BudgetError, RolloutSource, StepRollouts
from r3.routing.ledger import captured_rows
from r3.runtime.device import Device
from r3.types import Rollout
from tests.e2e.env_cases import CHATTY, Talker, Yardstick
from tests.tiny import tiny_config

STEPS = 4


def versions_of(folder: Path, device: Device) -> list[Path]:
    """Checkpoints of the versions before the steps: the shipped model, each time moved a little."""
    folders = []
    for policy_version in range(STEPS):
        path = folder / f"version_{device.rank}_{device.world_size}_{policy_version}"
        shutil.copytree(assets.TINY_MOE, path)
        generator = torch.Generator().manual_seed(policy_version)
        for file in path.glob("*.safetensors"):
            tensors = {
                name: tensor
                + policy_version * 0.004 * torch.randn(tensor.shape, generator=generator)
                for name, tensor in sorted(load_file(file).items())
            }
            save_file(tensors, file, metadata={"format": "pt"})
        folders.append(path)
    return folders


class Stepper(Talker):
    """Steps of generation with the weights of each version."""

    def __init__(self, device: Device, config: Config, policy_versions: Sequence[Path]) -> None:
        super().__init__(device, config)
        self.policy_versions = policy_versions

    def take(self, policy_version: int) -> None:
        tensors = {
            name: tensor
            for file in self.policy_versions[policy_version].glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.engine.load_weights(shapes, iter(tensors.items()), policy_version=policy_version)
        self.engine.reset_cache()

    def steps(self, config: Config, *, saved: Path | None = None, **env: Any) -> list[StepRollouts]:
        """The steps; with `saved` what one leaves to the next goes through a checkpoint's files."""
        settings = replace(self.config.env, **env)
        task = replace(
            self.task,
            conversation_setup=ConversationSetup.of(
                settings, self.task.tokenizer, config.model.path
            ),
            scorer=Scorer.of_function(lambda rollout, _prompt: float(len(rollout.response))),
        )
        rounds: list[StepRollouts] = []
        source = RolloutSource(self.engine, task, config, self.mesh)
        for step in range(1, STEPS + 1):
            self.take(step - 1)
            rounds.append(source.collect(step))
            if saved:
                folder = saved / f"step_{step}"
                folder.mkdir(parents=True)
                for name, content in source.state_files().items():
                    (folder / name).write_bytes(content)
                source = RolloutSource(self.engine, task, config, self.mesh)
                source.restore(folder)
        task.conversation_setup.environments.close()
        return rounds


def fingerprint(rollout: Rollout) -> list[Any]:
    """Everything of a rollout, bit for bit."""
    return [
        rollout.tokens_T.tolist(),
        rollout.loss_mask_T.tolist(),
        rollout.logprobs_T.tobytes().hex(),
        rollout.routed_experts.astype(np.int16).tobytes().hex(),
        rollout.finish_reason,
        rollout.segments,
        rollout.response,
    ]


def everything(rounds: Sequence[StepRollouts]) -> list[Any]:
    return [
        [
            [each.prompt_id, each.group, each.sample_index, reward, fingerprint(each)]
            for each, reward in zip(made.rollouts.rollouts, made.rollouts.rewards, strict=True)
        ]
        for made in rounds
    ]


def metrics(made: StepRollouts) -> dict[str, float]:
    parts = {
        name: part for each in made.metrics for name, part in each.items() if "rollout/" in name
    }
    values = {name: type(part).reduce([part]) for name, part in parts.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


@torch.no_grad()
def compare(rollouts: Sequence[Rollout], yardsticks: Sequence[Yardstick]) -> dict[str, float]:
    """Each segment against a forward pass of the version it says it is of; and against the next
    one's, which must be others.
    """
    found = {"worst": 0.0, "slots": 0, "wrong": 0, "elsewhere": 0.0, "wrong_elsewhere": 0}
    for rollout in rollouts:
        tokens = torch.from_numpy(rollout.tokens_T)[None]
        ends = [*(token for token, _ in rollout.segments[1:]), len(rollout.tokens_T)]
        for (start, policy_version), end in zip(rollout.segments, ends, strict=True):
            for shift in (0, 1):
                if policy_version + shift >= len(yardsticks):
                    continue
                output = yardsticks[policy_version + shift].model(tokens, output_router_logits=True)
                logprobs = (
                    output.logits[0, :-1]
                    .log_softmax(-1)
                    .gather(1, tokens[0, 1:, None])[:, 0]
                    .numpy()
                )
                apart = abs(logprobs - rollout.logprobs_T[1:]) * rollout.loss_mask_T[1:]
                first, last = (
                    max(0, start - 1),
                    end - 1,
                )  # rows and targets of tokens start .. end - 1
                worst = float(apart[first:last].max())
                wrong, slots = 0, 0
                for layer, scores in enumerate(output.router_logits):
                    k = rollout.routed_experts.shape[-1]
                    chosen = scores.topk(k, dim=-1).indices.sort(-1).values[:-1].numpy()
                    given = np.sort(rollout.routed_experts[:, layer], -1)
                    wrong += int((chosen != given).any(-1)[first:last].sum())
                    slots += last - first
                if shift:
                    found["elsewhere"] = max(found["elsewhere"], worst)
                    found["wrong_elsewhere"] += wrong
                else:
                    found["worst"] = max(found["worst"], worst)
                    found["slots"] += slots
                    found["wrong"] += wrong
    return found


def budgets(device: Device, *, folder: str) -> dict[str, Any]:
    """Steps of short budgets, in every kind of conversation that differs under one."""
    where = Path(folder) / f"{device.world_size}_{device.rank}"
    where.mkdir()
    file = where / "chatty.py"
    file.write_text(CHATTY)
    config = tiny_config(
        engine={"max_model_len": 320, "kv_cache_gib": 0.0625},
        rollout={
            "prompts_per_step": 4,
            "group_size": 2,
            "max_response_tokens": 60,
            "step_token_budget": 14,
            "max_staleness": 2,
        },
    )
    policy_versions = versions_of(where, device)
    stepper = Stepper(device, config, policy_versions)
    kinds: dict[str, dict[str, Any]] = {
        "single": {},
        "chatty": {"path": f"{file}:Chatty", "max_turn_tokens": 20},
        "stops": {"path": f"{file}:Stops", "max_turn_tokens": 20},
    }
    found: dict[str, Any] = {}
    yardsticks = (
        [Yardstick(str(path)) for path in policy_versions] if device.world_size == 1 else []
    )
    for kind, env in kinds.items():
        short = replace(config, rollout=replace(config.rollout, step_token_budget=6))
        budget = short if kind == "stops" else config  # its messages are short
        rounds = stepper.steps(budget, **env)
        found[kind] = {"all": everything(rounds), "metrics": [metrics(made) for made in rounds]}
        if not yardsticks:
            continue
        rollouts = [each for made in rounds for each in made.rollouts.rollouts]
        found[kind] |= compare(rollouts, yardsticks)
        found[kind]["whole"] = all(
            len(each.routed_experts) == len(each.tokens_T) - 1 and each.routed_experts.min() >= 0
            for each in rollouts
        )
        again = stepper.steps(budget, saved=where / kind, **env)
        found[kind]["saved"] = everything(again) == found[kind]["all"]
    if not yardsticks:
        return found

    # Two engines' files for one, and one's for two: every group is there once.
    left = from_checkpoint(
        where / "single" / "step_2",
        stepper.task.prompts.prompts,
        engine=0,
        engines=1,
        is_leader=True,
    )
    parts = [
        from_checkpoint(
            where / "single" / "step_2",
            stepper.task.prompts.prompts,
            engine=i,
            engines=2,
            is_leader=True,
        )
        for i in range(2)
    ]
    found["groups"] = [left.groups, *(part.groups for part in parts)]

    dropping = replace(
        config, rollout=replace(config.rollout, max_staleness=0, step_token_budget=24)
    )
    rounds = stepper.steps(dropping)
    found["drop"] = {"all": everything(rounds), "metrics": [metrics(made) for made in rounds]}
    # A budget that nobody reaches changes nothing at all.
    for name, budget in (("off", 0), ("plenty", 60)):
        unbounded = replace(
            config, rollout=replace(config.rollout, max_staleness=0, step_token_budget=budget)
        )
        found[name] = everything(stepper.steps(unbounded))
    try:
        stepper.steps(replace(dropping, rollout=replace(dropping.rollout, step_token_budget=2)))
        found["nothing"] = "nothing was raised"
    except BudgetError as error:
        found["nothing"] = str(error)

    # What the trainer takes: the last step of "single" has rollouts of several versions.
    rounds = stepper.steps(config)
    scored = [score_all(made.rollouts, made.rewards, config) for made in rounds][-1]
    current = STEPS - 1
    (batch,), _ = distribute(
        scored,
        stepper.mesh,
        stepper.task.shape,
        PackingSpec(micro_batch_tokens=512, policy_versions=range(current - 2, current + 1)),
    )
    old = {item.index for item in scored if item.rollout.policy_version < current}
    marked = {
        index
        for micro_batch in batch.micro_batches
        for index, (start, end) in zip(
            micro_batch.rollout_ids, pairwise(micro_batch.cu_seqlens), strict=True
        )
        if index >= 0 and not bool(micro_batch.current_N[start:end].any())
    }
    found["marked"] = [sorted(old), sorted(marked), len(scored)]
    rows = captured_rows([item.rollout for item in scored])
    found["captured"] = [rows["routing/rows_expected"].value, rows["routing/rows_captured"].value]
    try:
        spec = PackingSpec(micro_batch_tokens=512, policy_versions=(current,))
        distribute(scored, stepper.mesh, stepper.task.shape, spec)
        found["too old"] = "nothing was raised"
    except RuntimeError as error:
        found["too old"] = f"{type(error).__name__}: {error}"
    return found
