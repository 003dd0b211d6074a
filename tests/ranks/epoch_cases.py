"""Several epochs over the samples of a step, against a loop that is written out here."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from r3.algo.advantage import Reward
from r3.config import with_values
from r3.policy import Policy
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh, cuda_type_names
from r3.types import Batch, MicroBatch
from tests.policies import (
    LENGTHS,
    Parts,
    batches_of,
    build,
    policy_of,
    step_rewards,
    train_step,
    watch_scores,
    weights_of,
    zero_gradients,
)
from tests.tiny import tiny_config

_LR = 3e-3


def epochs(
    device: Device, *, model: str, updates: int, count: int, parallel: dict[str, int]
) -> SimpleNamespace:
    """Make a step with `train_step`, and loops over the same batches.

    Returns:
        A step of several epochs, by R3 and by hand.
        way: largest change of a weight by the step.
        off_by: largest difference between the weights of both.
        off_by_once: the same, if the loop makes one epoch only.
        off_by_rescored: the same, if the loop scores pi_old again before each epoch.
        off_by_live: the same, if the loop lets routers choose after the first epoch.
        scored: micro-batches that R3 scored before the updates.
        of_first, of_step: micro-batches of the first update, and of an epoch.
        updates: that the policy counts.
        row: metrics of the step.
        clipped: share of clipped loss tokens by epoch, by hand.
    """
    config = tiny_config(
        model,
        parallel=parallel,
        algo={"loss": "ppo_clip", "clip_low": 0.1, "clip_high": 0.15},
        train={"lr": _LR, "updates_per_step": updates, "epochs_per_step": count},
        replay={"shadow_every": 0},
    )
    mesh, policy = build(device, config)
    batches = batches_of(mesh, policy.shape, num_updates=updates, micro_batch_tokens=96)
    start = weights_of(policy)
    scored, parts = watch_scores(policy), Parts()
    train_step(policy, batches, config, rewards=_rewards(), report=parts.report)
    after = weights_of(policy)

    def off_by(**how: Any) -> tuple[float, list[float]]:
        other = policy_of(device, mesh, config)
        clipped = by_hand(other, batches, **how)
        return _distance(weights_of(other), after), clipped

    same, clipped = off_by(count=count)
    return SimpleNamespace(
        way=_distance(start, after),
        off_by=same,
        off_by_once=off_by(count=1)[0],
        off_by_rescored=off_by(count=count, rescored=True)[0],
        off_by_live=off_by(count=count, live=True)[0],
        scored=sum(number for mode, number in scored if mode == "replay"),
        of_first=len(batches[0]),
        of_step=sum(map(len, batches)),
        updates=policy.update_number,
        row=parts.row(),
        clipped=clipped,
    )


def by_hand(
    policy: Policy,
    batches: Sequence[Batch],
    *,
    count: int,
    rescored: bool = False,
    live: bool = False,
) -> list[float]:
    """PPO over the batches, `count` times; returns the share of clipped tokens by epoch.

    The forward and the optimizer are the policy's; what is made with which numbers is written here.
    """
    algo = policy.config.algo
    low, high = 1 - algo.clip_low, 1 + algo.clip_high
    replayed = "live" if live else "replay"
    old = [policy.score(batch, mode="replay").logprobs for batch in batches]
    shares = []
    for epoch in range(count):
        if rescored and epoch:
            old = [policy.score(batch, mode="replay").logprobs for batch in batches]
        clipped = tokens_of_epoch = 0.0
        for number, batch in enumerate(batches):
            zero_gradients(policy)
            clips: list[torch.Tensor] = []

            def loss_of(
                place: int,
                tokens: MicroBatch,
                scores_2N: torch.Tensor,
                old: Any = old[number],
                clips: list[torch.Tensor] = clips,
            ) -> torch.Tensor:
                ratio_N = torch.exp(scores_2N[0] - old[place])
                gain_N = ratio_N * tokens.advantages_N
                bounded_N = ratio_N.clamp(low, high) * tokens.advantages_N
                clips.append(((bounded_N < gain_N) & (tokens.loss_mask_N > 0)).detach())
                loss_N = -torch.minimum(gain_N, bounded_N)
                return (loss_N * tokens.loss_mask_N).sum() / tokens.num_loss_tokens

            mode = "replay" if epoch == 0 else replayed
            with policy.replay.schedule(mode, training=True) as ledger_of:  # type: ignore[arg-type]
                policy._run_schedule(batch, loss_of, forward_only=False)
                ledger_of()
            for group in policy.optimizer.param_groups:
                group["lr"] = _LR
            with cuda_type_names():
                policy.optimizer.step()
            clipped += float(sum(each.sum() for each in clips))
            tokens_of_epoch += batch[0].num_loss_tokens
        shares.append(float(policy.mesh.dp.all_reduce(torch.tensor(clipped))) / tokens_of_epoch)
    return shares


def _rewards() -> list[Reward]:
    numbers_R = torch.arange(len(LENGTHS))
    return step_rewards(numbers_R, numbers_R // 2)


def _distance(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def variants(
    device: Device, *, model: str, settings: dict[str, dict[str, Any]]
) -> list[SimpleNamespace]:
    """Make a step of two epochs under each of the settings.

    Returns:
        A step of two epochs.
        way: largest change of a weight.
        passes: mode, and micro-batches divided by those of the step, of each scoring pass.
        updates: that the policy counts.
        row: metrics.
    """
    found = []
    mesh = build_mesh(device, tiny_config(model).parallel)
    for values in settings.values():
        config = with_values(
            tiny_config(model, train={"lr": _LR, "epochs_per_step": 2}),
            {"replay.shadow_every": 0, **values},
        )
        policy = policy_of(device, mesh, config)
        batches = batches_of(mesh, policy.shape, micro_batch_tokens=96)
        start = weights_of(policy)
        scored, parts = watch_scores(policy), Parts()
        train_step(policy, batches, config, rewards=_rewards(), report=parts.report)
        count = len(batches[0])
        found.append(
            SimpleNamespace(
                way=_distance(start, weights_of(policy)),
                passes=sorted((mode, number / count) for mode, number in scored),
                updates=policy.update_number,
                row=parts.row(),
            )
        )
    return found
