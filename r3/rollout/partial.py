"""Partial rollouts: what a step's token budget interrupted goes on in the next step, under newer weights.

With `rollout.step_token_budget` a conversation may be given so many tokens in one step, so that a few long answers do not keep
everybody waiting (the idea is that of Kimi k1.5, arXiv 2501.12599, section 2.6.2). The budget is each conversation's own:
what is sampled depends neither on the layout nor on how fast anything is. A group is trained on when all its conversations
are over; until then those that are over wait for the others. Groups that wait take the place of new prompts, so as many
conversations are in flight in every step; how many groups are trained on differs from step to step.

A group may wait until its oldest tokens are `rollout.max_staleness` steps old. Then its unfinished conversations are dropped
and the others trained on. 0 = every interrupted conversation is dropped at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from r3.rollout.codec import decode, encode
from r3.rollout.collect import CollectedRollouts
from r3.rollout.conversation import Held
from r3.rollout.scored import Scored
from r3.types import Prompt

_FILE = "carried_{engine:05d}.bin"


@dataclass(frozen=True, kw_only=True)
class Carry:
    """What one step leaves to the next, of this rank's engine; empty on ranks that only lend their device.

    Attributes:
        held: interrupted conversations.
        done: those of their groups that are over, with their rewards.
        taken: prompts that were taken from the data set so far, on all ranks.
    """

    held: tuple[Held, ...] = ()
    done: CollectedRollouts = field(
        default_factory=lambda: CollectedRollouts(rollouts=[], rewards=[])
    )
    taken: int = 0

    @property
    def groups(self) -> list[int]:
        """Numbers of the groups that wait, ascending."""
        return sorted({each.rollout.group for each in self.held})

    def renumbered(self, number_of: Mapping[int, int]) -> Carry:
        """The same with other numbers of groups."""
        return replace(
            self,
            held=tuple(
                replace(each, rollout=replace(each.rollout, group=number_of[each.rollout.group]))
                for each in self.held
            ),
            done=replace(
                self.done,
                rollouts=[
                    replace(each, group=number_of[each.group]) for each in self.done.rollouts
                ],
                parts={
                    (number_of[group], sample_index): part
                    for (group, sample_index), part in self.done.parts.items()
                },
            ),
        )


def deal(loads: Sequence[int], count: int) -> list[int]:
    """The engine of each of `count` new prompts: always that with the fewest groups, the first of equals."""
    loads = list(loads)
    engines = []
    for _ in range(count):
        engines.append(min(range(len(loads)), key=loads.__getitem__))
        loads[engines[-1]] += 1
    return engines


def within_age(held: Sequence[Held], *, step: int, max_staleness: int) -> tuple[Held, ...]:
    """Interrupted conversations of `step` that may go on in the next one, whose weights are those after `step` steps."""
    return tuple(each for each in held if step - each.rollout.policy_version <= max_staleness)


# --- checkpoints --------------------------------------------------------------------------------------------


def to_files(carry: Carry, engine: int, *, is_leader: bool) -> dict[str, bytes]:
    """The file of this rank's engine for a checkpoint: JSON with a safetensors blob of `exchange.encode` behind it.

    None without a budget: then no prompt was counted.
    """
    if not is_leader or not carry.taken:
        return {}
    facts = [
        {
            "born": each.born,
            "turns": each.turns,
            "asked": each.asked,
            "longest": each.longest,
            "last_turn": each.last_turn,
            "midway": each.midway,
            "heard": each.heard,
            "rewards": [float(reward).hex() for reward in each.rewards],
            "environment": each.environment.hex(),
        }
        for each in carry.held
    ]
    items = [
        *(
            Scored(index=i, rollout=each.rollout, advantage=0.0)
            for i, each in enumerate(carry.held)
        ),
        *(
            Scored(
                index=len(facts) + i,
                rollout=rollout,
                advantage=0.0,
                reward=reward,
                parts=carry.done.parts.get((rollout.group, rollout.sample_index), {}),
            )
            for i, (rollout, reward) in enumerate(
                zip(carry.done.rollouts, carry.done.rewards, strict=True)
            )
        ),
    ]
    header = json.dumps({"taken": carry.taken, "held": facts}).encode()
    content = len(header).to_bytes(8, "little") + header + encode(items)
    return {_FILE.format(engine=engine): content}


def from_checkpoint(
    folder: Path, prompts: Sequence[Prompt], *, engine: int, engines: int, is_leader: bool
) -> Carry:
    """What this rank's engine goes on with: its own file, or, when there were more or fewer engines, its share of all groups.

    A checkpoint without such files left nothing.
    """
    files = sorted(folder.glob(_FILE.replace("{engine:05d}", "*")))
    if not files:
        return Carry()
    by_id = {prompt.id: prompt for prompt in prompts}
    if len(files) == engines:
        return _read(files[engine], by_id, keeps=is_leader)
    parts = [_read(file, by_id, keeps=is_leader) for file in files]
    everything = Carry(
        held=tuple(each for part in parts for each in part.held),
        done=CollectedRollouts.joined([part.done for part in parts]),
        taken=parts[0].taken,
    )
    mine = frozenset(everything.groups[engine::engines])
    return replace(
        everything,
        held=tuple(each for each in everything.held if each.rollout.group in mine),
        done=everything.done.of_groups(mine),
    )


def _read(file: Path, prompts: Mapping[str, Prompt], *, keeps: bool) -> Carry:
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:size])
    if not keeps:
        return Carry(taken=header["taken"])
    items = decode(content[size:])
    held = tuple(
        Held(
            prompt=prompts[item.rollout.prompt_id],
            rollout=item.rollout,
            born=(facts["born"][0], facts["born"][1]),
            turns=facts["turns"],
            asked=facts["asked"],
            longest=facts["longest"],
            last_turn=facts["last_turn"],
            midway=facts["midway"],
            heard=tuple(facts["heard"]),
            rewards=tuple(map(float.fromhex, facts["rewards"])),
            environment=bytes.fromhex(facts["environment"]),
        )
        for item, facts in zip(items, header["held"], strict=False)
    )
    done = items[len(held) :]
    return Carry(
        held=held,
        done=CollectedRollouts(
            rollouts=[item.rollout for item in done],
            rewards=[item.reward for item in done],
            parts={
                (item.rollout.group, item.rollout.sample_index): item.parts
                for item in done
                if item.parts
            },
        ),
        taken=header["taken"],
    )
