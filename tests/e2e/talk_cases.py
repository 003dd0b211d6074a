"""Conversations of every kind, each compared with one forward pass of transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from r3.engine import Sampling
from r3.runtime.device import Device
from r3.types import Rollout
from tests.e2e.schedule_cases import requests, sample
from tests.talkers import CHATTY, Talker, Yardstick, values
from tests.tiny import rewards_of, tiny_config

# Settings of the environment; a path is a class in `CHATTY`.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chatty": {"path": "Chatty"},
    "tool in workers": {"path": "Tool", "workers": 1},
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
        is_compared: compare each conversation with transformers.

    Returns:
        Rounds by kind.
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
    return SimpleNamespace(kinds=talks, stopped=stopped(talker, "<|im_end|>"))


def stopped(talker: Talker, stop: str) -> list[list[str]]:
    """Sample until a stop string; return last token and finish reason of each response."""
    sampling = Sampling(temperature=0.0, stop=(stop,))
    prompts = [prompt.tokens_T for prompt in talker.task.prompts.prompts[:4]]
    found = sample(talker.engine, requests(prompts, count=120, sampling=sampling))
    decode = talker.task.tokenizer.decode
    return [[decode(each.tokens_T[-1:]), each.finish_reason] for each in found]
