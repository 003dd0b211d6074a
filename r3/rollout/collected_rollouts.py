"""The rollouts that one or several rounds have collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from r3.rollout.conversation import SuspendedConversation
from r3.types import Rollout


@dataclass(frozen=True, kw_only=True)
class CollectedRollouts:
    """Rollouts of this rank's engine with their rewards, in order of group and sample.

    Empty on ranks that are not the leader of their engine. Groups are complete, except for
    conversations whose environment or reward failed (`env.on_error`, `reward.on_error` "drop").

    Attributes:
        rewards: one per rollout.
        parts: values of each component by (group, sample_index), where functions were called.
        metrics: partials of the conversations themselves.
        suspended: conversations that the token budget interrupted.
        dropped: why conversations were left out, each with its name.
    """

    rollouts: list[Rollout]
    rewards: list[float]
    parts: dict[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    suspended: tuple[SuspendedConversation, ...] = ()
    dropped: tuple[str, ...] = ()

    def values_of(self, component: str) -> list[float]:
        """Return the value of a component for each rollout; its reward where there is none.

        An environment or a workflow may reward a conversation itself.
        """
        return [
            self.parts.get((rollout.group, rollout.sample_index), {}).get(component, reward)
            for rollout, reward in zip(self.rollouts, self.rewards, strict=True)
        ]

    @classmethod
    def joined(cls, rounds: Sequence[CollectedRollouts]) -> CollectedRollouts:
        """Join rounds that have different groups, without metrics and suspended conversations."""
        return cls(
            rollouts=[rollout for each in rounds for rollout in each.rollouts],
            rewards=[reward for each in rounds for reward in each.rewards],
            parts={name: parts for each in rounds for name, parts in each.parts.items()},
        )

    def of_groups(self, groups: frozenset[int]) -> CollectedRollouts:
        """Return the rollouts of some groups, without metrics and suspended conversations."""
        pairs = zip(self.rollouts, self.rewards, strict=True)
        return self._of([(rollout, reward) for rollout, reward in pairs if rollout.group in groups])

    def in_order(self) -> CollectedRollouts:
        """Sort by group, sample and sequence, without metrics and suspended conversations."""
        return self._of(
            sorted(
                zip(self.rollouts, self.rewards, strict=True),
                key=lambda pair: (pair[0].group, pair[0].sample_index, pair[0].sequence),
            )
        )

    def _of(self, pairs: Sequence[tuple[Rollout, float]]) -> CollectedRollouts:
        names = {(rollout.group, rollout.sample_index) for rollout, _ in pairs}
        return CollectedRollouts(
            rollouts=[rollout for rollout, _ in pairs],
            rewards=[reward for _, reward in pairs],
            parts={name: parts for name, parts in self.parts.items() if name in names},
        )
