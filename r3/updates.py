"""The updates of one step: which passes are made, with which routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from r3 import diagnostics
from r3.config import Config
from r3.policy import Policy, TokenScores
from r3.policy.replay import Mode
from r3.types import Batch

Panel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Mapping[str, Any]]

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
        live = policy.score(flat, mode="live")
        report(
            {f"mismatch/{name}_live": part for name, part in _panel(policy, live, diagnostics.k3_f2).items()}
        )

    old: Sequence[torch.Tensor] | None = None
    recorded: Sequence[torch.Tensor] | None = None
    if len(batches) > 1 or mode == "r2":
        scores = policy.score(flat, mode=_OLD_PASS[mode])
        old = scores.logprobs
        recorded = scores.ledger.recorded if mode == "r2" else None
        report(
            {f"mismatch/{name}": part for name, part in _panel(policy, scores, diagnostics.mismatch).items()}
        )
    reference: Sequence[torch.Tensor] | None = None
    if config.algo.kl_coef:
        replays = config.replay.reference and mode != "off"
        with policy.reference_weights():
            scores = policy.score(flat, mode="replay" if replays else "live", recorded_routes=recorded)
            reference = scores.logprobs

    first = 0
    for batch in batches:
        part = slice(first, first + len(batch.micro_batches))
        first = part.stop
        update = policy.update(
            batch,
            total_updates=config.train.steps * config.train.updates_per_step,
            old_logprobs=old[part] if old is not None else None,
            reference_logprobs=reference[part] if reference is not None else None,
            recorded_routes=recorded[part] if recorded is not None else None,
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


def _panel(policy: Policy, scores: TokenScores, panel: Panel) -> dict[str, Any]:
    """A panel of metrics over the tokens this rank speaks for."""
    if not policy.reports:
        return {}
    columns = (scores.logprobs, scores.rollout_logprobs, scores.loss_mask)
    return dict(panel(*(torch.cat(column) for column in columns)))
