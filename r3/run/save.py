"""Write a run's checkpoint and its Hugging Face export."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from safetensors import SafetensorError

from r3.handover.weights import export
from r3.run import checkpoint
from r3.run.build import Run
from r3.run.sound import require_sound
from r3.run.stop import StoppedEarly


class Saver:
    """Saves checkpoints when they are due, and ends the run when a signal asks for it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._due = False  # stays true after a save that failed, until one succeeds

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
        every = settings.checkpoint.every
        if is_last or signal_name or (every and step % every == 0):
            self._due = True
        if self._due:
            self._save(step, files(), must=is_last or bool(signal_name))
        if signal_name:
            raise StoppedEarly(step, signal_name)

    def _save(self, step: int, files: Mapping[str, bytes], *, must: bool) -> None:
        run = self._run
        try:
            with run.meter.between_steps(f"checkpoint of step {step}"):
                checkpoint.save(
                    run.folder.checkpoints,
                    run.policy,
                    run.device,
                    run.mesh,
                    step=step,
                    keep=run.config.checkpoint.keep,
                    files=files,
                    identity=run.identity,
                )
            self._due = False
        except checkpoint.SaveError as error:
            if must:
                raise
            if run.device.rank == 0:
                text = f"checkpoint of step {step} not written: {error}; the next step tries again"
                print(text, file=sys.stderr, flush=True)


def export_weights(run: Run) -> None:
    """Write the final weights as a Hugging Face checkpoint, once. All ranks must call.

    Raises:
        SaveError: on the rank that writes: the disk is full or cannot be written.
    """
    folder = run.folder.hf(run.config.train.steps)
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
                like=run.config.model.path,
                step=run.config.train.steps,
            )
    except (OSError, SafetensorError) as error:
        # The checkpoint of the last step is written: a new start exports, and trains nothing.
        raise checkpoint.SaveError(f"{folder}: not exported: {error}") from error
