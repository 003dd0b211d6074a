"""The account of a step's routes: what should have come, what came, what the routers used. Both ends must agree.

    expected = captured + missing                       counted at generation, over the rollouts
    packed   = replayed + live + filler                 counted by the routers of the policy, in the updates

Every captured row must be replayed once, and only a row that is missing or a sequence's last token may route live: `reconcile`
compares the two ends in the step's row. A row lost between them, in transit, in packing, in slicing, cannot pass.
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
    """Routers used other rows than generation captured: routes were lost or made up on the way."""


def missing_rows(rollout: Rollout) -> np.ndarray:
    """Which rows of a rollout's routes were not captured (-1), bool [T-1]."""
    return np.asarray((rollout.routed_experts < 0).any(axis=(1, 2)))


def captured_rows(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Generation's side of the account: partials over the rollouts that this rank generated."""
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
) -> None:
    """Let the step's rollouts pass to training, or raise the same `RouteError` on every rank. All ranks must call.

    Args:
        rollouts: of this rank.
        moe_layers: global numbers of the layers of the routes, for the message.
        num_experts: of the model; ids beyond are refused here, before a smaller type could fold them back.
        versions: versions of the policy whose rollouts may be trained on now; None = any.
        on_missing: "error" refuses a single missing row, "live" a share of rows captured below `min_coverage`.
    """
    complaint = next(
        filter(None, (_fault(rollout, policy_versions, num_experts) for rollout in rollouts)), ""
    )
    first_missing, missing, expected = "", 0, 0
    for rollout in rollouts:
        rows = missing_rows(rollout)
        expected += len(rows)
        if count := int(rows.sum()):
            missing += count
            cause = (
                "the engine returned none of its routes, or too few"
                if count == len(rows)
                else "not captured"
            )
            first_missing = first_missing or (
                f"{_name(rollout)}: no routes for position {int(rows.argmax())} in MoE layers {_listed(moe_layers)} "
                f"({count} of {len(rows)} rows missing; {cause})"
            )
    everybody = world.all_gather_object((complaint, first_missing, missing, expected))
    if faults := [said for said, *_ in everybody if said]:
        raise RouteError(faults[0])
    missing, expected = (sum(part[i] for part in everybody) for i in (2, 3))
    if not missing:
        return
    first = next(said for _, said, *_ in everybody if said)
    if on_missing == "error":
        raise RouteError(f"{first}. replay.on_missing=live would route such tokens live")
    coverage = 1 - missing / expected
    if coverage < min_coverage:
        raise RouteError(
            f"only {coverage:.4%} of the step's {expected} rows of routes were captured, replay.min_coverage is "
            f"{min_coverage:.4%}; the first missing: {first}"
        )


def raise_together(complaint: str, world: Axis) -> None:
    """Raise `RouteError` on every rank when one of them complains. All ranks must call."""
    complaints = [said for said in world.all_gather_object(complaint) if said]
    if complaints:
        raise RouteError(complaints[0])


def reconcile(row: Mapping[str, float]) -> None:
    """Compare both ends of the account in a step's row, which all ranks have; no effect on rows without captured routes.

    Raises:
        LedgerError: rows replayed are not the rows captured, or rows routed live not those with a cause.
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
        if used != known:
            raise LedgerError(
                f"routers of the policy counted {used:g} rows {name}, generation {known:g} rows {what}: "
                f"{'rows were lost' if used < known else 'rows came from nowhere'} between engine and router"
            )


def _fault(rollout: Rollout, policy_versions: Container[int] | None, num_experts: int) -> str:
    """What keeps a rollout from being trained on now, missing rows aside; empty when nothing does."""
    if policy_versions is not None and (
        refused := [v for v in rollout.policy_versions if v not in policy_versions]
    ):
        return (
            f"{_name(rollout)}: its routes and log-probabilities are of policy version {refused[0]}, "
            f"this step trains on {policy_versions}"
        )
    routes = rollout.routed_experts
    if routes.size and not MISSING <= routes.min() <= routes.max() < num_experts:
        return f"{_name(rollout)}: experts {routes.min()} .. {routes.max()}, the model has 0 .. {num_experts - 1}"
    return ""


def _name(rollout: Rollout) -> str:
    return f"rollout {rollout.prompt_id}/{rollout.sample_index}"


def _listed(layers: Sequence[int], limit: int = 6) -> str:
    shown = ", ".join(map(str, layers[:limit]))
    return f"{shown}, ... {layers[-1]}" if len(layers) > limit else shown
