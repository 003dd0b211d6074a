"""Steps with a token budget and other weights in each, compared with transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
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
from r3.partial import from_state_dict
from r3.rewards.scorer import Scorer
from r3.rollout import BudgetError, Collected, ConversationSetup, rollout_source
from r3.routing import captured_rows
from r3.run import CheckpointFiles
from r3.runtime.device import Device
from r3.sync import PackingSpec, distribute
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
        groups: groups in a checkpoint, as one engine and as the first and second of two read them.
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
        complete = all(
            len(each.routed_experts) == len(each.tokens_T) - 1 and each.routed_experts.min() >= 0
            for each in rollouts
        )
        again = stepper.steps(budget, saved=where / kind, **env)
        results[kind].versions = compare(rollouts, yardsticks)
        results[kind].complete = complete
        results[kind].saved = copied(again) == results[kind].rollouts
    if not yardsticks:
        return SimpleNamespace(kinds=results)

    # The file of one engine, read by one and by two: every group is there once.
    folder = where / "single" / "step_2"
    files = CheckpointFiles(folder)
    left = from_state_dict(files, engine=0, engines=1, is_leader=True)
    parts = [from_state_dict(files, engine=i, engines=2, is_leader=True) for i in range(2)]
    groups = [left.groups, *(part.groups for part in parts)]

    dropping = replace(
        config, rollout=replace(config.rollout, max_staleness=0, step_token_budget=24)
    )
    drop = kind_of(stepper.steps(dropping))
    # A budget that no conversation reaches changes nothing.
    off, plenty = (
        copied(
            stepper.steps(
                replace(dropping, rollout=replace(dropping.rollout, step_token_budget=budget))
            )
        )
        for budget in (0, 60)
    )
    tiny = replace(dropping, rollout=replace(dropping.rollout, step_token_budget=2))
    nothing = message_of(lambda: stepper.steps(tiny), BudgetError)
    return SimpleNamespace(
        kinds=results,
        groups=groups,
        drop=drop,
        off=off,
        plenty=plenty,
        nothing=nothing,
        trained=trained(stepper, config),
    )


def trained(stepper: Stepper, config: Config) -> SimpleNamespace:
    """Distribute the last step with rollouts that an older policy version began.

    Returns:
        A step with old rollouts as the trainer takes it.
        old, marked: rollouts that an older version began, and those without a current token.
        expected, captured: rows of routes.
        too_old: message where only the newest version is allowed.
    """
    by_version = dict(enumerate(samples for samples, _, _ in stepper.steps(config)))
    current = max(
        version
        for version, samples in by_version.items()
        if any(each.rollout.policy_version < version for each in samples)
    )
    samples = by_version[current]
    (batch,), _ = distribute(
        samples,
        stepper.mesh,
        stepper.task.shape,
        PackingSpec(micro_batch_tokens=512, policy_versions=range(current - 2, current + 1)),
    )
    keys = sorted(each.rollout.key for each in samples)
    rollouts = [each.rollout for each in samples]
    old = {keys.index(each.key) for each in rollouts if each.policy_version < current}
    marked = {
        index
        for micro_batch in batch
        for index, (start, end) in zip(
            micro_batch.rollout_ids, pairwise(micro_batch.cu_seqlens), strict=True
        )
        if index >= 0 and not bool(micro_batch.current_N[start:end].any())
    }
    rows = captured_rows(rollouts)
    newest = PackingSpec(micro_batch_tokens=512, policy_versions=(current,))
    return SimpleNamespace(
        old=sorted(old),
        marked=sorted(marked),
        count=len(samples),
        expected=rows["routing/rows_expected"].value,
        captured=rows["routing/rows_captured"].value,
        too_old=message_of(
            lambda: distribute(samples, stepper.mesh, stepper.task.shape, newest), RuntimeError
        ),
    )
