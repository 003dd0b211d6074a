"""Rollouts as dumps hold them: fields of JSON, and flat arrays.

Arrays of several rollouts are concatenated: rollout i has tokens `cu_tokens[i] : cu_tokens[i + 1]`
and routes `cu_rows[i] : cu_rows[i + 1]`, because it has one row less than tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from r3.data.conversation import replied
from r3.types import Prompt, Rollout

# Arrays with one value per token: name in files -> field. Routes have one row less.
_PER_TOKEN = {"tokens": "tokens_T", "loss_mask": "loss_mask_T", "logprobs": "logprobs_T"}
_FACTS = tuple(
    each.name
    for each in fields(Rollout)
    if each.name not in (*_PER_TOKEN.values(), "routed_experts")
)


def rollout_facts(rollout: Rollout) -> dict[str, Any]:
    """Everything of a rollout but its arrays, as JSON can hold it."""
    return {name: getattr(rollout, name) for name in _FACTS}


def join_arrays(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """The arrays of at least one rollout, concatenated."""
    routes = [rollout.routed_experts for rollout in rollouts]
    arrays = {
        **{
            name: np.concatenate([getattr(rollout, field) for rollout in rollouts])
            for name, field in _PER_TOKEN.items()
        },
        "routed_experts": np.concatenate(routes),
        "cu_tokens": _offsets(len(rollout.tokens_T) for rollout in rollouts),
        "cu_rows": _offsets(len(rows) for rows in routes),
    }
    # safetensors writes the raw buffer and ignores strides: another memory order is scrambled.
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def split_rollouts(
    facts: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]
) -> list[Rollout]:
    """Undo `rollout_facts` and `join_arrays`; further keys of `facts` are ignored."""
    rollouts = []
    for index, fact in enumerate(facts):
        tokens = slice(*arrays["cu_tokens"][index : index + 2])
        rows = slice(*arrays["cu_rows"][index : index + 2])
        known: dict[str, Any] = {name: fact[name] for name in _FACTS}
        known["segments"] = tuple(map(tuple, fact["segments"]))
        for name in ("messages", "turn_rewards"):
            known[name] = tuple(fact[name])
        known |= {field: arrays[name][tokens] for name, field in _PER_TOKEN.items()}
        rollouts.append(Rollout(**known, routed_experts=arrays["routed_experts"][rows]))
    return rollouts


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def readable(rollout: Rollout, prompt: Prompt | None) -> dict[str, Any]:
    """Question, reference answer, whole conversation and rewards per turn, as JSON can hold them.

    Args:
        prompt: the prompt of the rollout; None if it is not known, and then only the messages are.
    """
    opening = prompt.messages if prompt else ()
    messages = rollout.messages or replied(opening, rollout.response)
    facts: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "turn_rewards": list(rollout.turn_rewards),
    }
    if prompt is not None:
        asked = [message["content"] for message in opening if message["role"] == "user"]
        facts |= {"question": asked[-1] if asked else "", "reference": " or ".join(prompt.accepted)}
    return facts
