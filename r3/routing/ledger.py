"""The route ledger: rows of routes expected, captured and used in a step. Both ends must agree.

    expected = captured + missing                counted at generation, over the rollouts
    packed   = replayed + live + filler          counted by the policy's routers, in the updates

Every captured row must be replayed exactly once in each epoch, and only rows that are missing or
are a sequence's last token may route live. `reconcile` compares both ends in the step's metrics,
so a row that is lost in transit, in packing or in slicing is detected.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from r3.algo.packing import MISSING
from r3.metrics.reduce import Mean, Sum
from r3.runtime.mesh import Axis
from r3.types import Rollout, RouteError


class LedgerError(RuntimeError):
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
    found = captured_rows(rollouts)
    first_missing = next(filter(None, (_missing(each, moe_layers) for each in rollouts)), "")
    everybody = world.all_gather_object((fault, first_missing, found["routing/coverage"]))
    if faults := [text for text, *_ in everybody if text]:
        raise RouteError(faults[0])
    if not (first := next((text for _, text, _ in everybody if text), "")):
        return found if moe_layers else {}
    if on_missing == "error":
        raise RouteError(f"{first}. Set replay.on_missing=live to route such tokens live")
    expected = sum(part.count for *_, part in everybody)
    coverage = 1 - (expected - sum(part.total for *_, part in everybody)) / expected
    if coverage < min_coverage:
        raise RouteError(
            f"only {coverage:.4%} of the step's {int(expected)} rows of routes were captured, "
            f"replay.min_coverage is {min_coverage:.4%}; the first missing: {first}"
        )
    return found if moe_layers else {}


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
