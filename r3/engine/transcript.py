"""The tokens of one conversation with their log-probabilities and routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from r3.algo.packing import MISSING
from r3.engine.sampler import Sampled
from r3.routing.capture import check_routes
from r3.types import Prompt, Rollout, RouteError

if TYPE_CHECKING:
    from r3.engine.engine import Engine


# Rows of an earlier turn that a later one asks for again: if they are other experts, rows were shifted on the way.
OVERLAP_ROWS = 4


class Transcript:
    """The tokens of a conversation as they were sampled and observed, with what the engine did for them. Only appended to.

    Under new weights (`resumed`) the engine computes what came before anew, for its own use: rows and log-probabilities that
    are held stay those of the version that sampled the tokens, and are not compared with what newer weights say.

    Attributes:
        differing: of the rows that were asked for twice, the (token, layer) slots that came back with other experts, and all.
    """

    def __init__(self, engine: Engine, tokens: Sequence[int], *, who: str) -> None:
        self.tokens = list(tokens)
        self.loss_mask = [0.0] * len(tokens)
        self.logprobs = [0.0] * len(tokens)
        self.differing = (0, 0)
        self._engine = engine
        self._captures = engine.capture and engine.is_leader
        self._who = who
        self._rows: list[np.ndarray] = []
        self._held = 0
        self._segments: list[tuple[int, int]] = []
        self._began = 0  # first token that the present weights may have sampled

    @classmethod
    def resumed(cls, engine: Engine, rollout: Rollout, *, who: str) -> Transcript:
        """Of a conversation that was interrupted, perhaps under older weights."""
        transcript = cls(engine, rollout.tokens_T.tolist(), who=who)
        transcript.loss_mask = rollout.loss_mask_T.tolist()
        transcript.logprobs = rollout.logprobs_T.tolist()
        if transcript._captures:
            transcript._rows, transcript._held = (
                [rollout.routed_experts],
                len(rollout.routed_experts),
            )
        transcript._segments, transcript._began = list(rollout.segments), len(rollout.tokens_T)
        return transcript

    @property
    def first_row(self) -> int:
        """Where the routes of the next turn should begin: a few rows before those not held yet, if the same weights made them."""
        same = not self._segments or self._segments[-1][1] == self._engine.policy_version
        return max(0, self._held - OVERLAP_ROWS) if same else self._held

    def observe(self, tokens: Sequence[int]) -> None:
        """Append what the model did not say."""
        self.tokens += tokens
        self.loss_mask += [0.0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def take(self, sampled: Sampled) -> None:
        """Append what the model said, and the rows that were not held.

        Raises:
            FloatingPointError: a log-probability is not finite.
            RouteError: rows are missing or illegal, or not where they belong.
        """
        if not np.isfinite(sampled.logprobs_T).all():
            lowest = min(sampled.logprobs_T)
            raise FloatingPointError(
                f"{self._who}: the engine sampled a token with log-probability {lowest}"
            )
        if not self._segments or self._segments[-1][1] != self._engine.policy_version:
            self._segments.append((self._began, self._engine.policy_version))
        self.tokens += sampled.tokens_T
        self.loss_mask += [1.0] * len(sampled.tokens_T)
        self.logprobs += sampled.logprobs_T
        if not self._captures:
            return
        shape = self._engine.shape
        rows = check_routes(
            sampled.routed_experts,
            num_tokens=len(self.tokens) - sampled.first_row,
            num_experts=shape.num_experts,
            topk=shape.topk,
            num_layers=shape.num_layers,
            moe_layers=shape.moe_layers,
            who=self._who,
            on_missing=self._engine.on_missing,
        )
        if overlap := self._held - sampled.first_row:
            held = np.concatenate(self._rows[-overlap:])[-overlap:]
            self._compare(held, rows[:overlap])
        self._rows.append(rows[overlap:])
        self._held = len(self.tokens) - 1

    def _compare(self, held: np.ndarray, again: np.ndarray) -> None:
        """Rows come from the prefix cache, or were computed again: then rounding may move a few, a shift moves most."""
        captured = ((held != MISSING) & (again != MISSING)).all(-1)
        differs = (np.sort(held, -1) != np.sort(again, -1)).any(-1)[captured]
        self.differing = (self.differing[0] + int(differs.sum()), self.differing[1] + differs.size)
        if differs.size >= OVERLAP_ROWS and differs.mean() > 0.5:
            raise RouteError(
                f"{self._who}: of {differs.size} routes before token {self._held} that the engine gave again, "
                f"{int(differs.sum())} are other experts: rows are shifted, or the cache is of other weights"
            )

    def rows(self) -> np.ndarray:
        """Routes of every token but the last, [T-1, L, K]; [T-1, 0, 0] when none are captured, or nothing was sampled."""
        if not self._captures or not any(self.loss_mask):
            return np.zeros((len(self.tokens) - 1, 0, 0), dtype=np.int8)
        assert self._held == len(self.tokens) - 1, (
            f"{self._who}: {self._held} rows of {len(self.tokens)} tokens"
        )
        return np.concatenate(self._rows)

    def rollout(
        self, prompt: Prompt, *, group: int, sample_index: int, finish_reason: str, last_turn: int
    ) -> Rollout:
        """The conversation as a rollout; `last_turn` is where the model's last message begins, which is the response."""
        return Rollout(
            prompt_id=prompt.id,
            group=group,
            sample_index=sample_index,
            tokens_T=np.array(self.tokens, dtype=np.int64),
            loss_mask_T=np.array(self.loss_mask, dtype=np.float32),
            logprobs_T=np.array(self.logprobs, dtype=np.float32),
            routed_experts=self.rows(),
            finish_reason=finish_reason,
            policy_version=self._segments[0][1] if self._segments else self._engine.policy_version,
            segments=tuple(self._segments),
            response=self._engine.tokenizer.decode(
                self.tokens[last_turn:], skip_special_tokens=True
            ),
        )
