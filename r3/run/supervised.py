"""Supervised fine-tuning: the step without generation, with rows in place of rollouts.

Packing, passes, checkpoints and evaluation are those of `train.py`. Each row is a rollout whose
loss mask marks its assistant messages, with advantage 1: the policy gradient is then the
cross-entropy of these tokens. There are no routes to replay: every router chooses for itself.
"""

from __future__ import annotations

import numpy as np

from r3.data.prompts import prompts_of_step
from r3.handover.rollouts import PackingSpec, distribute
from r3.metrics.reduce import Mean, Sum
from r3.policy.updates import report_update
from r3.rollout.scored import Scored
from r3.run.build import Run
from r3.run.evaluation import evaluate_if_due
from r3.run.save import Saver, export_weights
from r3.types import Prompt, Rollout


def supervise(run: Run) -> None:
    """Make all steps that the checkpoint does not have, then export. All ranks must call."""
    config, policy, meter, saver = run.config, run.policy, run.meter, Saver(run)
    train = config.train
    if not run.start.found and evaluate_if_due(run, 0):
        meter.close_step(0)
    for step in range(run.steps_done + 1, train.steps + 1):
        meter.open_step(step)
        with meter.phase("pack"):
            rows = rows_of_step(run, step)
            spec = PackingSpec.of_step(config, policy.replay.layers, step - 1)
            batches, metrics = distribute(rows, run.mesh, run.task.shape, spec)
        tokens = sum(len(row.rollout.tokens_T) for row in rows)
        learned = sum(row.rollout.num_response_tokens for row in rows)
        meter.add(metrics)
        meter.add(
            {
                "rollout/tokens": Sum(float(tokens)),
                "rollout/response_tokens_mean": Mean(float(learned), float(len(rows))),
            }
        )
        count = sum(len(batch.micro_batches) for batch in batches)
        with meter.phase("train"), meter.progress(count, f"step {step} train") as tick:
            for batch in batches:
                update = policy.update(
                    batch, total_updates=train.steps * train.updates_per_step, on_micro_batch=tick
                )
                meter.add(update.metrics)
                report_update(policy, update, meter.add)
        meter.add(run.residency.metrics())
        evaluate_if_due(run, step)
        meter.close_step(step)
        saver.after_step(step, dict)
    export_weights(run)


def rows_of_step(run: Run, step: int) -> list[Scored]:
    """This rank's share of the rows that `step` learns.

    The rows of a step depend on the seed and the step alone, as the prompts of a step do.
    """
    prompts = prompts_of_step(
        run.task.prompts,
        seed=run.config.train.seed,
        step=step - 1,
        count=run.config.rollout.prompts_per_step,
    )
    world = run.mesh.world
    return [
        Scored(index=index, rollout=as_rollout(prompts[index], index, step - 1), advantage=1.0)
        for index in range(world.rank, len(prompts), world.size)
    ]


def as_rollout(row: Prompt, group: int, policy_version: int) -> Rollout:
    """A row as a rollout whose loss mask marks its assistant messages; it has no routes."""
    tokens_T = np.array(row.tokens_T, np.int64)
    mask_T = np.zeros(len(tokens_T), np.float32)
    for first, end in row.spans:
        mask_T[first:end] = 1.0
    return Rollout.unsampled(row, tokens_T, mask_T, group=group, step=policy_version)
