"""Continuous batching: every conversation is in flight at once, and a finished turn is handed over while others still run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from r3.engine.engine import Engine


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


def sampling_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """A 63-bit seed that depends on nothing else: not on batching, neighbours, ranks or order.

    Requests that shared one seed would all draw the same noise, so every request has its own.
    """
    key = f"{run_seed}/{step}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class Sampler:
    """Turns in flight in one engine. All ranks of one engine must add the same turns and step together."""

    def __init__(self, engine: Engine) -> None:
        self._core: Any = engine.llm.llm_engine
        assert not self._core.has_unfinished_requests(), (
            "requests of an earlier call are still in flight"
        )
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
