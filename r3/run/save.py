"""Write a run's checkpoint and its Hugging Face export."""

from __future__ import annotations

from collections.abc import Mapping

from r3.handover.weights import export
from r3.run import checkpoint
from r3.run.build import Run


def save_checkpoint(run: Run, step: int, files: Mapping[str, bytes]) -> None:
    """Save the state after `step` steps. All ranks must call, in memory state TRAIN.

    Args:
        files: further files of this rank, by names that no other rank uses.
    """
    with run.meter.between_steps(f"checkpoint of step {step}"):
        checkpoint.save(
            run.folder.checkpoints,
            run.policy,
            run.device,
            run.mesh,
            step=step,
            keep=run.config.checkpoint.keep,
            files=files,
        )


def export_weights(run: Run) -> None:
    """Write the final weights as a Hugging Face checkpoint, once. All ranks must call."""
    folder = run.folder.hf(run.config.train.steps)
    if not run.config.checkpoint.export or folder.exists():
        return
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
