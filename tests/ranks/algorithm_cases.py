"""What each rank does in `test_algorithms.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from r3.algo.advantage import Reward, advantages_of, dr_grpo, less_kl
from r3.algo.loss import CORRECTIONS, LOSSES, kl_penalty
from r3.algo.packing import as_batch, with_advantages
from r3.layers import local_tokens, zigzag_rows
from r3.models.shape import ModelShape
from r3.policy import Passes, Policy, TokenScores, kl_of_rollouts, policy_loss
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.sync import PackingSpec, distribute, pack_for
from r3.types import Batch, MicroBatch, Sample
from tests.pages import ROOT
from tests.policies import LENGTHS, build_with_batch, one_update, step_rewards
from tests.tiny import random_rollouts, tiny_config


def losses(device: Device, *, cp: int) -> dict[str, SimpleNamespace]:
    """Loss, gradient and counts of every loss and correction, a user's loss among them, over one
    micro-batch whose sequences are cut `cp` ways.

    Returns:
        One loss or correction over a micro-batch, summed over the ranks that share sequences.
        gradient: weighted by something of the token, so that gradients that changed places show.
        clipped: loss tokens whose ratio was clipped.
        cut: loss tokens outside the correction's bounds; 0 without a correction.
        weight: sum of the correction's weights; 0 without a correction.
    """
    config = tiny_config(parallel={"cp": cp}, rollout={"max_response_tokens": 50})
    mesh, shape = build_mesh(device, config.parallel), ModelShape.read(config.model.path)
    rollouts = dict(enumerate(random_rollouts(shape, LENGTHS)))
    micro_batch = pack_for(mesh, shape, rollouts, num_layers=len(shape.moe_layers))
    advantages_R = torch.tensor([(-1.0) ** index * (0.5 + index) for index in rollouts])
    batch = with_advantages(
        as_batch(
            (micro_batch,),
            num_loss_tokens=int(micro_batch.loss_mask_N.sum()),
            num_sequences=len(rollouts),
        ),
        advantages_R,
    )
    (micro_batch,) = batch
    tokens = local_tokens(micro_batch, mesh.cp, device.torch)
    # Policies near the engine's, made of what travels with the token and so the same in every
    # layout.
    mu_N = micro_batch.rollout_logprobs_N
    old_N = mu_N + 0.2 * torch.sin(37 * mu_N)
    rows = (
        zigzag_rows(micro_batch.cu_seqlens, mesh.cp.rank, cp) if cp > 1 else torch.arange(len(mu_N))
    )
    old_N, now_N = old_N[rows], (old_N + 0.1 * torch.sin(53 * mu_N) + 0.03)[rows]
    found = {}

    def measure(name: str, old_N: torch.Tensor, **settings: Any) -> None:
        logprobs_N = now_N.clone().requires_grad_()
        changed = replace(config, algo=replace(config.algo, **settings))
        loss, stats = policy_loss(
            changed, tokens, mesh.cp, logprobs_N, Passes(old=[old_N]), entropy_N=-now_N
        )
        (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
        on_N = tokens.loss_mask_N

        def total(value: torch.Tensor) -> float:
            return float(mesh.cp.all_reduce(value.double()))

        def counted(stat: str) -> float:
            return total((stats[stat] * on_N).sum()) if stat in stats else 0.0

        found[name] = SimpleNamespace(
            loss=total(loss.detach()),
            gradient=total((gradient_N * tokens.targets_N).sum()),
            gradient_squares=total(gradient_N.square().sum()),
            clipped=counted("clipped"),
            cut=counted("cut"),
            weight=counted("weight"),
        )

    tight = {"gspo": {"clip_low": 0.01, "clip_high": 0.01}}
    for loss in LOSSES:
        aggregation = {"gspo": "sequence", "minirl": "constant"}.get(loss, "token")
        measure(loss, old_N, loss=loss, aggregation=aggregation, **tight.get(loss, {}))
    for correction in CORRECTIONS:
        bounds = (0.995, 1.005) if correction == "geometric_mask" else (0.8, 1.2)
        measure(
            correction,
            old_N,
            correction=correction,
            correction_low=bounds[0],
            correction_high=bounds[1],
        )
    own = f"{ROOT}/examples/own_loss/algorithm.py:tapered"
    measure("own", old_N, loss=own, args=("limit=0.9",))
    measure("entropy bonus", old_N, entropy_coef=0.1)
    measure("bypass", old_N, correction="bypass")
    measure("old is the engine's", tokens.rollout_logprobs_N)
    return found


def kl_in_reward(device: Device, *, model: str, parallel: dict[str, int]) -> SimpleNamespace:
    """Take the KL from the rewards of one batch after an update.

    Returns:
        Advantages by rollout.
        advantages: after the KL was taken from the rewards.
        without: without any KL.
        by_hand: as `advantages`, worked out response by response; only with one rank.
        episodes: if every two rollouts are the sequences of one episode.
        episodes_by_hand: as `episodes`, worked out episode by episode; only with one rank.
        half_filtered: as `advantages`, with every other response filtered; only with one rank.
        filtered: only with one rank.
        kl: this rank's sum, and the number of its terms.
    """
    config = tiny_config(
        model,
        parallel=parallel,
        algo={"advantage": "dr_grpo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        train={"lr": 1e-2},
    )
    mesh, policy, batch = build_with_batch(device, config)
    one_update(policy, batch, total_updates=1)  # away from the reference
    old = policy.score(batch, mode="replay").logprobs
    with policy.reference_weights():
        reference = policy.score(batch, mode="replay")
    count = len(LENGTHS)
    rewards_R = torch.arange(count).double() % 3
    groups_R = torch.arange(count) // 2
    reports: dict[str, Any] = {}
    given = (policy, [batch], old, reference)
    rewards = step_rewards(rewards_R, groups_R)
    kl = kl_of_rollouts(*given, config.algo, reports.update)
    after = with_advantages(batch, _advantages_less(rewards, kl))
    units_R = torch.arange(count) // 2
    by_episode = step_rewards((units_R % 3).double(), units_R // 2, units_R)
    episodes = with_advantages(batch, _advantages_less(by_episode, kl))
    by_hand = torch.zeros(count, dtype=torch.float64)
    if mesh.world.size == 1:
        for number, micro_batch in enumerate(batch):
            kl_N = kl_penalty(old[number], reference.logprobs[number], estimator="k1")
            spans = pairwise(micro_batch.cu_seqlens)
            for index, (start, end) in zip(micro_batch.rollout_ids, spans, strict=True):
                if index >= 0:
                    on = micro_batch.loss_mask_N[start:end] > 0
                    by_hand[index] = sum(float(kl) for kl in kl_N[start:end][on])
    kl_U = torch.stack([by_hand[units_R == unit].sum() for unit in units_R.unique()])
    number_U = torch.arange(len(kl_U))
    episodes_U = dr_grpo((number_U % 3).double() - 0.1 * kl_U, number_U // 2)
    return SimpleNamespace(
        advantages=_advantages(after, mesh),
        without=dr_grpo(rewards_R, groups_R).tolist(),
        by_hand=dr_grpo(rewards_R - 0.1 * by_hand, groups_R).tolist(),
        episodes=_advantages(episodes, mesh),
        episodes_by_hand=episodes_U[units_R].tolist(),
        half_filtered=_half_filtered(policy, batch, old, reference, rewards),
        filtered=filtered(policy) if mesh.world.size == 1 else None,
        kl=[reports["loss/kl_ref"].total, reports["loss/kl_ref"].count],
    )


def _half_filtered(
    policy: Policy,
    batch: Batch,
    old: Sequence[torch.Tensor],
    reference: TokenScores,
    rewards: list[Reward],
) -> list[float]:
    """Advantages of the whole step if every other response has no loss, as with overlong_filter."""
    kept = [replace(one, loss_mask_N=one.loss_mask_N * _of_even_rollouts(one)) for one in batch]
    kl = kl_of_rollouts(
        policy,
        [tuple(kept)],
        old,
        replace(reference, loss_mask=tuple(one.loss_mask_N for one in kept)),
        policy.config.algo,
        lambda _: None,
    )
    return _advantages_less(rewards, kl).tolist()


def _advantages_less(rewards: Sequence[Reward], kl: Mapping[int, float]) -> torch.Tensor:
    return advantages_of(less_kl(rewards, kl, 0.1), dr_grpo)


def _of_even_rollouts(micro_batch: MicroBatch) -> torch.Tensor:
    spans = pairwise(micro_batch.cu_seqlens)
    return torch.cat(
        [
            torch.full((end - start,), float(index % 2 == 0))
            for index, (start, end) in zip(micro_batch.rollout_ids, spans, strict=True)
        ]
    )


def _advantages(batch: Batch, mesh: Mesh) -> list[float]:
    """The advantage of every rollout, of all ranks."""
    advantages: dict[int, float] = {}
    for micro_batch in batch:
        spans = pairwise(micro_batch.cu_seqlens)
        for index, (start, end) in zip(micro_batch.rollout_ids, spans, strict=True):
            if index >= 0:
                on = micro_batch.loss_mask_N[start:end] > 0
                values = micro_batch.advantages_N[start:end][on].unique().tolist()
                assert len(values) == 1, f"rollout {index} has advantages {values}"
                advantages[index] = values[0]
    merged = {
        i: value for part in mesh.world.all_gather_object(advantages) for i, value in part.items()
    }
    return [merged[index] for index in range(len(merged))]


def filtered(policy: Policy) -> SimpleNamespace:
    """Make one update whose responses were all filtered."""
    samples = [
        Sample(rollout=replace(rollout, finish_reason="length"))
        for rollout in random_rollouts(policy.shape, LENGTHS)
    ]
    spec = PackingSpec(micro_batch_tokens=128, on_missing="live", filters_truncated=True)
    (batch,), _ = distribute(samples, policy.mesh, policy.shape, spec)
    update, metrics = one_update(policy, batch, total_updates=10)
    return SimpleNamespace(
        denominators=[batch[0].num_loss_tokens, batch[0].num_sequences],
        grad_norm=update.grad_norm,
        loss=metrics["loss/total"].total,
        entropy_over=metrics["policy/entropy"].count,
    )
