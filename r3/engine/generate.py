"""Continuous batching: every conversation is in flight at once, and a finished one is handed over while others still run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from r3.device import preserved_random_state
from r3.engine.routes import check_routes
from r3.types import Prompt, Rollout

if TYPE_CHECKING:
    from r3.engine.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One answer to sample.

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


def generate(
    engine: Engine, requests: Sequence[Request], on_finished: Callable[[int, Rollout], None]
) -> list[Rollout]:
    """Answer all requests and return rollouts in their order; `on_finished(index, rollout)` runs as each one ends.

    All ranks of one engine must call with the same requests; ranks of different engines are independent. The caller's random
    state is left as it was.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    core: Any = engine.llm.llm_engine
    assert not core.has_unfinished_requests(), "requests of an earlier call are still in flight"
    rollouts: list[Rollout | None] = [None] * len(requests)
    with preserved_random_state():
        for index, request in enumerate(requests):
            sampling = SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                seed=request.seed,
                max_tokens=request.max_tokens,
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            (prompt,) = core.renderer.render_cmpl([{"prompt_token_ids": list(request.prompt.tokens_T)}])
            core.add_request(str(index), prompt, sampling)
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    index = int(output.request_id)
                    rollout = _rollout(engine, requests[index], output.outputs[0])
                    rollouts[index] = rollout
                    on_finished(index, rollout)
    lost = [index for index, rollout in enumerate(rollouts) if rollout is None]
    assert not lost, f"the engine never finished requests {lost[:8]} ({len(lost)} of {len(requests)})"
    return [rollout for rollout in rollouts if rollout is not None]


def _rollout(engine: Engine, request: Request, output: Any) -> Rollout:
    prompt, response = request.prompt.tokens_T, list(output.token_ids)
    tokens_T = np.array([*prompt, *response], dtype=np.int64)
    loss_mask_T = np.zeros(len(tokens_T), dtype=np.float32)
    loss_mask_T[len(prompt) :] = 1.0
    logprobs_T = np.zeros(len(tokens_T), dtype=np.float32)
    logprobs_T[len(prompt) :] = output.logprobs.logprobs
    who = f"rollout {request.prompt.id}/{request.member} of step {engine.version}"
    if not np.isfinite(logprobs_T).all():
        raise FloatingPointError(f"{who}: the engine sampled a token with log-probability {logprobs_T.min()}")
    shape = engine.shape
    if engine.capture and engine.speaks:
        routes = check_routes(
            output.routed_experts,
            num_tokens=len(tokens_T),
            num_experts=shape.num_experts,
            topk=shape.topk,
            num_layers=shape.num_layers,
            moe_layers=shape.moe_layers,
            who=who,
            on_missing=engine.on_missing,
        )
    else:
        routes = np.zeros((len(tokens_T) - 1, 0, 0), dtype=np.int8)
    return Rollout(
        prompt_id=request.prompt.id,
        group=request.group,
        member=request.member,
        tokens_T=tokens_T,
        loss_mask_T=loss_mask_T,
        logprobs_T=logprobs_T,
        routed_experts=routes,
        finish_reason=str(output.finish_reason),
        version=engine.version,
        response=engine.tokenizer.decode(response, skip_special_tokens=True),
    )
