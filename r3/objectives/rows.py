"""Supervised fine-tuning: rows of the data set take the place of sampled rollouts.

Each row is a rollout whose loss mask marks its assistant messages, with advantage 1: the policy
gradient is then the cross-entropy of these tokens. There are no routes to replay: every router
chooses for itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from r3.config import Config
from r3.data.prompts import step_prompts
from r3.metrics.reduce import Mean, Sum
from r3.rollout.task import Task
from r3.runtime.mesh import Axis
from r3.types import Prompt, Rollout, Sample


def rows_of_step(
    task: Task, config: Config, world: Axis, step: int
) -> tuple[list[Sample], tuple[dict[str, Any], ...]]:
    """This rank's share of the rows that `step` learns, and partials of metrics.

    The rows of a step depend on the seed and the step alone, as the prompts of a step do.
    """
    prompts = step_prompts(task.prompts, config, step)
    rows = [
        Sample(rollout=as_rollout(prompts[index], index, step - 1))
        for index in range(world.rank, len(prompts), world.size)
    ]
    tokens = sum(len(row.rollout.tokens_T) for row in rows)
    learned = sum(row.rollout.num_response_tokens for row in rows)
    metrics = {
        "rollout/tokens": Sum(float(tokens)),
        "rollout/response_tokens_mean": Mean(float(learned), float(len(rows))),
    }
    return rows, (metrics,)


def as_rollout(row: Prompt, group: int, policy_version: int) -> Rollout:
    """A row as a rollout whose loss mask marks its assistant messages; it has no routes."""
    tokens_T = np.array(row.tokens_T, np.int64)
    mask_T = np.zeros(len(tokens_T), np.float32)
    for first, end in row.spans:
        mask_T[first:end] = 1.0
    return Rollout.unsampled(row, tokens_T, mask_T, group=group, step=policy_version)
