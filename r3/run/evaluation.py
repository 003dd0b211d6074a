"""Evaluation of a run: every held-out set, at the steps that `eval.every` names."""

from __future__ import annotations

from r3.rollout.heldout import HeldOut
from r3.rollout.heldout import evaluate as evaluate_set
from r3.run.checkpointer import SaveError
from r3.run.folder import write_eval, write_json
from r3.run.session import Session
from r3.runtime.terminal import say


def evaluate_if_due(run: Session, step: int) -> bool:
    """Evaluate before the first step, after every `eval.every` steps and after the last.

    All ranks must call.

    Returns:
        Whether the policy was evaluated.
    """
    every, last = run.config.eval.every, run.config.train.steps
    due = bool(run.task.heldout) and (step in (0, last) or (every > 0 and step % every == 0))
    if due:
        evaluate(run, step)
    return due


def evaluate_alone(run: Session) -> None:
    """Evaluate without training, and keep the row beside the samples. All ranks must call."""
    evaluate(run, run.steps_done)
    row = run.meter.close_step(run.steps_done)
    if run.device.rank == 0:
        try:
            write_json(run.folder.evaluated, {"step": run.steps_done, **row})
        except OSError as error:
            raise SaveError(f"{run.folder.evaluated}: not written: {error}") from error


def evaluate(run: Session, step: int) -> None:
    """Measure the policy after `step` steps on every held-out set. All ranks must call."""
    with run.meter.phase("evaluate"):
        run.sync(step)
        for heldout in run.task.heldout:
            _evaluate_set(run, heldout, step)
        run.release_engine()


def _evaluate_set(run: Session, heldout: HeldOut, step: int) -> None:
    count = heldout.num_samples // run.mesh.engine_dp.size
    with run.meter.progress(count, heldout.name) as tick:
        result = evaluate_set(
            run.engine, heldout, run.config, run.mesh, policy_version=step, on_rollout=tick
        )
    run.meter.add(result.metrics)
    if run.device.rank == 0:
        try:
            write_eval(run.folder, step, heldout.name, result.rows)
        except OSError as error:
            say(f"samples of {heldout.name} after step {step} not written: {error}", error=True)
        if result.note and step == run.steps_done:  # the first evaluation
            say(result.note, error=True)
