"""The tokens of one conversation with their log-probabilities and routes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from r3.algo.packing import MISSING
from r3.engine.sampler import Sampled
from r3.models.shape import ModelShape
from r3.routing.capture import check_routes
from r3.types import Prompt, Rollout, RouteError

# Rows of an earlier turn that a later turn requests again. If they name other experts, rows were
# shifted on the way.
OVERLAP_ROWS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """What a transcript needs to know of the engine that samples for it.

    Attributes:
        policy_version: version of the weights in the engine.
        captures: whether routes are kept on this rank: the engine returns them, and the rank is
            the leader of its engine.
        on_missing: "error" refuses an incomplete capture, "live" makes it rows of -1.
        shape: number of layers, experts and experts per token.
    """

    policy_version: int
    captures: bool
    on_missing: Literal["error", "live"]
    shape: ModelShape


class Transcript:
    """The tokens of a conversation as they were sampled and observed. Only appended to.

    Under new weights (`resumed`) the engine recomputes the earlier tokens for its own use. The
    routes and log-probabilities of those tokens stay what the version returned that sampled them.

    Attributes:
        tokens: token ids, sampled and observed.
        loss_mask: 1 for sampled tokens, 0 for others.
        logprobs: log-probability of each sampled token, 0 for others.
        differing: two counts over the rows that were requested twice: (token, layer) slots that
            came back with other experts, and all slots.
    """

    def __init__(self, spec: CaptureSpec, tokens: Sequence[int], *, who: str) -> None:
        """Begin with observed tokens; `who` names the conversation in errors."""
        self.tokens = list(tokens)
        self.loss_mask = [0.0] * len(tokens)
        self.logprobs = [0.0] * len(tokens)
        self.differing = (0, 0)
        self._spec = spec
        self._who = who
        self._rows: list[np.ndarray] = []
        self._num_rows = 0
        self._segments: list[tuple[int, int]] = []
        self._first_new = 0  # first token that the present weights may have sampled

    @classmethod
    def resumed(cls, spec: CaptureSpec, rollout: Rollout, *, who: str) -> Transcript:
        """Continue a conversation that was suspended, perhaps under older weights."""
        transcript = cls(spec, rollout.tokens_T.tolist(), who=who)
        transcript.loss_mask = rollout.loss_mask_T.tolist()
        transcript.logprobs = rollout.logprobs_T.tolist()
        if spec.captures:
            transcript._rows = [rollout.routed_experts]
            transcript._num_rows = len(rollout.routed_experts)
        transcript._segments = list(rollout.segments)
        transcript._first_new = len(rollout.tokens_T)
        return transcript

    @property
    def first_row(self) -> int:
        """First row that the next turn should return.

        A few rows come before those still missing, if the same weights computed them: they are
        compared with the rows that are kept.
        """
        same = not self._segments or self._segments[-1][1] == self._spec.policy_version
        return max(0, self._num_rows - OVERLAP_ROWS) if same else self._num_rows

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.tokens += tokens
        self.loss_mask += [0.0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def append_sample(self, sampled: Sampled) -> None:
        """Append sampled tokens and the rows that are not kept yet.

        Raises:
            FloatingPointError: a log-probability is not finite.
            RouteError: rows are missing or illegal, or belong to other tokens.
        """
        if not math.isfinite(sum(sampled.logprobs_T)):  # one NaN or infinity makes the sum so
            bad = next(each for each in sampled.logprobs_T if not math.isfinite(each))
            raise FloatingPointError(
                f"{self._who}: the engine sampled a token with log-probability {bad}"
            )
        spec = self._spec
        if not self._segments or self._segments[-1][1] != spec.policy_version:
            self._segments.append((self._first_new, spec.policy_version))
        self.tokens += sampled.tokens_T
        self.loss_mask += [1.0] * len(sampled.tokens_T)
        self.logprobs += sampled.logprobs_T
        if not spec.captures:
            return
        rows = check_routes(
            sampled.routed_experts,
            num_tokens=len(self.tokens) - sampled.first_row,
            num_experts=spec.shape.num_experts,
            topk=spec.shape.topk,
            num_layers=spec.shape.num_layers,
            moe_layers=spec.shape.moe_layers,
            who=self._who,
            on_missing=spec.on_missing,
        )
        if overlap := self._num_rows - sampled.first_row:
            kept = np.concatenate(self._rows[-overlap:])[-overlap:]
            self._compare(kept, rows[:overlap])
        self._rows.append(rows[overlap:])
        self._num_rows = len(self.tokens) - 1

    def _compare(self, kept: np.ndarray, again: np.ndarray) -> None:
        """Compare rows that were requested twice.

        Rows come from the prefix cache or were recomputed. Rounding may then change a few rows;
        a shift changes most of them.
        """
        captured = ((kept != MISSING) & (again != MISSING)).all(-1)
        differs = (np.sort(kept, -1) != np.sort(again, -1)).any(-1)[captured]
        self.differing = (self.differing[0] + int(differs.sum()), self.differing[1] + differs.size)
        if differs.size >= OVERLAP_ROWS and differs.mean() > 0.5:
            raise RouteError(
                f"{self._who}: the engine returned {differs.size} routes before token "
                f"{self._num_rows} again, and {int(differs.sum())} of them name other experts. "
                "Rows are shifted, or the prefix cache belongs to other weights."
            )

    def rows(self) -> np.ndarray:
        """Routes of every token but the last, [T-1, L, K].

        [T-1, 0, 0] if routes are not captured or nothing was sampled.
        """
        if not self._spec.captures or not any(self.loss_mask):
            return np.zeros((len(self.tokens) - 1, 0, 0), dtype=np.int8)
        assert self._num_rows == len(self.tokens) - 1, (
            f"{self._who}: {self._num_rows} rows of {len(self.tokens)} tokens"
        )
        return np.concatenate(self._rows)

    def rollout(
        self, prompt: Prompt, *, group: int, sample_index: int, finish_reason: str, response: str
    ) -> Rollout:
        """Make a rollout of the conversation; `response` is the model's last message, decoded."""
        return Rollout(
            prompt_id=prompt.id,
            group=group,
            sample_index=sample_index,
            tokens_T=np.array(self.tokens, dtype=np.int64),
            loss_mask_T=np.array(self.loss_mask, dtype=np.float32),
            logprobs_T=np.array(self.logprobs, dtype=np.float32),
            routed_experts=self.rows(),
            finish_reason=finish_reason,
            policy_version=self._segments[0][1] if self._segments else self._spec.policy_version,
            segments=tuple(self._segments),
            response=response,
        )
