"""Routes checked at birth: what leaves the engine is complete and legal, or nothing is trained on it.

vLLM returns `[T-1, layers, K]` with a row for every token it processed; the last sampled token has none. Dense layers hold
zeros, which look like expert 0, so they are dropped by layer number before anybody can mistake them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from r3.algo.packing import MISSING, route_dtype, sorted_experts
from r3.types import RouteError


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
    """The MoE layers' routes `[T-1, L, K]` in the smallest signed type, after every check; raises `RouteError`.

    Of one turn of a conversation: `routes` are the turn's new rows, `num_tokens` one more than there should be.

    Args:
        routes: as the engine returned them, `[T-1, num_layers or len(moe_layers), K]`, unsigned.
        num_tokens: T, prompt and response together.
        num_layers: decoder layers of the model; moe_layers: which of them route, 0-based.
        who: names the rollout in the error.
        on_missing: "live" makes an incomplete capture (nothing came, or too few rows) all rows of -1, which route live and
            are counted. All of them: nothing says which rows are missing, and a guess would shift the others.

    Checked: presence, rows = T-1, layer count (all decoder layers or exactly the MoE layers), K, ids in range, ids of a row
    distinct, no MoE layer whose rows are all the same (a capture that never ran leaves zeros everywhere). What came and is
    illegal stops in either case: it is a fault of the capture and not a gap.
    """
    expected = num_tokens - 1

    def all_missing() -> np.ndarray:
        return np.full((expected, len(moe_layers), topk), MISSING, route_dtype(num_experts))

    if routes is None:
        if on_missing == "live":
            return all_missing()
        raise RouteError(
            f"{who}: the engine returned no routes for positions 0..{expected - 1} in all {len(moe_layers)} MoE layers. "
            "Is capture on (replay.mode) on every engine rank?"
        )
    too_few = routes.ndim == 3 and routes.shape[0] < expected
    if routes.ndim != 3 or routes.shape[0] > expected or (too_few and on_missing == "error"):
        raise RouteError(
            f"{who}: {num_tokens} tokens need {expected} rows of routes, got shape {routes.shape}"
        )
    if routes.shape[1] == num_layers:
        routes = routes[:, list(moe_layers)]
    elif routes.shape[1] != len(moe_layers):
        raise RouteError(
            f"{who}: routes of {routes.shape[1]} layers; the model has {num_layers} layers, {len(moe_layers)} of them MoE"
        )
    if routes.shape[2] != topk:
        raise RouteError(f"{who}: {routes.shape[2]} experts a token, the model uses {topk}")
    if routes.size == 0:
        return all_missing()
    if int(routes.max()) >= num_experts or int(routes.min()) < 0:
        row, layer, _ = np.argwhere((routes >= num_experts) | (routes < 0))[0]
        raise RouteError(
            f"{who}: position {row}, layer {moe_layers[layer]}: experts {routes[row, layer].tolist()} are not all in "
            f"0..{num_experts - 1}"
        )
    ordered = sorted_experts(routes)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if repeated.any():
        row, layer = np.argwhere(repeated)[0]
        raise RouteError(
            f"{who}: position {row}, layer {moe_layers[layer]}: experts {routes[row, layer].tolist()} repeat; "
            "such a row was never routed"
        )
    # K = 1 cannot repeat an id, so a dead capture shows only as one constant row. Short answers may be constant by chance,
    # and where every token goes to all experts nothing else is possible.
    chooses = topk < num_experts and routes.shape[0] >= 64
    if chooses and (constant := (ordered == ordered[:1]).all(axis=(0, 2))).any():
        raise RouteError(
            f"{who}: layer {moe_layers[int(np.argmax(constant))]} sent all {routes.shape[0]} tokens to experts "
            f"{ordered[0, int(np.argmax(constant))].tolist()}; the capture of this layer is dead or the router collapsed"
        )
    return all_missing() if too_few else routes.astype(route_dtype(num_experts))
