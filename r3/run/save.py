"""Write a run's checkpoint and its Hugging Face export."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from safetensors import SafetensorError

from r3.handover.weight_sync import export
from r3.run import checkpoint
from r3.run.build import Run
from r3.run.checkpoint import require_sound
from r3.run.stop_signals import StoppedEarly
from r3.run.writing import SaveError, Unwritten
from r3.runtime.mesh import Axis, axis_beside
from r3.runtime.terminal import say


class Saver:
    """Saves checkpoints when they are due, and ends the run when a signal asks for it.

    With `checkpoint.background` the state is copied to host memory, and written while the next
    steps are made. One checkpoint is written at a time.
    """

    def __init__(self, run: Run) -> None:
        """Prepare for saves. All ranks must call."""
        self._run = run
        self._due = False  # stays true after a save that failed, until one succeeds
        settings = run.config.checkpoint
        self._beside = (
            axis_beside(run.mesh.world, timeout_s=run.config.debug.collective_timeout_s)
            if settings.background and settings.every > 0
            else None
        )

    def after_step(self, step: int, files: Callable[[], Mapping[str, bytes]]) -> None:
        """Save the state after `step` steps if that is due. All ranks must call, in state TRAIN.

        If a disk is full or cannot be written, rank 0 prints it, and the next step tries again.

        Args:
            files: gives further files of this rank, by names that no other rank uses.

        Raises:
            SaveError: on all ranks: the last checkpoint of the run cannot be written.
            StoppedEarly: on all ranks: a signal asked for the end, and the checkpoint is written.
            UnsoundError: on all ranks: weights or moments are not finite or far too large.
        """
        settings, run = self._run.config, self._run
        is_last = step == settings.train.steps
        signal_name = "" if is_last else run.stop.agreed(run.mesh.world)
        if signal_name or is_due(step, settings.checkpoint.every, last=settings.train.steps):
            self._due = True
        elif run.background.is_busy and all(
            run.mesh.world.all_gather_object(run.background.is_done)
        ):
            self._due = not self._is_written()
        if self._due:
            self._save(step, files(), must=is_last or bool(signal_name))
        if signal_name:
            raise StoppedEarly(step, signal_name)

    def _is_written(self) -> bool:
        """Wait for the checkpoint in flight, if there is one. The same on all ranks."""
        try:
            self._run.background.finish()
        except SaveError:  # `_write` has printed it
            return False
        return True

    def _save(self, step: int, files: Mapping[str, bytes], *, must: bool) -> None:
        run = self._run
        now = must or not self._beside
        try:
            # Announced when the disk has it.
            with run.meter.between_steps(f"checkpoint of step {step}", says=now):
                self._is_written()  # one at a time; if it failed, this one takes its place
                unwritten = checkpoint.capture(
                    run.folder.checkpoints,
                    run.policy,
                    run.device,
                    run.mesh,
                    step=step,
                    keep=run.config.checkpoint.keep,
                    files=files,
                    identity=run.identity,
                )
                if now:
                    unwritten.write(run.mesh.world)
        except SaveError as error:
            if must:
                raise
            self._say(step, error)
            return
        self._due = False
        if self._beside and not must:
            run.background.start(partial(self._write, step, unwritten, self._beside))

    def _write(self, step: int, unwritten: Unwritten, axis: Axis) -> None:
        """Write a checkpoint beside the training. All ranks must call, on a thread each."""
        began = time.perf_counter()
        try:
            unwritten.write(axis)
        except SaveError as error:
            self._say(step, error)
            raise
        seconds = time.perf_counter() - began
        self._run.meter.line(f"checkpoint of step {step}: {seconds:.1f} s, beside the training")

    def _say(self, step: int, error: SaveError) -> None:
        if self._run.device.rank == 0:
            text = f"checkpoint of step {step} not written: {error}; the next step tries again"
            say(text, error=True)


def is_due(step: int, every: int, *, last: int) -> bool:
    """Whether `checkpoint.every` asks for a checkpoint after a step."""
    return (step == last and every >= 0) or (every > 0 and step % every == 0)


def export_weights(run: Run) -> None:
    """Write the final weights as a Hugging Face checkpoint, once. All ranks must call.

    Raises:
        SaveError: on the rank that writes: the disk is full or cannot be written.
    """
    step = run.config.train.steps
    folder = run.folder.hf(step)
    if not run.config.checkpoint.export or folder.exists():
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
                metadata={"step": step, "from": run.config.model.path},
            )
    except (OSError, SafetensorError) as error:
        raise SaveError(
            f"{folder}: not exported: {error}. The checkpoint of the last step is complete. Fix: "
            "make room and start again; that exports the weights and trains nothing"
        ) from error
