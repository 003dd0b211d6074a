"""Sample turns, and join those of a conversation to its transcript.

Batching is continuous: every conversation is in flight at once, and turns finish in any order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from r3.algo.packing import MISSING
from r3.algo.sampling_mask import EMPTY
from r3.engine.route_slots import SlotRoutes
from r3.models.shape import ModelShape
from r3.routing.ledger import check_routes
from r3.types import Prompt, Rollout, RouteError, SamplingMask


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn and when a turn ends.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass; 1 is off.
        top_k: number of likeliest tokens to draw from; 0 is off.
        stop: strings that end a turn; their tokens stay in it.
        stop_tokens: tokens that end a turn; without any, only its length does.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A continuation to sample.

    Attributes:
        key: names the turn while it is in flight.
        tokens_T: all tokens before the continuation.
        first_row: first token whose routes are wanted.
        seed: seed of the turn's own random stream (`sampling_seed`); unused at temperature 0.
        max_tokens: maximum tokens of the continuation.
        sampling: how its tokens are drawn.
    """

    key: int
    tokens_T: Sequence[int]
    first_row: int
    seed: int
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A finished turn.

    Attributes:
        key: the turn's.
        tokens_T: sampled token ids.
        logprobs_T: log-probability of each of them under the distribution it was drawn from.
        routed_experts: routes from the turn's `first_row` on, [rows, layers, K]; None if the
            engine returned none.
        first_row: the turn's.
        finish_reason: "stop" or "length".
        kept: the tokens that each of them was drawn from, if the engine returns them; else empty.
    """

    key: int
    tokens_T: list[int]
    logprobs_T: list[float]
    routed_experts: np.ndarray | None
    first_row: int
    finish_reason: str
    kept: Sequence[np.ndarray] = ()


def sampling_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Derive a 63-bit seed from its arguments alone.

    It does not depend on batching, neighbours, ranks or order. Requests that share a seed draw
    the same noise, so every request needs its own.
    """
    key = f"{run_seed}/{step}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class Sampler:
    """Turns in flight in one engine. All ranks of one engine must add the same turns and step
    together."""

    def __init__(
        self, core: Any, routes: SlotRoutes | None = None, kept: Any | None = None
    ) -> None:
        """Take vLLM's `LLMEngine`, which must be idle.

        Args:
            routes: where the routes of finished turns are; None: nowhere, the engine captures none.
            kept: where the tokens are that turns with `top_k` were drawn from (`KeptTokens`);
                None: nowhere.
        """
        assert not core.has_unfinished_requests(), "requests of an earlier call are in flight"
        self._core = core
        self._routes, self._kept = routes, kept
        if routes:
            routes.clear()
        if kept:
            kept.clear()
        self._names: dict[int, str] = {}  # key of a turn -> vLLM's own name of the request
        self._scheduler = core.engine_core.engine_core.scheduler
        self._turns: dict[int, Turn] = {}
        self._preempted: dict[str, int] = {}  # request -> how often

    @property
    def busy(self) -> bool:
        """Whether a turn is in flight."""
        return bool(self._turns)

    @property
    def preemptions(self) -> int:
        """How often a turn lost its KV cache to another, and was computed again."""
        return sum(self._preempted.values())

    def add(self, turn: Turn) -> None:
        """Put a turn in flight."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        assert turn.key not in self._turns, f"turn {turn.key} is in flight already"
        how = turn.sampling
        sampling = SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            seed=turn.seed,
            max_tokens=turn.max_tokens,
            logprobs=self._kept.wanted if self._kept and how.top_k else 0,  # of the sampled token
            flat_logprobs=True,
            stop=list(how.stop),
            include_stop_str_in_output=bool(how.stop),
            stop_token_ids=list(how.stop_tokens),
            ignore_eos=not how.stop_tokens,
            detokenize=bool(how.stop),
            skip_special_tokens=False,  # a stop string may be one, such as </tool_call>
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=turn.first_row,
            skip_clone=True,  # no other request has it
        )
        (prompt,) = self._core.renderer.render_cmpl([{"prompt_token_ids": list(turn.tokens_T)}])
        self._names[turn.key] = self._core.add_request(str(turn.key), prompt, sampling)
        self._turns[turn.key] = turn

    def abort(self, keys: Sequence[int]) -> None:
        """End turns in flight; `step` does not return them."""
        for key in keys:
            del self._turns[key]
            name = self._names.pop(key)
            self._core.abort_request([name], internal=True)
            if self._routes:
                self._routes.take(name)

    def step(self) -> list[Sampled]:
        """Sample one more token of every turn in flight; return the turns that finished."""
        finished = []
        outputs = self._core.step()
        # No turn finishes in the step that preempts it, so each is seen here.
        for request in self._scheduler.requests.values():
            if request.num_preemptions:
                self._preempted[request.request_id] = request.num_preemptions
        for output in outputs:
            if not output.finished:
                continue
            turn, completion = self._turns.pop(int(output.request_id)), output.outputs[0]
            name = self._names.pop(turn.key)
            routes = self._routes.take(name) if self._routes else None
            logprobs, kept = list(completion.logprobs.logprobs), list[np.ndarray]()
            if self._kept and turn.sampling.top_k:
                logprobs, kept = self._kept.take(completion.logprobs)
            finished.append(
                Sampled(
                    key=turn.key,
                    tokens_T=list(completion.token_ids),
                    logprobs_T=logprobs,
                    routed_experts=routes,
                    first_row=turn.first_row,
                    finish_reason=str(completion.finish_reason),
                    kept=kept,
                )
            )
        assert not self._turns or self._core.has_unfinished_requests(), (
            f"the engine lost turns {sorted(self._turns)[:8]} ({len(self._turns)} in all)"
        )
        return finished


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
        kept: the tokens that each sampled token was drawn from; none for others.
        differing: two counts over the rows that were requested twice: (token, layer) slots that
            came back with other experts, and all slots.
    """

    def __init__(self, spec: CaptureSpec, tokens: Sequence[int], *, who: str) -> None:
        """Begin with observed tokens; `who` names the conversation in errors."""
        self.tokens = list(tokens)
        self.loss_mask = [0.0] * len(tokens)
        self.logprobs = [0.0] * len(tokens)
        self.kept = [EMPTY] * len(tokens)
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
        if mask := rollout.sampling_mask:
            transcript.kept = np.split(mask.token_ids, np.cumsum(mask.counts_T)[:-1])
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
        self.kept += [EMPTY] * len(tokens)

    def append_sample(self, sampled: Sampled) -> None:
        """Append sampled tokens and the rows that are not kept yet.

        Raises:
            FloatingPointError: a log-probability is not finite.
            RouteError: rows are missing or illegal, or belong to other tokens.
        """
        if not math.isfinite(sum(sampled.logprobs_T)):  # one NaN or infinity makes the sum so
            bad = next(logprob for logprob in sampled.logprobs_T if not math.isfinite(logprob))
            raise FloatingPointError(
                f"{self._who}: the engine sampled a token with log-probability {bad}"
            )
        spec = self._spec
        if not self._segments or self._segments[-1][1] != spec.policy_version:
            self._segments.append((self._first_new, spec.policy_version))
        self.tokens += sampled.tokens_T
        self.loss_mask += [1.0] * len(sampled.tokens_T)
        self.logprobs += sampled.logprobs_T
        self.kept += sampled.kept or [EMPTY] * len(sampled.tokens_T)
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
        counts_T = np.fromiter(map(len, self.kept), np.int32)
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
            sampling_mask=SamplingMask(counts_T=counts_T, token_ids=np.concatenate(self.kept))
            if counts_T.any()
            else None,
        )
