"""A conversation that the token budget of its step may interrupt.

It has no state but its tokens, its environment and `Progress`, so a later step can resume it. With
stop strings a message is never cut, since a stop string could span the cut: the conversation is
suspended before its next message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from r3.engine import Sampled, Transcript
from r3.rollout.episode import Call, EnvironmentEpisode, TokenSequence
from r3.types import Prompt, Rollout
from r3.user_code.calls import StateError


@dataclass(kw_only=True, slots=True)
class Progress:
    """Everything that resuming a conversation needs besides its tokens and its environment.

    Attributes:
        seed_origin: step in which the conversation began, and its group in that step. They name
            its random streams, also after the group got another number.
        max_tokens_total: maximum tokens of the conversation, first messages included.
        turns: complete messages of the model.
        turns_requested: continuations requested from the engine; a message that the token budget
            interrupted takes several.
        last_turn: index of the first token of the model's last message.
        mid_turn: whether that message is incomplete.
        pending_observation: tokens of the environment's messages that come next.
        metrics: what the environment reported so far, by full names.
    """

    seed_origin: tuple[int, int]
    max_tokens_total: int = 0
    turns: int = 0
    turns_requested: int = 0
    last_turn: int = 0
    mid_turn: bool = False
    pending_observation: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SuspendedConversation:
    """A conversation that the token budget interrupted and that a later step resumes.

    Attributes:
        rollout: the tokens so far, under its group's number in the step. It is not trained on.
        environment: state of its environment, as `Environments.suspend` returns it.
    """

    prompt: Prompt
    rollout: Rollout
    progress: Progress
    environment: bytes


@dataclass(kw_only=True, eq=False)
class BudgetedEpisode(EnvironmentEpisode):
    """The conversation of one environment, within a token budget."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._left = self.rules.token_budget
        self._may_be_cut = False  # the message in flight, by the budget
        self._pending: Sequence[int] = ()  # tokens that a suspended conversation observes next

    def resume(self, suspended: SuspendedConversation) -> None:
        """Request the next turn of a suspended conversation, unless its environment is lost."""
        rollout, progress = suspended.rollout, suspended.progress
        sequence = TokenSequence(
            name=(0,),
            transcript=Transcript.resumed(self.rules.capture, rollout, who=self.who),
            max_tokens_total=progress.max_tokens_total,
            is_cut=progress.mid_turn,
            calls=[(turn,) for turn in range(progress.turns)],
            rewards=list(rollout.turn_rewards),
            last_turn=progress.last_turn,
            messages=list(rollout.messages),
        )
        self.sequences, self.metrics = [sequence], progress.metrics
        self.num_turns, self._turns_requested = progress.turns, progress.turns_requested
        try:
            self._environments.resume(self.key, suspended.environment)
        except StateError as error:
            self._end("error", f"it cannot be restored: {error}")
        else:
            self._next_turn(sequence, progress.pending_observation)

    def deliver(self, call: Call, sampled: Sampled) -> None:
        """Take a sample; suspend the conversation if the budget has cut it."""
        self._left -= len(sampled.tokens_T)
        if self._may_be_cut and sampled.finish_reason == "length":
            call.sequence.append(call, sampled, is_cut=True)
            self.outcome = "suspended"
        else:
            super().deliver(call, sampled)

    def suspend(self) -> SuspendedConversation | None:
        """Return what a later step needs to resume the conversation; None if it has failed."""
        try:
            environment = self._environments.suspend(self.key)
        except StateError as error:
            self._end(
                "error",
                f"rollout.step_token_budget interrupted the conversation, and the environment "
                f"cannot be pickled: {error}; --rollout.step_token_budget 0 needs no pickle",
            )
            return None
        (sequence,) = self.sequences
        return SuspendedConversation(
            prompt=self.prompt,
            rollout=self.rollout(sequence),
            progress=Progress(
                seed_origin=self.seed_origin,
                max_tokens_total=sequence.max_tokens_total,
                turns=self.num_turns,
                turns_requested=self._turns_requested,
                last_turn=sequence.last_turn,
                mid_turn=sequence.is_cut,
                pending_observation=tuple(self._pending),
                metrics=self.metrics,
            ),
            environment=environment,
        )

    def _max_tokens(self, sequence: TokenSequence, observed: Sequence[int]) -> int:
        limit, said = self._environments.settings.max_turn_tokens, 0
        if sequence.is_cut:
            said = len(sequence.transcript.tokens) - sequence.last_turn
        room = min(sequence.room(observed), (limit or sequence.max_tokens_total) - said)
        self._may_be_cut = not self.rules.sampling.stop and self._left < room
        return self._left if self._may_be_cut else room

    def _next_turn(self, sequence: TokenSequence, observed: Sequence[int]) -> None:
        if self._left < 1:
            self.outcome, self._pending = "suspended", observed
        else:
            super()._next_turn(sequence, observed)
