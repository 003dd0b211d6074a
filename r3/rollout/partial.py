"""Partial rollouts: conversations that a step's token budget interrupts continue in the next step.

With `rollout.step_token_budget` a conversation may sample so many tokens per step, so that a few
long responses do not delay the whole step (Kimi k1.5, arXiv 2501.12599, section 2.6.2). The budget
belongs to each conversation, so what is sampled depends neither on the layout nor on speed. A
group is trained on when all its conversations are finished; until then its finished conversations
are kept. Groups with suspended conversations take the place of new prompts, so every step has as
many conversations in flight. The number of groups that are trained on differs between steps.

A group may wait until its oldest tokens are `rollout.max_staleness` steps old. Then its suspended
conversations are dropped and the others are trained on. With 0 every interrupted conversation is
dropped at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from r3.rollout.collected_rollouts import CollectedRollouts
from r3.rollout.conversation import SuspendedConversation

FILE_PREFIX = "partial_rollouts_"
"""Begins the names of checkpoint files that are pickles; `r3.run.manifest` asks for a signature."""


@dataclass(frozen=True, kw_only=True)
class PartialRollouts:
    """What one step leaves to the next, of this rank's engine; empty on ranks that do not lead one.

    Attributes:
        suspended: interrupted conversations.
        finished: the finished conversations of their groups, with rewards.
        prompts_taken: prompts taken from the data set so far, on all ranks.
    """

    suspended: tuple[SuspendedConversation, ...] = ()
    finished: CollectedRollouts = field(
        default_factory=lambda: CollectedRollouts(rollouts=[], rewards=[])
    )
    prompts_taken: int = 0

    @property
    def groups(self) -> list[int]:
        """Numbers of the groups with suspended conversations, ascending."""
        return sorted({each.rollout.group for each in self.suspended})

    def renumbered(self, number_of: Mapping[int, int]) -> PartialRollouts:
        """Return the same with other numbers of groups."""
        return replace(
            self,
            suspended=tuple(
                replace(each, rollout=replace(each.rollout, group=number_of[each.rollout.group]))
                for each in self.suspended
            ),
            finished=replace(
                self.finished,
                rollouts=[
                    replace(each, group=number_of[each.group]) for each in self.finished.rollouts
                ],
                parts={
                    (number_of[group], sample_index): part
                    for (group, sample_index), part in self.finished.parts.items()
                },
            ),
        )


def assign_engines(loads: Sequence[int], count: int) -> list[int]:
    """Return the engine of each of `count` new prompts: always the first with the fewest groups."""
    loads = list(loads)
    engines = []
    for _ in range(count):
        engines.append(min(range(len(loads)), key=loads.__getitem__))
        loads[engines[-1]] += 1
    return engines


def resumable(
    suspended: Sequence[SuspendedConversation], *, step: int, max_staleness: int
) -> tuple[SuspendedConversation, ...]:
    """Return the conversations of `step` that are young enough for the next step.

    The next step samples with the weights after `step` steps.
    """
    return tuple(each for each in suspended if step - each.rollout.policy_version <= max_staleness)


# --- checkpoints --------------------------------------------------------------------------------


def to_files(partial: PartialRollouts, engine: int, *, is_leader: bool) -> dict[str, bytes]:
    """Return the checkpoint file of this rank's engine, a pickle; none without a token budget."""
    if not is_leader or not partial.prompts_taken:
        return {}
    return {f"{FILE_PREFIX}{engine:05d}.bin": pickle.dumps(partial)}


def from_checkpoint(folder: Path, *, engine: int, engines: int, is_leader: bool) -> PartialRollouts:
    """Read what this rank's engine continues with; nothing if the checkpoint has no such files.

    An engine reads its own file. If the checkpoint was written by another number of engines, the
    groups of all files are shared out.

    Args:
        engine: number of this rank's engine among `engines`.
    """
    files = sorted(folder.glob(f"{FILE_PREFIX}*.bin"))
    if not files:
        return PartialRollouts()
    own = files[engine : engine + 1] if len(files) == engines else files
    parts: list[PartialRollouts] = [pickle.loads(file.read_bytes()) for file in own]
    if not is_leader:
        return PartialRollouts(prompts_taken=parts[0].prompts_taken)
    everything = PartialRollouts(
        suspended=tuple(each for part in parts for each in part.suspended),
        finished=CollectedRollouts.joined([part.finished for part in parts]),
        prompts_taken=parts[0].prompts_taken,
    )
    if own is not files:
        return everything
    mine = frozenset(everything.groups[engine::engines])
    return replace(
        everything,
        suspended=tuple(each for each in everything.suspended if each.rollout.group in mine),
        finished=everything.finished.of_groups(mine),
    )
