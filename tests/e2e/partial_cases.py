"""Steps with a token budget and other weights in each, compared with transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from r3 import assets
from r3.config import Config
from r3.models import Experts
from r3.models.shape import ModelShape
from r3.rewards.scorer import Scorer
from r3.rollout import BudgetError, Collected, ConversationSetup, rollout_source
from r3.run import CheckpointFiles
from r3.runtime.device import Device
from r3.types import Rollout
from tests.errors import message_of
from tests.talkers import CHATTY, Talker, Yardstick, values
from tests.tiny import tiny_config

STEPS = 4


def versions_of(folder: Path, device: Device) -> list[Path]:
    """Checkpoints of the policy versions: the shipped model with more and more noise."""
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


class Loaded:
    """The weights in a folder, as an engine reads them."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._tensors = {
            name: tensor
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        self._shape = shape
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read_blocks(self, _only: object) -> Iterator[tuple[str | Experts, torch.Tensor]]:
        """Yield all tensors, those of the experts of a layer together."""
        shape, tensors = self._shape, self._tensors
        yield from (item for item in tensors.items() if ".experts." not in item[0])
        for layer, part in product(shape.moe_layers, ("linear_fc1.weight", "linear_fc2.weight")):
            key = Experts(layer=layer, first=0, count=shape.num_experts, part=part)
            rows = torch.cat([tensors[name] for name in key.names(shape)])
            yield key, rows.unflatten(0, (shape.num_experts, -1))


class Stepper(Talker):
    """Steps of generation with the weights of each version."""

    def __init__(self, device: Device, config: Config, policy_versions: Sequence[Path]) -> None:
        super().__init__(device, config)
        self.policy_versions = policy_versions

    def take(self, policy_version: int) -> None:
        """Load the weights of a policy version into the engine."""
        weights = Loaded(self.policy_versions[policy_version], self.engine.shape)
        self.engine.load_weights(weights, policy_version=policy_version)
        self.engine.reset_cache()

    def steps(self, config: Config, *, saved: Path | None = None, **env: Any) -> list[Collected]:
        """Sample all steps; with `saved`, partial rollouts go through checkpoint files."""
        settings = replace(self.config.env, **env)
        task = replace(
            self.task,
            conversation_setup=ConversationSetup.of(
                settings, self.task.tokenizer, config.model.path
            ),
            scorer=Scorer.of_function(lambda rollout, _prompt: float(len(rollout.response))),
        )
        rounds: list[Collected] = []
        source = rollout_source(self.engine, task, config, self.mesh)
        for step in range(1, STEPS + 1):
            self.take(step - 1)
            rounds.append(source.collect(step))
            if saved:
                folder = saved / f"step_{step}"
                folder.mkdir(parents=True)
                for name, content in source.state_dict().items():
                    (folder / name).write_bytes(content)
                source = rollout_source(self.engine, task, config, self.mesh)
                source.load_state_dict(CheckpointFiles(folder))
        task.conversation_setup.environments.close()
        return rounds


def copied(rounds: Sequence[Collected]) -> list[list[SimpleNamespace]]:
    """Return all rollouts by step.

    Returns:
        Everything of a rollout, bit for bit, and its reward.
    """
    return [
        [
            SimpleNamespace(
                name=[each.prompt_id, each.group, each.sample_index],
                reward=sample.reward,
                tokens=each.tokens_T.tolist(),
                loss_mask=each.loss_mask_T.tolist(),
                logprobs=each.logprobs_T.tobytes().hex(),
                routes=each.routed_experts.astype(np.int16).tobytes().hex(),
                finish_reason=each.finish_reason,
                segments=[list(segment) for segment in each.segments],
                response=each.response,
            )
            for sample in samples
            for each in (sample.rollout,)
        ]
        for samples, _, _ in rounds
    ]


def kind_of(rounds: Sequence[Collected]) -> SimpleNamespace:
    """Return rollouts and metrics by step."""
    metrics = [
        values({k: part for each in reported for k, part in each.items() if "rollout/" in k})
        for _, _, reported in rounds
    ]
    return SimpleNamespace(rollouts=copied(rounds), metrics=metrics)


def compare(rollouts: Sequence[Rollout], yardsticks: Sequence[Yardstick]) -> SimpleNamespace:
    """Compare each segment with forward passes of its own policy version and of the next one.

    Returns:
        Segments against forward passes of transformers.
        worst: largest difference in the log-probability of a sampled token.
        slots: (token, layer) slots.
        wrong: slots with other experts.
        worst_next, wrong_next: the same for the next policy version, which must differ.
    """
    found = SimpleNamespace(worst=0.0, slots=0, wrong=0, worst_next=0.0, wrong_next=0)
    for rollout in rollouts:
        ends = [*(token for token, _ in rollout.segments[1:]), len(rollout.tokens_T)]
        for (start, policy_version), end in zip(rollout.segments, ends, strict=True):
            own = slice(max(0, start - 1), end - 1)  # rows and targets of tokens start .. end - 1
            current, *later = yardsticks[policy_version:]
            apart_T, wrong_TL = (each[own] for each in current.differences(rollout))
            found.worst = max(found.worst, float(apart_T.max()))
            found.slots += wrong_TL.size
            found.wrong += int(wrong_TL.sum())
            if later:
                apart_T, wrong_TL = (each[own] for each in later[0].differences(rollout))
                found.worst_next = max(found.worst_next, float(apart_T.max()))
                found.wrong_next += int(wrong_TL.sum())
    return found


def budgets(device: Device, *, folder: str, kinds: Sequence[str] = ()) -> SimpleNamespace:
    """Sample steps with short budgets, in kinds of conversation; none are all.

    Returns:
        kinds: steps by kind; rollouts and metrics of each by step, and with one rank `versions`
            (every segment against its own policy version), `complete` (every rollout has tokens - 1
            captured rows) and `saved` (steps that go through checkpoint files give the same).
            The rest only with one rank.
        drop: without staleness, which drops what the budget interrupts.
        off, plenty: without a budget, and with one that no conversation reaches.
        nothing: message of a step in which nothing finishes.
    """
    where = Path(folder) / f"{device.world_size}_{device.rank}"
    where.mkdir()
    file = where / "chatty.py"
    file.write_text(CHATTY)
    config = tiny_config(
        data={
            "path": (str(assets.WORD_PROBLEMS_TRAIN),)
        },  # some of whose answers take several steps
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
    settings: dict[str, dict[str, Any]] = {
        "single": {},
        "chatty": {"path": f"{file}:Chatty", "max_turn_tokens": 20},
        "stops": {"path": f"{file}:Stops", "max_turn_tokens": 20},
    }
    results: dict[str, SimpleNamespace] = {}
    yardsticks = (
        [Yardstick(str(path)) for path in policy_versions] if device.world_size == 1 else []
    )
    for kind in kinds or settings:
        env = settings[kind]
        short = replace(config, rollout=replace(config.rollout, step_token_budget=6))
        budget = short if kind == "stops" else config  # its messages are short
        rounds = stepper.steps(budget, **env)
        results[kind] = kind_of(rounds)
        if not yardsticks:
            continue
        rollouts = [each.rollout for samples, _, _ in rounds for each in samples]
        results[kind].complete = all(
            len(each.routed_experts) == len(each.tokens_T) - 1 and each.routed_experts.min() >= 0
            for each in rollouts
        )
        results[kind].versions = compare(rollouts, yardsticks)
        again = stepper.steps(budget, saved=where / kind, **env)
        results[kind].saved = copied(again) == results[kind].rollouts
    if not yardsticks:
        return SimpleNamespace(kinds=results)

    def dropping(budget: int) -> list[Collected]:
        rollout = replace(config.rollout, max_staleness=0, step_token_budget=budget)
        return stepper.steps(replace(config, rollout=rollout))

    return SimpleNamespace(
        kinds=results,
        drop=kind_of(dropping(24)),
        off=copied(dropping(0)),
        plenty=copied(dropping(60)),
        nothing=message_of(lambda: dropping(2), BudgetError),
    )
