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

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from r3.rollout.codec import decode, encode
from r3.rollout.collected_rollouts import CollectedRollouts
from r3.rollout.conversation import Progress, SuspendedConversation
from r3.rollout.scored import Scored
from r3.types import Prompt

FILE_PREFIX = "partial_rollouts_"
"""Begins the names of checkpoint files that may hold pickled environments."""


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
    """Return the checkpoint file of this rank's engine; none without a token budget.

    The file holds the length of a JSON header, the header, and the rollouts as `encode` writes
    them.
    """
    if not is_leader or not partial.prompts_taken:
        return {}
    finished = partial.finished
    items = [
        Scored(index=index, rollout=each.rollout, advantage=0.0)
        for index, each in enumerate(partial.suspended)
    ]
    items += [
        Scored(
            index=len(partial.suspended) + index,
            rollout=rollout,
            advantage=0.0,
            reward=reward,
            parts=finished.parts.get((rollout.group, rollout.sample_index), {}),
        )
        for index, (rollout, reward) in enumerate(
            zip(finished.rollouts, finished.rewards, strict=True)
        )
    ]
    header = {
        "prompts_taken": partial.prompts_taken,
        "suspended": [
            {"progress": asdict(each.progress), "environment": each.environment.hex()}
            for each in partial.suspended
        ],
    }
    encoded = json.dumps(header).encode()
    content = len(encoded).to_bytes(8, "little") + encoded + encode(items)
    return {f"{FILE_PREFIX}{engine:05d}.bin": content}


def from_checkpoint(
    folder: Path, prompts: Sequence[Prompt], *, engine: int, engines: int, is_leader: bool
) -> PartialRollouts:
    """Read what this rank's engine continues with; nothing if the checkpoint has no such files.

    An engine reads its own file. If the checkpoint was written by another number of engines, the
    groups of all files are shared out.

    Args:
        prompts: the data set, to look up prompts by id.
        engine: number of this rank's engine among `engines`.
    """
    files = sorted(folder.glob(f"{FILE_PREFIX}*.bin"))
    if not files:
        return PartialRollouts()
    by_id = {prompt.id: prompt for prompt in prompts}
    if len(files) == engines:
        return _read(files[engine], by_id, is_leader=is_leader)
    parts = [_read(file, by_id, is_leader=is_leader) for file in files]
    everything = PartialRollouts(
        suspended=tuple(each for part in parts for each in part.suspended),
        finished=CollectedRollouts.joined([part.finished for part in parts]),
        prompts_taken=parts[0].prompts_taken,
    )
    mine = frozenset(everything.groups[engine::engines])
    return replace(
        everything,
        suspended=tuple(each for each in everything.suspended if each.rollout.group in mine),
        finished=everything.finished.of_groups(mine),
    )


def _read(file: Path, prompts: Mapping[str, Prompt], *, is_leader: bool) -> PartialRollouts:
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:size])
    if not is_leader:
        return PartialRollouts(prompts_taken=header["prompts_taken"])
    items = decode(content[size:])
    suspended = tuple(
        SuspendedConversation(
            prompt=prompts[item.rollout.prompt_id],
            rollout=item.rollout,
            progress=_progress(facts["progress"]),
            environment=bytes.fromhex(facts["environment"]),
        )
        for item, facts in zip(items, header["suspended"], strict=False)
    )
    finished = items[len(suspended) :]
    return PartialRollouts(
        suspended=suspended,
        finished=CollectedRollouts(
            rollouts=[item.rollout for item in finished],
            rewards=[item.reward for item in finished],
            parts={
                (item.rollout.group, item.rollout.sample_index): item.parts
                for item in finished
                if item.parts
            },
        ),
        prompts_taken=header["prompts_taken"],
    )


def _progress(facts: Mapping[str, Any]) -> Progress:
    """Undo `asdict`: JSON has lists where `Progress` has tuples."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
    }
    return Progress(**values)
