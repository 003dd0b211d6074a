"""The updates of one step: which passes are made, with which routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from r3 import diagnostics
from r3.config import Config
from r3.policy import Policy, TokenScores, with_routes
from r3.policy.replay import Mode
from r3.types import Batch, MicroBatch

# What routes do in the pass that scores old log-probabilities, by replay.mode.
_OLD_PASS: dict[str, Mode] = {"off": "live", "r2": "record", "r3": "replay"}


def train_on(
    policy: Policy,
    batches: Sequence[Batch],
    config: Config,
    *,
    step: int,
    report: Callable[[Mapping[str, Any]], None],
    on_update: Callable[[], None] = lambda: None,
) -> None:
    """Make the step's updates, one per batch; metric partials go to `report`. All ranks must call.

    Old log-probabilities are scored before the first update when there are several updates (later ones see other weights) or
    when routes are recorded rather than captured (R2); otherwise the update's own forward is the old policy. The reference
    policy scores all batches before the first update too, since its weights take the policy's place meanwhile.
    """
    mode = config.replay.mode if policy.shape.moe_layers else "off"
    flat = [micro_batch for batch in batches for micro_batch in batch.micro_batches]

    if mode != "off" and config.replay.shadow_every and (step - 1) % config.replay.shadow_every == 0:
        # The same tokens with live routes, before anything changes: what replay is worth in this very run.
        live = policy.score(flat[:1], mode="live")
        report(
            {
                f"mismatch/{name}_live": part
                for name, part in _mismatch(policy, flat[:1], live, k3_f2=True).items()
            }
        )

    old: Sequence[torch.Tensor] | None = None
    if len(batches) > 1 or mode == "r2":
        scores = policy.score(flat, mode=_OLD_PASS[mode])
        old = scores.logprobs
        report({f"mismatch/{name}": part for name, part in _mismatch(policy, flat, scores).items()})
        if mode == "r2" and scores.ledger.recorded:
            batches = _batches_with(batches, with_routes(flat, scores.ledger.recorded))
    reference: Sequence[torch.Tensor] | None = None
    if config.algo.kl_coef:
        replays = config.replay.reference and mode != "off"
        with policy.reference_weights():
            reference = policy.score(
                [micro_batch for batch in batches for micro_batch in batch.micro_batches],
                mode="replay" if replays else "live",
            ).logprobs

    first = 0
    for batch in batches:
        part = slice(first, first + len(batch.micro_batches))
        first = part.stop
        update = policy.update(
            batch,
            total_updates=config.train.steps * config.train.updates_per_step,
            old_logprobs=old[part] if old is not None else None,
            reference_logprobs=reference[part] if reference is not None else None,
        )
        report(update.metrics)
        if policy.mesh.world.rank == 0:  # every rank has these alike; one reports them
            report(
                {
                    "optim/grad_norm": diagnostics.Mean(update.grad_norm, 1.0),
                    "optim/router_grad_norm": diagnostics.Mean(update.router_grad_norm, 1.0),
                    "optim/lr": diagnostics.Mean(update.lr, 1.0),
                    "optim/skipped": diagnostics.Sum(float(update.skipped)),
                }
            )
        on_update()


def _mismatch(
    policy: Policy, micro_batches: Sequence[MicroBatch], scores: TokenScores, *, k3_f2: bool = False
) -> dict[str, Any]:
    if not policy.reports:
        return {}
    logprobs_N = torch.cat(scores.logprobs).cpu()
    rollout_N = torch.cat([micro_batch.rollout_logprobs_N for micro_batch in micro_batches])
    mask_N = torch.cat([micro_batch.loss_mask_N for micro_batch in micro_batches])
    return dict((diagnostics.k3_f2 if k3_f2 else diagnostics.mismatch)(logprobs_N, rollout_N, mask_N))


def _batches_with(batches: Sequence[Batch], micro_batches: Sequence[MicroBatch]) -> list[Batch]:
    remaining = iter(micro_batches)
    return [
        replace(batch, micro_batches=tuple(next(remaining) for _ in batch.micro_batches)) for batch in batches
    ]
