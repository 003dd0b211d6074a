"""Conversations of every kind, each compared with one forward pass of transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from r3.engine import Engine, Sampled, Sampling, Transcript, Turn
from r3.runtime.device import Device
from r3.types import Rollout, RouteError
from tests.talkers import CHATTY, Talker, Yardstick, values
from tests.tiny import rewards_of, tiny_config

# Settings of the environment; a path is a class in `CHATTY`.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chatty": {"path": "Chatty"},
    "tool in workers": {"path": "Tool", "workers": 1},
    "calls": {"path": "Calls", "max_turns": 5},
    "stop strings": {"path": "Stops", "stop": ("+",)},
    "cut turns": {"path": "Chatty", "max_turn_tokens": 3},
    "little room": {"path": "Chatty", "max_tokens": 40},
    "few turns": {"path": "Chatty", "max_turns": 2},
    "game": {"name": "guess_number", "max_turn_tokens": 12},
    "calculator": {"name": "calculator"},
}


def facts(rollout: Rollout, decode: Callable[[Any], str]) -> SimpleNamespace:
    """Return what the tests compare of one rollout.

    Returns:
        One rollout.
        name: "PROMPT/SAMPLE".
        rows: rows of routes.
        num_sampled: tokens that the model sampled.
        text: everything from the first sampled token on.
        turns: the model's messages.
        observed_logprobs: largest |log-probability| of a token that was not sampled.
        response: the last message.
    """
    mask = rollout.loss_mask_T
    first = int(mask.argmax())
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1).tolist()
    ends = [*np.flatnonzero(np.diff(mask) == -1).tolist(), len(mask) - 1][: len(starts)]
    return SimpleNamespace(
        name=f"{rollout.prompt_id}/{rollout.sample_index}",
        tokens=rollout.tokens_T.tolist(),
        rows=len(rollout.routed_experts),
        num_sampled=int(mask.sum()),
        text=decode(rollout.tokens_T[first:]),
        turns=[decode(rollout.tokens_T[a : b + 1]) for a, b in zip(starts, ends, strict=True)],
        finish_reason=rollout.finish_reason,
        observed_logprobs=float(abs(rollout.logprobs_T[mask == 0]).max()),
        response=rollout.response,
    )


def talks(
    device: Device,
    *,
    folder: str,
    kinds: Sequence[str] = (),
    prompts: int = 8,
    is_compared: bool = True,
) -> SimpleNamespace:
    """Sample kinds of conversation.

    The folder has a base model, `tests.tiny.base_model`.

    Args:
        kinds: which; none: all.
        prompts: prompts of each kind, two samples each.
        is_compared: compare each conversation with transformers, and feed one to the guards.

    Returns:
        Rounds by kind, and the results of right and wrong rows in a later turn.
        stopped: last token and finish reason where only a stop string ends a turn.
    """
    file = Path(folder) / f"chatty_{device.rank}_{device.world_size}.py"
    file.write_text(CHATTY)
    config = tiny_config(
        Path(folder) / "base",
        engine={"max_model_len": 320, "kv_cache_gib": 0.0625},
        rollout={"max_response_tokens": 120},
    )
    talker = Talker(device, config)
    yardstick = Yardstick(config.model.path) if is_compared else None
    few = talker.task.prompts.prompts[:prompts]
    talks: dict[str, SimpleNamespace] = {}
    messages: dict[str, str] = {}
    for kind in kinds or KINDS:
        env = dict(KINDS[kind])
        if "path" in env:
            env["path"] = f"{file}:{env['path']}"
        collected = talker.collect(prompts=few, **env)
        rollouts = collected.rollouts
        talks[kind] = SimpleNamespace(
            rollouts=[facts(rollout, talker.task.tokenizer.decode) for rollout in rollouts],
            rewards=rewards_of(collected),
            metrics=values(collected.metrics),
            agreement=yardstick.compare(rollouts) if yardstick and rollouts else None,
        )
        if kind == "chatty" and yardstick and rollouts:
            messages = guards(talker.engine, rollouts)
    return SimpleNamespace(kinds=talks, guards=messages, stopped=stopped(talker, "<|im_end|>"))


def stopped(talker: Talker, stop: str) -> list[list[str]]:
    """Sample until a stop string; return last token and finish reason of each response."""
    sampling, found = Sampling(temperature=0.0, stop=(stop,)), []
    with talker.engine.sampler(policy_version=0) as sampler:
        for key, prompt in enumerate(talker.task.prompts.prompts[:4]):
            sampler.add(
                Turn(
                    key=key,
                    tokens_T=prompt.tokens_T,
                    first_row=0,
                    seed=0,
                    max_tokens=120,
                    sampling=sampling,
                )
            )
        while sampler.busy:
            found += sampler.step()
    decode = talker.task.tokenizer.decode
    return [[decode(each.tokens_T[-1:]), each.finish_reason] for each in found]


def guards(engine: Engine, rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Feed a conversation to a new transcript, with right and wrong rows in its second turn."""
    rollout = max(rollouts, key=lambda rollout: len(rollout.tokens_T))
    mask, rows = rollout.loss_mask_T, rollout.routed_experts
    # Begin and end of two turns.
    turns = np.flatnonzero(np.diff(mask, prepend=0, append=0))[:4].tolist()
    assert len(turns) == 4, "it has only one turn"
    results: dict[str, str] = {}
    for name, shift, missing in (("right", 0, 0), ("shifted", 1, 0), ("too few", 0, 1)):
        transcript = Transcript(
            engine.capture_spec, rollout.tokens_T[: turns[0]].tolist(), who="the rollout"
        )
        try:
            for start, end in (turns[:2], turns[2:]):
                transcript.observe(rollout.tokens_T[len(transcript.tokens) : start].tolist())
                first = transcript.first_row
                late = shift if first else 0
                transcript.append_sample(
                    Sampled(
                        key=0,
                        tokens_T=rollout.tokens_T[start:end].tolist(),
                        logprobs_T=rollout.logprobs_T[start:end].tolist(),
                        routed_experts=rows[
                            first - late : end - 1 - late - (missing if first else 0)
                        ],
                        first_row=first,
                        finish_reason="stop",
                    )
                )
            same = transcript.tokens == rollout.tokens_T[: turns[3]].tolist()
            results[name] = f"{same} {np.array_equal(transcript.rows(), rows[: turns[3] - 1])}"
        except RouteError as error:
            results[name] = str(error)
    return results
