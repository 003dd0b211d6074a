"""One sample of a dump, for display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r3.types import Message


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row of `rollouts/step_N.jsonl` or `eval/step_N.jsonl`.

    Attributes:
        row: index of the row in its file; the arrays beside a rollout dump have the same order.
        group: samples with the same number answer the same prompt.
        sequence: index among the token sequences of a workflow's episode; 0 for conversations.
        own_reward: whether the reward is of this sequence alone; None if its episode is unfinished.
        question: the last message of the user; empty if the dump does not have it.
        reference: the reference answer; empty when the dump does not have it.
        messages: the whole conversation.
        components: what each component of the reward gave, by name.
        metrics: what the environment and the reward functions reported, by full names.
        turn_rewards: reward of each turn that the environment rewarded, None where it gave none.
        advantage: None for evaluation and distillation.
        shaped_reward: what the advantage is made of: the reward minus penalties and KL. None for
            evaluation.
    """

    row: int
    prompt_id: str
    group: int
    sample_index: int
    question: str
    reference: str
    messages: tuple[Message, ...]
    reward: float
    components: Mapping[str, float]
    metrics: Mapping[str, float]
    turn_rewards: tuple[float | None, ...]
    advantage: float | None
    finish_reason: str
    response_tokens: int
    sequence: int = 0
    own_reward: bool | None = False
    shaped_reward: float | None = None

    @property
    def name(self) -> str:
        """Prompt, sample and, after the first, sequence."""
        sequence = f" sequence {self.sequence}" if self.sequence else ""
        return f"{self.prompt_id}  sample {self.sample_index}{sequence}"


def sample_of(number: int, row: Mapping[str, Any]) -> Sample:
    """The sample of row `number`.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is no row of a dump.
    """
    messages = row["messages"]
    for message in messages:
        _ = message["role"], tool_calls_text(message)
    return Sample(
        row=number,
        prompt_id=row["prompt_id"],
        group=int(row["group"] if "group" in row else row["place"]),
        sample_index=int(row["sample_index"] if "sample_index" in row else row["sample"]),
        question=str(row.get("question", "")),
        reference=str(row.get("reference", "")),
        messages=tuple(messages),
        reward=float(row["reward"]),
        components={name: float(part) for name, part in row.get("rewards", {}).items()},
        metrics={name: float(number) for name, number in row.get("metrics", {}).items()},
        turn_rewards=_rewarded_turns([_real(reward) for reward in row.get("turn_rewards", ())]),
        advantage=_real(row.get("advantage")),
        finish_reason=str(row["finish_reason"]),
        response_tokens=int(row["response_tokens"]),
        sequence=row.get("sequence", 0),
        own_reward=row.get("own_reward", False),
        shaped_reward=_real(row.get("shaped_reward")),
    )


def counted(samples: Sequence[Sample]) -> list[Sample]:
    """Those whose rewards count, as in reward/mean: an episode once, unless calls are rewarded."""
    by_call = any(sample.own_reward for sample in samples)
    return [
        sample
        for sample in samples
        if not sample.sequence or (by_call if sample.own_reward is None else sample.own_reward)
    ]


def tool_calls_text(message: Message) -> list[str]:
    """One line per structured tool call of a message: `name(arguments)`."""
    lines = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        lines.append(f"{function.get('name', '?')}({function.get('arguments', '')})")
    return lines


def _real(value: Any) -> float | None:
    return None if value is None else float(value)


def _rewarded_turns(turn_rewards: Sequence[float | None]) -> tuple[float | None, ...]:
    """Rewards per turn; empty if the environment left all rewards to the reward functions."""
    return tuple(turn_rewards) if any(reward is not None for reward in turn_rewards) else ()
