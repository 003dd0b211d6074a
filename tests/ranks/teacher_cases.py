"""Teachers of other sizes than the policy, under many layouts and by transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from r3.algo.packing import with_advantages
from r3.config import with_values
from r3.layers import local_tokens
from r3.metrics import Mean
from r3.policy import Passes, Policy, policy_loss
from r3.runtime.device import Device
from r3.sync import PackingSpec, distribute
from r3.types import Batch, Rollout
from tests.policies import (
    LENGTHS,
    Parts,
    batches_of,
    build,
    one_update,
    samples_of,
    train_step,
    weights_of,
)
from tests.tiny import random_rollouts, tiny_config

TEMPERATURE = 0.7
SOURCES = ("a.jsonl", "b.jsonl")


def taught(
    device: Device,
    *,
    model: str,
    teachers: list[str],
    parallel: dict[str, int],
    objective: str = "distill",
    rank: int = 0,
) -> SimpleNamespace:
    """Make one update of random rollouts of two sources.

    Returns:
        One update with teachers.
        logprobs: sum of the teachers' log-probabilities over this rank's loss tokens.
        kl: sum of log pi_old - log pi_teacher over this rank's loss tokens, and their number.
        by_hand: the advantage that the loss used equals the formula; only on one rank.
        error: largest difference of a teacher's log-probability from transformers; only on one
            rank.
        again: a second pass, after the update, gives the same bits.
    """
    config = tiny_config(
        model,
        parallel=parallel,
        data={"path": SOURCES},
        rollout={"temperature": TEMPERATURE},
        algo={"teacher": tuple(teachers), "teacher_coef": 0.5},
        train={"objective": objective, "lr": 1e-3},
        lora={"rank": rank},
    )
    mesh, policy = build(device, config)
    assert policy.teachers is not None
    rollouts = [
        replace(rollout, prompt_id=f"{SOURCES[index % 2]}:{index}")
        for index, rollout in enumerate(random_rollouts(policy.shape, LENGTHS))
    ]
    spec = PackingSpec(micro_batch_tokens=128, on_missing="live", layers=policy.replay.layers)
    (batch,), _ = distribute(samples_of(mesh, rollouts), mesh, policy.shape, spec)
    batch = with_advantages(batch, 0.3 * torch.arange(len(rollouts)))
    scored = policy.teachers.logprobs(batch)
    found = SimpleNamespace()
    if mesh.world.size == 1:
        found.by_hand = _advantages_by_hand(policy, batch, scored)
        found.error = _error(rollouts, teachers, batch, scored)
    update, metrics = one_update(policy, batch, Passes(teacher=scored), total_updates=1)
    found.logprobs = 0.0
    for logprobs_N, one in zip(scored, batch if policy.reports else (), strict=False):
        mask_N = local_tokens(one, mesh.cp, device.torch).loss_mask_N
        found.logprobs += float((logprobs_N * mask_N).sum())
    kl = metrics.get("loss/kl_teacher", Mean(0.0, 0.0))
    found.kl, found.grad_norm = (kl.total, kl.count), update.grad_norm
    found.again = all(map(torch.equal, scored, policy.teachers.logprobs(batch)))
    return found


def bypass(device: Device, *, model: str, teachers: list[str]) -> None:
    """Make a step with `train_step`, and the same one with advantages made here."""
    config = tiny_config(
        model,
        algo={"teacher": tuple(teachers[:1]), "correction": "bypass", "loss": "ppo_clip"},
        train={"objective": "distill", "lr": 1e-3, "updates_per_step": 2},
        replay={"shadow_every": 0},
    )
    mesh, policy = build(device, config)
    batches = batches_of(mesh, policy.shape, num_updates=2)
    batches = [_near_the_engine(policy, batch) for batch in batches]
    assert policy.teachers is not None
    start = weights_of(policy)
    parts = Parts()
    train_step(policy, batches, config, report=parts.report)
    after = weights_of(policy)

    # By hand: log pi_teacher - log mu is the advantage of the token, and there is no teacher.
    plain = with_values(config, {"algo.teacher": (), "train.objective": "rl"})
    other = Policy(plain, device, mesh, policy.shape)
    total = number = 0.0
    for batch in batches:
        taught = policy.teachers.logprobs(batch)
        advantages = [
            (teacher_N - one.rollout_logprobs_N) * one.loss_mask_N
            for teacher_N, one in zip(taught, batch, strict=True)
        ]
        total -= float(sum(each.sum() for each in advantages))
        number += batch[0].num_loss_tokens
        one_update(
            other,
            tuple(
                replace(one, advantages_N=advantages_N)
                for one, advantages_N in zip(batch, advantages, strict=True)
            ),
            total_updates=2 * config.train.steps,
        )
    by_hand = [slot.tensor for slot in other.slots]
    # float32 forwards of two programs of the same step: 1e-5 of the way of the weights. The
    # advantage of the second update against the policy of that update is off by a tenth.
    way = _distance(start, after)
    assert way > 1e-3 and _distance(by_hand, after) < 1e-4 * way
    # Mean of log mu - log pi_teacher over the loss tokens of both updates.
    assert math.isclose(parts.row()["loss/kl_teacher"], total / number, rel_tol=1e-5)


def _near_the_engine(policy: Policy, batch: Batch) -> Batch:
    """The batch with log-probabilities of an engine that is near the policy."""
    scores = policy.score(batch, mode="replay").logprobs
    return tuple(
        replace(
            one,
            rollout_logprobs_N=(logprobs_N + 0.05 * torch.sin(37 * logprobs_N)) * one.loss_mask_N,
        )
        for one, logprobs_N in zip(batch, scores, strict=True)
    )


def _distance(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    squares = [float((a - b).double().square().sum()) for a, b in zip(first, second, strict=True)]
    return math.sqrt(sum(squares))


def _advantages_by_hand(policy: Policy, batch: Batch, scored: list[torch.Tensor]) -> bool:
    """Whether the loss's gradient is -A / (number of loss tokens), A from its formula."""
    config, old = policy.config, policy.score(batch, mode="replay").logprobs
    for number, micro_batch in enumerate(batch):
        tokens = local_tokens(micro_batch, policy.mesh.cp, policy.device.torch)
        now_N = old[number].clone().requires_grad_()
        loss, _ = policy_loss(
            config,
            tokens,
            policy.mesh.cp,
            now_N,
            Passes(old=old, teacher=scored),
            number=number,
        )
        (gradient_N,) = torch.autograd.grad(loss, now_N)
        advantages_N = 0.5 * (scored[number] - old[number])
        if config.train.objective == "rl":
            advantages_N = advantages_N + micro_batch.advantages_N
        expected_N = -advantages_N * micro_batch.loss_mask_N / batch[0].num_loss_tokens
        # float32: the loss takes exp of a difference that is 0
        if not torch.allclose(gradient_N, expected_N, rtol=1e-5, atol=1e-8):
            return False
    return True


def _error(
    rollouts: list[Rollout], teachers: list[str], batch: Batch, scored: list[torch.Tensor]
) -> float:
    from transformers import AutoModelForCausalLM

    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in teachers
    ]
    worst = 0.0
    for number, micro_batch in enumerate(batch):
        for index, (start, _) in zip(
            micro_batch.rollout_ids, pairwise(micro_batch.cu_seqlens), strict=True
        ):
            if index < 0:
                continue
            ids = torch.from_numpy(rollouts[index].tokens_T)
            with torch.no_grad():
                logits = models[index % len(models)](ids[None]).logits[0, :-1]
            expected = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            own = scored[number][start : start + len(expected)]
            worst = max(worst, float((own - expected).abs().max()))
    return worst
