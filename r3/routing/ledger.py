"""Captured routes: checks as they leave the engine, and the ledger of their rows.

Only complete and legal routes are trained on. vLLM returns `[T-1, layers, K]` with a row for every
token that it processed; the last sampled token has none. Rows of dense layers are zeros, which look
like expert 0, so those layers are dropped by number first.

The ledger has the rows of routes expected, captured and used in a step. Both ends must agree:

    expected = captured + missing                counted at generation, over the rollouts
    packed   = replayed + live + filler          counted by the policy's routers, in the updates

Every captured row must be replayed exactly once in each epoch, and only rows that are missing or
are a sequence's last token may route live. `reconcile` compares both ends in the step's metrics,
so a row that is lost in transit, in packing or in slicing is detected.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from r3.algo.packing import MISSING, route_dtype
from r3.errors import Explained
from r3.metrics.reduce import DEPTHS, DeadExperts, LoadEntropy, LoadMax, Mean, Partial, Sum
from r3.runtime.mesh import Axis
from r3.types import Rollout, RouteError

_MANY_ROWS = 64  # fewer rows may be equal by chance


class LedgerError(Explained):
    """The routers used other rows than were captured: routes were lost or invented on the way."""


def missing_rows(rollout: Rollout) -> np.ndarray:
    """Mark the rows of a rollout's routes that were not captured (-1), bool [T-1]."""
    return np.asarray((rollout.routed_experts < 0).any(axis=(1, 2)))


def captured_rows(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return generation's side of the ledger: partials over the rollouts this rank generated."""
    expected = captured = lost_rollout = lost_row = 0
    for rollout in rollouts:
        rows = len(rollout.routed_experts)
        missing = int(missing_rows(rollout).sum())
        expected += rows
        captured += rows - missing
        if missing == rows:
            lost_rollout += missing
        else:
            lost_row += missing
    return {
        "routing/coverage": Mean(total=float(captured), count=float(expected)),
        "routing/rows_expected": Sum(value=float(expected)),
        "routing/rows_captured": Sum(value=float(captured)),
        "routing/rows_last_token": Sum(value=float(len(rollouts))),
        "routing/rows_missing_rollout": Sum(value=float(lost_rollout)),
        "routing/rows_missing": Sum(value=float(lost_row)),
    }


def admit(
    rollouts: Sequence[Rollout],
    world: Axis,
    *,
    moe_layers: Sequence[int],
    num_experts: int,
    policy_versions: Container[int] | None,
    on_missing: Literal["error", "live"],
    min_coverage: float,
) -> dict[str, Any]:
    """Check that the step's rollouts may be trained on, and count their rows. All must call.

    Args:
        rollouts: the rollouts of this rank.
        world: all ranks.
        moe_layers: global numbers of the MoE layers, for the message.
        num_experts: experts per layer. Larger ids raise an error here, before a conversion to a
            smaller type could make them legal.
        policy_versions: policy versions whose rollouts may be trained on; None = any.
        on_missing: "error" allows no missing row. "live" allows them down to `min_coverage`.
        min_coverage: smallest share of captured rows in the step, with on_missing "live".

    Returns:
        `captured_rows` of this rank's rollouts; nothing if the model has no MoE layers.

    Raises:
        RouteError: the same on every rank: a rollout may not be trained on.
    """
    fault = next(
        filter(None, (_fault(rollout, policy_versions, num_experts) for rollout in rollouts)), ""
    )
    rows = captured_rows(rollouts)
    first_missing = next(filter(None, (_missing(rollout, moe_layers) for rollout in rollouts)), "")
    everybody = world.all_gather_object((fault, first_missing, rows["routing/coverage"]))
    if faults := [text for text, *_ in everybody if text]:
        raise RouteError(faults[0])
    if not (first := next((text for _, text, _ in everybody if text), "")):
        return rows if moe_layers else {}
    if on_missing == "error":
        raise RouteError(f"{first}. Set replay.on_missing=live to route such tokens live")
    expected = sum(part.count for *_, part in everybody)
    coverage = 1 - (expected - sum(part.total for *_, part in everybody)) / expected
    if coverage < min_coverage:
        raise RouteError(
            f"only {coverage:.4%} of the step's {int(expected)} rows of routes were captured, "
            f"replay.min_coverage is {min_coverage:.4%}; the first missing: {first}"
        )
    return rows if moe_layers else {}


def raise_together(fault: str, world: Axis) -> None:
    """Raise a `RouteError` on every rank if any rank has a fault. All ranks must call.

    Args:
        fault: message about a fault on this rank; empty = none.
        world: all ranks.
    """
    if faults := [text for text in world.all_gather_object(fault) if text]:
        raise RouteError(faults[0])


def reconcile(row: Mapping[str, float], *, epochs: int = 1) -> None:
    """Compare both ends of the ledger in a step's row of metrics, which is the same on all ranks.

    Does nothing in a step without captured routes.

    Args:
        row: metrics of the step.
        epochs: times that the step's rollouts were trained on; each replays every row once.

    Raises:
        LedgerError: the rows replayed are not those captured, or the rows routed live are not those
            that are missing or last.
    """
    if "routing/rows_captured" not in row:
        return
    causes = ("routing/rows_last_token", "routing/rows_missing_rollout", "routing/rows_missing")
    ends = {
        "replayed": (
            row.get("routing/rows_replayed", 0.0),
            row["routing/rows_captured"],
            "captured",
        ),
        "routed live": (
            row.get("routing/rows_live", 0.0),
            sum(row[cause] for cause in causes),
            "missing or last of a sequence",
        ),
    }
    for name, (used, known, what) in ends.items():
        if used != epochs * known:
            times = f" in {epochs} epochs" if epochs > 1 else ""
            raise LedgerError(
                f"routers of the policy counted {used:g} rows {name}{times}, generation {known:g} "
                f"rows {what}: rows were {'lost' if used < epochs * known else 'added'} "
                "between engine and router"
            )


def _fault(rollout: Rollout, policy_versions: Container[int] | None, num_experts: int) -> str:
    """Return why a rollout may not be trained on, except for missing rows; empty if it may."""
    if policy_versions is not None and (
        refused := [v for v in rollout.policy_versions if v not in policy_versions]
    ):
        return (
            f"rollout {rollout.name}: its routes and log-probabilities are of policy version "
            f"{refused[0]}, this step trains on {policy_versions}"
        )
    routes = rollout.routed_experts
    if routes.size and not MISSING <= routes.min() <= routes.max() < num_experts:
        return (
            f"rollout {rollout.name}: experts {routes.min()} .. {routes.max()}, "
            f"the model has 0 .. {num_experts - 1}"
        )
    return ""


def _missing(rollout: Rollout, moe_layers: Sequence[int]) -> str:
    """Say which of a rollout's rows were not captured; empty if all were."""
    rows = missing_rows(rollout)
    if not (count := int(rows.sum())):
        return ""
    cause = "the engine returned none of its routes, or too few"
    return (
        f"rollout {rollout.name}: no routes for position {int(rows.argmax())} in MoE layers "
        f"{_listed(moe_layers)} ({count} of {len(rows)} rows missing; "
        f"{cause if count == len(rows) else 'not captured'})"
    )


def _listed(layers: Sequence[int], limit: int = 6) -> str:
    shown = ", ".join(map(str, layers[:limit]))
    return f"{shown}, ... {layers[-1]}" if len(layers) > limit else shown


@dataclass(frozen=True, kw_only=True)
class ReplayLedger:
    """What the routers of this rank did in one schedule.

    Attributes:
        layers: global numbers of this rank's MoE layers: L below.
        rows: captured rows that were compared, per layer.
        counts: float64 [L, 5 + 2 D] on the device; None if nothing was replayed. Per layer, over
            captured rows: rows whose live top-k equals the replayed set; the sum of margins
            (weakest live score minus weakest replayed score, in the units the router chooses by);
            slots that the plausibility filter gave to another expert; sums of the entropy of the
            live router's distribution, and of the gap between the weakest live expert and the best
            other one; per range of `DEPTHS` its rows, then those that agree.
        loads: choices per expert over captured rows, int64 [L, E] on the device.
        consumed: (token, layer) slots that were replayed, routed live and filled, int64 [3] on the
            device. Recomputations are not counted again. None if nothing was replayed.
        topk: slots per row.
        filtered: whether there was a plausibility filter.
        recorded: routes per micro-batch, int16 [N, L, K] (mode "record").
    """

    layers: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    counts: torch.Tensor | None = None
    loads: torch.Tensor | None = None
    consumed: torch.Tensor | None = None
    topk: int = 0
    filtered: bool = False
    recorded: tuple[torch.Tensor, ...] = ()


def routing_metrics(ledger: ReplayLedger) -> dict[str, Partial]:
    """Return agreement of live and replayed routes, in all and per layer, in one transfer."""
    if ledger.counts is None:
        return {}
    table = ledger.counts.tolist()
    sums = [sum(column) for column in zip(*table, strict=True)]
    (agreed, margin, replaced, entropy, gap), by_depth = sums[:5], sums[5:]
    rows = sum(ledger.rows)
    metrics: dict[str, Partial] = {
        "routing/agreement": Mean(agreed, rows),
        "routing/margin": Mean(margin, rows - agreed),
        "routing/router_entropy": Mean(entropy, rows),
        "routing/router_gap": Mean(gap, rows),
    }
    for i, depth in enumerate(DEPTHS if by_depth else ()):
        metrics[f"routing/agreement_depth/{depth}"] = Mean(by_depth[i + len(DEPTHS)], by_depth[i])
    if ledger.filtered:
        metrics["routing/replaced_frac"] = Mean(replaced, rows * ledger.topk)
    for layer, compared, (same, *_) in zip(ledger.layers, ledger.rows, table, strict=True):
        metrics[f"routing/agreement_layer/{layer}"] = Mean(same, compared)
    return metrics


def load_metrics(ledger: ReplayLedger) -> dict[str, Partial]:
    """Return the load of the experts per layer, in one transfer."""
    if ledger.loads is None:
        return {}
    metrics: dict[str, Partial] = {}
    for layer, load_E in zip(ledger.layers, ledger.loads.cpu().numpy(), strict=True):
        # Each pair shares one array, which pickle sends once.
        metrics |= {
            f"routing/load_max_layer/{layer}": LoadMax(load_E),
            f"routing/load_entropy_layer/{layer}": LoadEntropy(load_E),
            f"routing/load_dead_layer/{layer}": DeadExperts(load_E),
        }
    return metrics


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
