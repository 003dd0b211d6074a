"""Serialise `Rollout`: JSON fields and flat arrays, and bytes for messages and checkpoints.

Arrays of several rollouts are concatenated: rollout i has tokens `cu_tokens[i] : cu_tokens[i + 1]`
and routes `cu_rows[i] : cu_rows[i + 1]`, because it has one row less than tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

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


def join_arrays(
    rollouts: Sequence[Rollout], routes: Sequence[np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """The arrays of at least one rollout, concatenated.

    Args:
        routes: replaces the rollouts' own routes, one array [T-1, L, K] per rollout.
    """
    routes = [rollout.routed_experts for rollout in rollouts] if routes is None else routes
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
        # Older files lack some facts, which have defaults in `Rollout`.
        known: dict[str, Any] = {name: fact[name] for name in _FACTS if name in fact}
        known["segments"] = tuple(map(tuple, fact.get("segments", ())))
        for name in ("messages", "turn_rewards"):
            known[name] = tuple(fact.get(name, ()))
        known |= {field: arrays[name][tokens] for name, field in _PER_TOKEN.items()}
        rollouts.append(Rollout(**known, routed_experts=arrays["routed_experts"][rows]))
    return rollouts


def encode(items: Sequence[Scored], layers: Sequence[int] | None = None) -> bytes:
    """Scored rollouts as one safetensors blob; empty for no rollouts.

    Args:
        layers: positions in the layer axis of the routes that are included; None includes all.
    """
    if not items:
        return b""
    routes = [item.rollout.routed_experts for item in items]
    if layers is not None:
        # Without any layer the routes look as they do for a dense model.
        routes = [rows[:, list(layers)] if layers else rows[:, :0, :0] for rows in routes]
    facts = [
        {
            "index": item.index,
            "advantage": float(item.advantage).hex(),
            "reward": float(item.reward).hex(),
            "shaped_reward": float(item.shaped_reward).hex(),
            "parts": {name: float(part).hex() for name, part in item.parts.items()},
            "trains": item.trains,
            "checksums": checksums(item.rollout.tokens_T, rows),
            **rollout_facts(item.rollout),
        }
        for item, rows in zip(items, routes, strict=True)
    ]
    arrays = join_arrays([item.rollout for item in items], routes)
    return save(arrays, metadata={"rollouts": json.dumps(facts)})


def decode(message: bytes) -> list[Scored]:
    """Undo `encode`."""
    if not message:
        return []
    size = int.from_bytes(message[:8], "little")
    facts = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["rollouts"])
    return [
        Scored(
            index=fact["index"],
            advantage=float.fromhex(fact["advantage"]),
            reward=float.fromhex(fact["reward"]),
            # Older checkpoints of partial rollouts have none, and nothing reads it from them.
            shaped_reward=float.fromhex(fact.get("shaped_reward", "0x0p+0")),
            parts={name: float.fromhex(part) for name, part in fact["parts"].items()},
            trains=fact["trains"],
            checksums=tuple(fact["checksums"]),
            rollout=rollout,
        )
        for fact, rollout in zip(facts, split_rollouts(facts, load(message)), strict=True)
    ]


def checksums(tokens_T: np.ndarray, routes: np.ndarray) -> tuple[int, ...]:
    """CRC-32 of the tokens and the rows [T-1, K] of each layer of the routes [T-1, L, K]."""
    tokens = zlib.crc32(tokens_T.astype(np.int64).tobytes())
    return tuple(
        zlib.crc32(np.ascontiguousarray(routes[:, layer]).tobytes(), tokens)
        for layer in range(routes.shape[1])
    )


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)
