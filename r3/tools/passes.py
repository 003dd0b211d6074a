"""Passes of the doctor and of rescore over rollouts that every rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from r3.metrics.meter import merged_parts
from r3.metrics.reduce import mismatch
from r3.models.shape import ModelShape
from r3.policy import Policy, TokenScores
from r3.routing.ledger import routing_metrics
from r3.runtime.mesh import Mesh
from r3.sync.rollouts import PackingSpec, distribute
from r3.types import Batch, Rollout, Sample


def shared_batch(
    rollouts: Sequence[Rollout], mesh: Mesh, shape: ModelShape, spec: PackingSpec
) -> Batch:
    """Pack rollouts that every rank has, each rank its share, as one update. All must call."""
    own = [Sample(rollout=rollout) for rollout in rollouts[mesh.world.rank :: mesh.world.size]]
    (batch,), _ = distribute(own, mesh, shape, spec)
    return batch


def pass_figures(policy: Policy, scores: TokenScores) -> dict[str, float]:
    """Mismatch metrics of a pass over all ranks, and `agreement` with replay. All must call."""
    partials: dict[str, Any] = {
        name.removeprefix("routing/"): part for name, part in routing_metrics(scores.ledger).items()
    }
    if policy.reports:
        columns = (scores.logprobs, scores.rollout_logprobs, scores.loss_mask, scores.positions)
        partials |= mismatch(*map(torch.cat, columns))
    parts = {name: [part] for name, part in partials.items()}
    return merged_parts(policy.mesh.world.all_gather_object(parts))
