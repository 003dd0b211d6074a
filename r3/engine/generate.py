"""Single-turn generation without environments: used by the check of the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from r3.engine.sampler import Sampling, Turn
from r3.engine.transcript import Transcript
from r3.types import Prompt, Rollout

if TYPE_CHECKING:
    from r3.engine.engine import Engine


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
    sample_index: int
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def generate(
    engine: Engine, requests: Sequence[Request], on_finished: Callable[[int, Rollout], None]
) -> list[Rollout]:
    """Answer all requests and return rollouts in their order; `on_finished(index, rollout)` runs as each one ends.

    All ranks of one engine must call with the same requests; ranks of different engines are independent. The caller's random
    state is left as it was.
    """
    rollouts: dict[int, Rollout] = {}
    with engine.sampler(policy_version=engine.policy_version) as sampler:
        for index, request in enumerate(requests):
            sampling = Sampling(
                temperature=request.temperature, top_p=request.top_p, top_k=request.top_k
            )
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
                who = f"rollout {request.prompt.id}/{request.sample_index} of step {engine.policy_version}"
                transcript = Transcript(engine, request.prompt.tokens_T, who=who)
                transcript.take(sampled)
                rollouts[sampled.key] = transcript.rollout(
                    request.prompt,
                    group=request.group,
                    sample_index=request.sample_index,
                    finish_reason=sampled.finish_reason,
                    last_turn=len(request.prompt.tokens_T),
                )
                on_finished(sampled.key, rollouts[sampled.key])
    return [rollouts[index] for index in range(len(requests))]
