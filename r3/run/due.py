"""What is due at the end of a step, and of a run: evaluation, checkpoint, export."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial

from r3.config import flatten
from r3.rollout.heldout import HeldOut
from r3.rollout.heldout import evaluate as evaluate_set
from r3.run.checkpoint import require_sound
from r3.run.checkpointer import Copy, SaveError
from r3.run.ends import StoppedEarly
from r3.run.folder import read_metrics, write_eval, write_json
from r3.run.goal import Goal, best_step
from r3.run.session import Session
from r3.runtime.mesh import Axis, axis_beside
from r3.runtime.terminal import say
from r3.sync.weights import export


class Saver:
    """Saves checkpoints and exports when they are due, and says after which step the run ends.

    With `checkpoint.background` the state is copied to host memory, and written while the next
    steps are made. One checkpoint is written at a time.

    Attributes:
        last_step: of the run: `train.steps`, or an earlier one if train.patience has ended it.
    """

    def __init__(self, run: Session) -> None:
        """Prepare for saves; make the export that an earlier attempt owes. All ranks must call.

        The evaluation before the first step must have been made: later ones are compared with it.
        """
        self._run = run
        self._due = False  # stays true after a save that failed, until one succeeds
        settings = run.config.checkpoint
        self._beside = (
            axis_beside(run.mesh.world, timeout_s=run.config.debug.collective_timeout_s)
            if settings.background and (settings.every > 0 or settings.keep_best)
            else None
        )
        self._goal = Goal.of(flatten(run.config))
        file, world = run.folder.metrics, run.mesh.world
        rows = read_metrics(file) if world.rank == 0 and file.exists() else []
        if run.opened.checkpoint:  # rows that were lost since are in the checkpoint
            facts = json.loads((run.opened.checkpoint / "r3.json").read_text())
            rows = [*facts.get("evaluations", []), *rows]
        self._values = world.all_gather_object(self._goal.values(rows))[0]
        self.last_step = run.config.train.steps
        if self._goal.end(self._values):
            self.last_step = run.steps_done
        elif 0 < run.steps_done < self.last_step:
            self._export_if_due(run.steps_done)

    def after_step(self, step: int) -> None:
        """Save and export after `step` steps what is due. All ranks must call, in state TRAIN.

        If a disk is full or cannot be written, rank 0 prints it, and the next step tries again.
        The step's row of metrics must have been closed.

        Raises:
            SaveError: on all ranks: the last checkpoint of the run cannot be written.
            StoppedEarly: on all ranks: a signal asked for the end, and the checkpoint is written.
            UnsoundError: on all ranks: weights or moments are not finite or far too large.
        """
        settings, run = self._run.config, self._run
        is_best = self._is_best(step)
        if self._goal.end(self._values):
            self.last_step = step
        is_last = step == self.last_step
        signal_name = "" if is_last else run.stop.agreed(run.mesh.world)
        is_due = is_checkpoint_due(step, settings.checkpoint.every, last=self.last_step)
        if signal_name or is_due or is_best:
            self._due = True
        elif run.checkpointer.is_busy and all(
            run.mesh.world.all_gather_object(run.checkpointer.is_done)
        ):
            self._due = not self._is_written()
        if self._due:
            self._save(step, must=is_last or bool(signal_name))
        if signal_name:
            raise StoppedEarly(step, signal_name)
        if not is_last:
            self._export_if_due(step)

    def _is_best(self, step: int) -> bool:
        """Take the step's evaluation, if it was evaluated; say whether it is the best so far.

        The row, and so the answer, is the same on all ranks.
        """
        row = self._run.meter.last_row
        self._values |= self._goal.values([{"step": step, **row}])
        named = [key for key in row if key.startswith("eval/")]
        if self._goal.metric and named and step not in self._values:
            there = f"the evaluation after step {step} has no such value, but {', '.join(named)}"
            self._run.meter.console.line(f"checkpoint.keep_best {self._goal.metric}: {there}")
        return step > 0 and step == best_step(self._values)

    def _export_if_due(self, step: int) -> None:
        """Export after a step before the last, where a failure does not end the run."""
        if self._run.config.checkpoint.exports_after(step, is_last=False):
            try:
                export_weights(self._run, step)
            except SaveError as error:
                self._run.meter.console.line(f"{error}; the run goes on")

    def _is_written(self) -> bool:
        """Wait for the checkpoint in flight, if there is one. The same on all ranks."""
        try:
            self._run.checkpointer.finish()
        except SaveError:  # `_write` has printed it
            return False
        return True

    def _save(self, step: int, *, must: bool) -> None:
        run = self._run
        now = must or not self._beside
        try:
            # Announced when the disk has it.
            with run.meter.between_steps(f"checkpoint of step {step}", says=now):
                self._is_written()  # one at a time; if it failed, this one takes its place
                copy = run.checkpointer.copy(
                    run.policy,
                    run.device,
                    run.mesh,
                    step=step,
                    values=self._values,
                    evaluations=self._goal.rows(self._values),
                )
                if now:
                    run.checkpointer.write(copy, run.mesh.world)
        except SaveError as error:
            if must:
                raise
            self._say(step, error)
            return
        self._due = False
        if self._beside and not must:
            run.checkpointer.begin(partial(self._write, copy, self._beside))

    def _write(self, copy: Copy, axis: Axis) -> None:
        """Write a checkpoint beside the training. All ranks must call, on a thread each."""
        began = time.perf_counter()
        try:
            self._run.checkpointer.write(copy, axis)
        except SaveError as error:
            self._say(copy.step, error)
            raise
        seconds = time.perf_counter() - began
        self._run.meter.console.line(
            f"checkpoint of step {copy.step}: {seconds:.1f} s, beside the training"
        )

    def _say(self, step: int, error: SaveError) -> None:
        if self._run.device.rank == 0:
            text = f"checkpoint of step {step} not written: {error}; the next step tries again"
            say(text, error=True)


def is_checkpoint_due(step: int, every: int, *, last: int) -> bool:
    """Whether `checkpoint.every` asks for a checkpoint after a step."""
    return (step == last and every >= 0) or (every > 0 and step % every == 0)


def export_last(run: Session, step: int) -> None:
    """Export the weights after the last step, if the settings ask for it. All ranks must call.

    Raises:
        SaveError: as `export_weights`.
    """
    if run.config.checkpoint.exports_after(step, is_last=True):
        export_weights(run, step)


def export_weights(run: Session, step: int) -> None:
    """Write the weights as a Hugging Face checkpoint, once. All ranks must call.

    Raises:
        SaveError: on all ranks: the disk is full or cannot be written.
    """
    folder = run.folder.hf(step)
    if folder.exists():
        return
    require_sound(run.policy, run.mesh.world, "at the export")
    try:
        with run.meter.between_steps(f"export to {folder}"):
            export(
                folder,
                run.weights,
                run.policy,
                run.device,
                run.mesh,
                small_files=run.small_files,
                metadata={"step": step, "from": run.policy.shape.source},
            )
    except OSError as error:
        shutil.rmtree(folder.with_name(f".{folder.name}.partial"), ignore_errors=True)
        raise SaveError(
            f"{folder}: not exported: {error}. Fix: make room and start again, or, if the step has "
            f"a checkpoint, python -m r3.export {run.folder.path} --step {step}"
        ) from error


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
