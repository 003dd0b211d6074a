"""Serialise `Rollout`: JSON fields and flat arrays for dumps, and messages between ranks.

Arrays of several rollouts are concatenated: rollout i has tokens `cu_tokens[i] : cu_tokens[i + 1]`
and routes `cu_rows[i] : cu_rows[i + 1]`, because it has one row less than tokens.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from r3.rollout.scored import Scored
from r3.types import Rollout

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


def encode(items: Sequence[Scored], layers: Sequence[int] | None = None) -> bytes:
    """Scored rollouts as a message to another rank; empty for no rollouts.

    Args:
        layers: positions in the layer axis of the routes that are included; None includes all.
    """
    sent = []
    for item in items:
        routes = item.rollout.routed_experts
        if layers is not None:
            # Without any layer the routes look as they do for a dense model.
            routes = routes[:, list(layers)] if layers else routes[:, :0, :0]
        rollout = replace(item.rollout, routed_experts=np.ascontiguousarray(routes))
        sums = checksums(rollout.tokens_T, rollout.routed_experts)
        sent.append(replace(item, rollout=rollout, checksums=sums))
    return pickle.dumps(sent) if sent else b""


def decode(message: bytes) -> list[Scored]:
    """Undo `encode`."""
    return list(pickle.loads(message)) if message else []


def checksums(tokens_T: np.ndarray, routes: np.ndarray) -> tuple[int, ...]:
    """CRC-32 of the tokens and the rows [T-1, K] of each layer of the routes [T-1, L, K]."""
    tokens = zlib.crc32(tokens_T.astype(np.int64).tobytes())
    return tuple(
        zlib.crc32(np.ascontiguousarray(routes[:, layer]).tobytes(), tokens)
        for layer in range(routes.shape[1])
    )


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)
