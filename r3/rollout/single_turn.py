"""One response per prompt, without environments and rewards: to verify the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from r3.data.template import Renderer
from r3.engine import Engine, Sampling, Transcript, Turn
from r3.types import Prompt, Rollout


def sample_single_turn(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    seeds: Sequence[int],
    policy_version: int,
    max_tokens: int,
    temperature: float = 1.0,
    on_rollout: Callable[[int, Rollout], None] = lambda _index, _rollout: None,
) -> list[Rollout]:
    """Sample one response to each prompt.

    All ranks of one engine must call with the same arguments; engines are independent. Routes are
    kept on the leader rank of each engine.

    Args:
        prompts: may name one prompt several times. Rollout i belongs to group i.
        seeds: one per prompt (`sampling_seed`), unused at temperature 0.
        policy_version: version of the weights that the engine must hold.
        max_tokens: maximum tokens per response.
        on_rollout: called with the index and the rollout of each response that finishes.

    Returns:
        The rollouts in the order of the prompts.

    Raises:
        EngineStateError: the engine is asleep or holds other weights.
        RouteError: routes are missing or illegal.
    """
    renderer = Renderer(engine.tokenizer)
    sampling = Sampling(temperature=temperature, stop_tokens=renderer.ends)
    rollouts: dict[int, Rollout] = {}
    capture = engine.capture_spec
    with engine.sampler(policy_version=policy_version) as sampler:
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            sampler.add(
                Turn(
                    key=index,
                    tokens_T=prompt.tokens_T,
                    first_row=0,
                    seed=seed,
                    max_tokens=max_tokens,
                    sampling=sampling,
                )
            )
        while sampler.busy:
            for sampled in sampler.step():
                index, prompt = sampled.key, prompts[sampled.key]
                who = f"rollout {prompt.id}/0 of step {policy_version}"
                transcript = Transcript(capture, prompt.tokens_T, who=who)
                transcript.append_sample(sampled)
                rollouts[index] = transcript.rollout(
                    prompt,
                    group=index,
                    sample_index=0,
                    finish_reason=sampled.finish_reason,
                    response=renderer.message_text(sampled.tokens_T),
                )
                on_rollout(index, rollouts[index])
    return [rollouts[index] for index in range(len(prompts))]
