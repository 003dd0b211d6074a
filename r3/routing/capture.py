"""Check captured routes as they leave the engine: only complete and legal ones are trained on.

vLLM returns `[T-1, layers, K]` with a row for every token that it processed; the last sampled token
has none. Rows of dense layers are zeros, which look like expert 0, so those layers are dropped by
number first.
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
    """Check captured routes and return those of the MoE layers, [T-1, L, K], in the smallest type.

    Checks that routes are present, with T-1 rows, the right layers (all decoder layers or exactly
    the MoE layers) and K distinct experts in range, and that no MoE layer has the same experts in
    all rows (a capture that never ran leaves zeros everywhere).

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
    ordered = sorted_experts(routes)
    repeated = ordered[..., 1:] == ordered[..., :-1]
    if repeated.any():
        row, layer, _ = np.argwhere(repeated)[0]
        raise RouteError(
            f"{who}: position {row}, layer {moe_layers[layer]}: "
            f"experts {routes[row, layer].tolist()} repeat; such a row was never routed"
        )
    # With K = 1 no id can repeat, so a capture that does not work shows only as equal rows. A few
    # rows may be equal by chance; if every token goes to all experts, all rows are equal.
    chooses = topk < num_experts and routes.shape[0] >= 64
    # In a working layer the first and the last row nearly always differ. Comparing all rows takes
    # as long as the sort.
    chooses = chooses and bool((ordered[0] == ordered[-1]).all(-1).any())
    if chooses and (constant := (ordered == ordered[:1]).all(axis=(0, 2))).any():
        dead = int(np.argmax(constant))
        raise RouteError(
            f"{who}: layer {moe_layers[dead]} sent all {routes.shape[0]} tokens to experts "
            f"{ordered[0, dead].tolist()}; the capture of this layer does not work, "
            "or the router collapsed"
        )
    return all_missing() if too_few else routes.astype(route_dtype(num_experts))
