"""Check captured routes as they leave the engine: only complete and legal ones are trained on.

vLLM returns `[T-1, layers, K]` with a row for every token that it processed; the last sampled token
has none. Rows of dense layers are zeros, which look like expert 0, so those layers are dropped by
number first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from r3.algo.packing import MISSING, route_dtype
from r3.runtime.mesh import Axis
from r3.types import Rollout, RouteError

_MANY_ROWS = 64  # fewer rows may be equal by chance


def check_routes(
    routes: np.ndarray | None,
    *,
    num_tokens: int,
    num_experts: int,
    topk: int,
    num_layers: int,
    moe_layers: Sequence[int],
    who: str,
    on_missing: Literal["error", "live"] = "error",
) -> np.ndarray:
    """Check captured routes and return those of the MoE layers, [T-1, L, K], in the smallest type.

    Checks that routes are present, with T-1 rows, the right layers (all decoder layers or exactly
    the MoE layers) and K distinct experts in range. A capture that never ran leaves zeros
    everywhere, which repeat an expert. With K = 1, a layer with expert 0 in all rows is refused.

    For one turn of a conversation, `routes` are the turn's new rows and `num_tokens` is one more
    than the number of rows there should be.

    Args:
        routes: as the engine returned them, unsigned, [T-1, num_layers or len(moe_layers), K].
        num_tokens: T, prompt and response together.
        num_experts: experts per layer.
        topk: K, experts per token.
        num_layers: decoder layers of the model.
        moe_layers: numbers of the MoE layers, from 0.
        who: name of the rollout in errors.
        on_missing: "live" turns an incomplete capture (no routes, or too few rows) into rows of -1,
            which route live and are counted. All rows, because it is not known which ones are
            missing, and a guess might shift the others.

    Raises:
        RouteError: a check fails. Illegal routes raise an error with either `on_missing`: they are
            a fault of the capture, not a gap.
    """
    expected = num_tokens - 1

    def all_missing() -> np.ndarray:
        return np.full((expected, len(moe_layers), topk), MISSING, route_dtype(num_experts))

    if routes is None:
        if on_missing == "live":
            return all_missing()
        raise RouteError(
            f"{who}: the engine returned no routes for positions 0..{expected - 1} in all "
            f"{len(moe_layers)} MoE layers. Is capture on (replay.mode) on every engine rank?"
        )
    too_few = routes.ndim == 3 and routes.shape[0] < expected
    if routes.ndim != 3 or routes.shape[0] > expected or (too_few and on_missing == "error"):
        raise RouteError(
            f"{who}: {num_tokens} tokens need {expected} rows of routes, got shape {routes.shape}"
        )
    if routes.shape[1] not in (num_layers, len(moe_layers)):
        raise RouteError(
            f"{who}: routes of {routes.shape[1]} layers; the model has {num_layers} layers, "
            f"{len(moe_layers)} of them MoE"
        )
    if routes.shape[1] != len(moe_layers):
        routes = routes[:, list(moe_layers)]
    if routes.shape[2] != topk:
        raise RouteError(f"{who}: {routes.shape[2]} experts per token, the model has {topk}")
    if routes.size == 0:
        return all_missing()
    # vLLM returns unsigned ids, which need no search for negative ones.
    negative = routes.dtype.kind != "u" and int(routes.min()) < 0
    if negative or int(routes.max()) >= num_experts:
        row, layer, _ = np.argwhere((routes >= num_experts) | (routes < 0))[0]
        raise RouteError(
            f"{who}: position {row}, layer {moe_layers[layer]}: "
            f"experts {routes[row, layer].tolist()} are not all in 0..{num_experts - 1}"
        )
    ordered = np.sort(routes, -1)
    repeated = ordered[..., 1:] == ordered[..., :-1]
    if repeated.any():
        row, layer, _ = np.argwhere(repeated)[0]
        raise RouteError(
            f"{who}: position {row}, layer {moe_layers[layer]}: "
            f"experts {routes[row, layer].tolist()} repeat; such a row was never routed"
        )
    # With K > 1 a capture that never ran repeats expert 0, which is refused above. With K = 1 it
    # shows only as expert 0 in all rows; a few rows may have it by chance.
    if topk == 1 and num_experts > 1 and routes.shape[0] >= _MANY_ROWS:
        unused = (routes == 0).all(axis=(0, 2))
        if unused.any():
            dead = int(np.argmax(unused))
            raise RouteError(
                f"{who}: layer {moe_layers[dead]} sent all {routes.shape[0]} tokens to expert 0; "
                "the capture of this layer does not work, or the router collapsed. With one expert "
                "per token R3 cannot tell these apart: --replay.mode r2 trains without captured "
                "routes"
            )
    return all_missing() if too_few else routes.astype(route_dtype(num_experts))


def constant_layers(
    rollouts: Sequence[Rollout], world: Axis, *, num_experts: int
) -> list[tuple[int, list[int]]]:
    """Find layers that sent all captured tokens of all ranks' rollouts to the same experts.

    The router collapsed, or its capture returns the same rows again and again. One rollout alone
    shows nothing: a router may well send a short text to few experts. All ranks must call.

    Returns:
        Index among the MoE layers and experts, ascending; nothing if few tokens were captured or
        every token goes to all experts.
    """
    everybody = world.all_gather_object(_constant_experts(rollouts))
    if sum(rows for _, rows in everybody) < _MANY_ROWS:
        return []
    experts = [of_rank for of_rank, rows in everybody if rows]
    if experts[0].shape[-1] >= num_experts:
        return []
    same = np.logical_and.reduce([(each == experts[0]).all(-1) for each in experts])
    found = np.flatnonzero(same & (experts[0] != MISSING).all(-1))
    return [(int(layer), experts[0][layer].tolist()) for layer in found]


def _constant_experts(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, int]:
    """Experts that all captured tokens share per layer, sorted, [L, K], -1 where they differ; and
    the number of these tokens.
    """
    found, count = np.full((0, 0), MISSING), 0
    for rollout in rollouts:
        routes = rollout.routed_experts
        routes = routes[(routes != MISSING).all(axis=(1, 2))]
        if not routes.size:
            continue
        if not count:
            found = np.sort(routes[0], -1)
        count += len(routes)
        # In a working layer the first and the last row nearly always differ: few layers are left
        # for the comparison of all rows.
        for rows in (routes[[0, -1]], routes):
            open_layers = np.flatnonzero((found != MISSING).all(-1))
            differs = (np.sort(rows[:, open_layers], -1) != found[open_layers]).any(axis=(0, 2))
            found[open_layers[differs]] = MISSING
    return found, count
