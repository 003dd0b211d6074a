"""Data per token of a dump: text, log-probability, routing disagreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from r3.errors import Fault
from r3.run.folder import RunDir, read_jsonl_lines
from r3.tools.dumps import arrays_fault


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Arrays of a rollout dump, concatenated over its rows; `r3.types` explains the shapes.

    `policy_logprobs` and `live_routes` come from `python -m r3.rescore --save`; None without it.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    routed_experts: np.ndarray
    cu_tokens: np.ndarray
    cu_rows: np.ndarray
    policy_logprobs: np.ndarray | None = None
    live_routes: np.ndarray | None = None


def read_arrays(run_dir: RunDir, step: int) -> Arrays:
    """The arrays of a rollout dump, and its scores if there are any.

    Raises:
        Fault: a file is missing, damaged, or of another step.
    """
    arrays = _load(run_dir.rollouts(step).with_suffix(".safetensors"))
    scores = run_dir.scores(step)
    saved = _load(scores) if scores.exists() else {}
    names = ("tokens", "loss_mask", "logprobs", "routed_experts", "cu_tokens", "cu_rows")
    if missing := [name for name in names if name not in arrays]:
        raise Fault(f"the arrays of step {step} lack {', '.join(missing)}")
    rows = dict(enumerate(row for _, row in read_jsonl_lines(run_dir.rollouts(step))))
    whole = {place: row for place, row in rows.items() if not isinstance(row, str)}
    if fault := arrays_fault(whole, arrays):
        raise Fault(f"the arrays of step {step} are left out: {fault}")
    for name, beside in (("logprobs_replay", "tokens"), ("routes_live", "routed_experts")):
        if name in saved and len(saved[name]) != len(arrays[beside]):
            raise Fault(f"{scores.name} is of another dump than that of step {step}")
    return Arrays(
        **{name: arrays[name] for name in names},
        policy_logprobs=saved.get("logprobs_replay"),
        live_routes=saved.get("routes_live"),
    )


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Fault(f"{path.name} cannot be read: {error}") from None


def token_facts(arrays: Arrays, row: int) -> dict[str, Any]:
    """What the page draws of one rollout's tokens.

    Returns:
        `ids` [T]; `sampled`, the [start, end) spans that the policy sampled; and for each token of
        these spans `logprobs`. After `rescore --save` also `differences`, the policy's minus the
        engine's log-probability, and `disagreement`, the share of MoE layers whose live top-k is
        another set than the replayed one, in the row that predicted the token.
    """
    start, end = (int(border) for border in arrays.cu_tokens[row : row + 2])
    tokens, mask = slice(start, end), arrays.loss_mask[start:end] > 0
    facts: dict[str, Any] = {
        "ids": arrays.tokens[tokens].tolist(),
        "sampled": spans(mask),
        "logprobs": _rounded(arrays.logprobs[tokens][mask]),
    }
    if arrays.policy_logprobs is not None:
        facts["differences"] = _rounded(
            (arrays.policy_logprobs[tokens] - arrays.logprobs[tokens])[mask], digits=6
        )
    if arrays.live_routes is not None and arrays.routed_experts.shape[1]:
        rows = slice(*(int(border) for border in arrays.cu_rows[row : row + 2]))
        shares = disagreement(arrays.routed_experts[rows], arrays.live_routes[rows])
        # Row t predicted token t + 1; a prompt's first token was never sampled.
        facts["disagreement"] = _rounded(shares[np.flatnonzero(mask) - 1])
    return facts


def disagreement(captured: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Share of layers in which two choices [rows, L, K] are different sets; NaN if not captured."""
    differs = (np.sort(captured, axis=2) != np.sort(live, axis=2)).any(axis=2)
    missing = (captured < 0).any(axis=(1, 2))
    return np.where(missing, np.nan, differs.mean(axis=1))


def expert_load(routed_experts: np.ndarray, num_experts: int) -> list[list[int]]:
    """Tokens per expert, `[L][E]`, over the captured rows of routes `[rows, L, K]`."""
    layers = range(routed_experts.shape[1])
    flat = [routed_experts[:, layer].reshape(-1) for layer in layers]
    return [np.bincount(ids[ids >= 0], minlength=num_experts).tolist() for ids in flat]


def spans(mask: np.ndarray) -> list[list[int]]:
    """[start, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return edges.reshape(-1, 2).tolist()


def vocabulary(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    """Text of each token id, decoded alone."""
    return {token: tokenizer.decode([token]) for token in sorted(set(ids))}


def _rounded(values: np.ndarray, digits: int = 4) -> list[float | None]:
    return [None if not np.isfinite(value) else round(float(value), digits) for value in values]
