"""Samples of the current step: dumped, and shown on the console (`log.*_every`)."""

from __future__ import annotations

from collections.abc import Sequence

from r3 import extras
from r3.rollout.scored import Scored
from r3.run.build import Run
from r3.run.dumps import dump_rollouts, row_of


def record_samples(run: Run, step: int, scored: Sequence[Scored]) -> None:
    """Dump the rollouts of all ranks and show one of this rank's, each when due. All must call.

    Args:
        scored: this rank's rollouts.
    """
    log, prompts = run.config.log, run.task.prompts.prompts
    if log.rollouts_every and (step == 1 or step % log.rollouts_every == 0):
        dumped = dump_rollouts(run.folder, step, scored, run.mesh.world, prompts)
        run.meter.show_samples(step, dumped)
    if log.show_every and step % log.show_every == 0 and scored and run.device.rank == 0:
        item = scored[step // log.show_every % len(scored)]  # each time another place
        prompt = next((each for each in prompts if each.id == item.rollout.prompt_id), None)
        run.meter.console.show(extras.conversation_of(row_of(item, prompt)))
