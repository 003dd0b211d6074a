"""Continuous batching: every conversation is in flight at once, and a finished turn is handed over while others still run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from r3.engine.routes import RouteError, check_routes
from r3.packing import MISSING
from r3.types import Prompt, Rollout

if TYPE_CHECKING:
    from r3.engine.engine import Engine

# Rows of an earlier turn that a later one asks for again: if they are other experts, rows were shifted on the way.
OVERLAP_ROWS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn and when a turn ends.

    Attributes:
        temperature, top_p, top_k: temperature 0 is greedy, top_k 0 is off.
        stop: strings that end a turn; their tokens stay in it.
        stop_tokens: tokens that end a turn, besides the model's own end of sequence.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One continuation to sample.

    Attributes:
        key: names it while it is in flight.
        tokens_T: everything before it.
        first_row: routes are wanted from this token on, not those that are held already.
        seed: of its own random stream (`sampling_seed`); unused at temperature 0.
        max_tokens: longest continuation.
    """

    key: int
    tokens_T: Sequence[int]
    first_row: int
    seed: int
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A turn that ended: tokens with their log-probabilities, and the routes from the turn's `first_row` on.

    `finish_reason` is "stop" or "length".
    """

    key: int
    tokens_T: list[int]
    logprobs_T: list[float]
    routed_experts: np.ndarray | None
    first_row: int
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One answer of one turn to sample.

    Attributes:
        prompt: what to answer; `group` and `member` name the answer inside the step.
        seed: of this request's own random stream (`sampling_seed`); unused at temperature 0.
        max_tokens: longest response.
        temperature, top_p, top_k: sampling; temperature 0 is greedy, top_k 0 is off.
    """

    prompt: Prompt
    group: int
    member: int
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def sampling_seed(run_seed: int, step: int, prompt_id: str, member: int) -> int:
    """A 63-bit seed that depends on nothing else: not on batching, neighbours, ranks or order.

    Requests that shared one seed would all draw the same noise, so every request has its own.
    """
    key = f"{run_seed}/{step}/{prompt_id}/{member}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class Sampler:
    """Turns in flight in one engine. All ranks of one engine must add the same turns and step together."""

    def __init__(self, engine: Engine) -> None:
        self._core: Any = engine.llm.llm_engine
        assert not self._core.has_unfinished_requests(), "requests of an earlier call are still in flight"
        self._turns: dict[int, Turn] = {}

    @property
    def busy(self) -> bool:
        """Whether a turn is in flight."""
        return bool(self._turns)

    def add(self, turn: Turn) -> None:
        """Put a turn in flight."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert turn.key not in self._turns, f"turn {turn.key} is in flight already"
        how = turn.sampling
        sampling = SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            seed=turn.seed,
            max_tokens=turn.max_tokens,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            stop=list(how.stop),
            include_stop_str_in_output=bool(how.stop),
            stop_token_ids=list(how.stop_tokens),
            detokenize=bool(how.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=turn.first_row,
        )
        (prompt,) = self._core.renderer.render_cmpl([{"prompt_token_ids": list(turn.tokens_T)}])
        self._core.add_request(str(turn.key), prompt, sampling)
        self._turns[turn.key] = turn

    def step(self) -> list[Sampled]:
        """One more token for each turn in flight; returns those that ended."""
        ended = []
        for output in self._core.step():
            if not output.finished:
                continue
            turn, completion = self._turns.pop(int(output.request_id)), output.outputs[0]
            ended.append(
                Sampled(
                    key=turn.key,
                    tokens_T=list(completion.token_ids),
                    logprobs_T=list(completion.logprobs.logprobs),
                    routed_experts=completion.routed_experts,
                    first_row=turn.first_row,
                    finish_reason=str(completion.finish_reason),
                )
            )
        assert not self._turns or self._core.has_unfinished_requests(), (
            f"the engine lost turns {sorted(self._turns)[:8]} ({len(self._turns)} in all)"
        )
        return ended


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
        self._captures = engine.capture and engine.speaks
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
            transcript._rows, transcript._held = [rollout.routed_experts], len(rollout.routed_experts)
        transcript._segments, transcript._began = list(rollout.segments), len(rollout.tokens_T)
        return transcript

    @property
    def first_row(self) -> int:
        """Where the routes of the next turn should begin: a few rows before those not held yet, if the same weights made them."""
        same = not self._segments or self._segments[-1][1] == self._engine.version
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
            raise FloatingPointError(f"{self._who}: the engine sampled a token with log-probability {lowest}")
        if not self._segments or self._segments[-1][1] != self._engine.version:
            self._segments.append((self._began, self._engine.version))
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
        self, prompt: Prompt, *, group: int, member: int, finish_reason: str, last_turn: int
    ) -> Rollout:
        """The conversation as a rollout; `last_turn` is where the model's last message begins, which is the response."""
        return Rollout(
            prompt_id=prompt.id,
            group=group,
            member=member,
            tokens_T=np.array(self.tokens, dtype=np.int64),
            loss_mask_T=np.array(self.loss_mask, dtype=np.float32),
            logprobs_T=np.array(self.logprobs, dtype=np.float32),
            routed_experts=self.rows(),
            finish_reason=finish_reason,
            version=self._segments[0][1] if self._segments else self._engine.version,
            segments=tuple(self._segments),
            response=self._engine.tokenizer.decode(self.tokens[last_turn:], skip_special_tokens=True),
        )


def generate(
    engine: Engine, requests: Sequence[Request], on_finished: Callable[[int, Rollout], None]
) -> list[Rollout]:
    """Answer all requests and return rollouts in their order; `on_finished(index, rollout)` runs as each one ends.

    All ranks of one engine must call with the same requests; ranks of different engines are independent. The caller's random
    state is left as it was.
    """
    rollouts: dict[int, Rollout] = {}
    with engine.sampler(version=engine.version) as sampler:
        for index, request in enumerate(requests):
            sampling = Sampling(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k)
            sampler.add(
                Turn(
                    key=index,
                    tokens_T=request.prompt.tokens_T,
                    first_row=0,
                    seed=request.seed,
                    max_tokens=request.max_tokens,
                    sampling=sampling,
                )
            )
        while sampler.busy:
            for sampled in sampler.step():
                request = requests[sampled.key]
                who = f"rollout {request.prompt.id}/{request.member} of step {engine.version}"
                transcript = Transcript(engine, request.prompt.tokens_T, who=who)
                transcript.take(sampled)
                rollouts[sampled.key] = transcript.rollout(
                    request.prompt,
                    group=request.group,
                    member=request.member,
                    finish_reason=sampled.finish_reason,
                    last_turn=len(request.prompt.tokens_T),
                )
                on_finished(sampled.key, rollouts[sampled.key])
    return [rollouts[index] for index in range(len(requests))]
