"""Experiment E5: mismatch of the same tokens with replayed and live routes, and of a dense twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import fmean
from types import SimpleNamespace

import pytest

from tests.e2e import mismatch_cases as cases
from tests.sweeps import sweep
from tests.world import run_world

pytestmark = pytest.mark.e2e

BATCHES = 20
POLICY_DTYPES = pytest.mark.parametrize(
    "policy_dtype", sweep(("bfloat16", "float32"), kept=("bfloat16",))
)


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[SimpleNamespace]]:
    """The 20 batches of a model with a bfloat16 engine, each model and precision measured once."""

    @cache
    def measured(policy_dtype: str, dense: bool = False) -> list[SimpleNamespace]:
        model = cases.near_tie_checkpoint(tmp_path_factory.mktemp("model"), dense=dense)
        return run_world(
            cases.paired,
            1,
            model=str(model),
            policy_dtype=policy_dtype,
            engine_dtype="bfloat16",
            batches=BATCHES,
        )[0]

    return measured


def mean(rows: list[SimpleNamespace], arm: str, figure: str) -> float:
    return fmean(getattr(row, arm)[figure] for row in rows)


@POLICY_DTYPES
def test_replay_removes_nearly_all_that_live_routing_adds_to_the_mismatch(
    policy_dtype: str, rows_of: Callable[..., list[SimpleNamespace]]
) -> None:
    rows = rows_of(policy_dtype)
    assert len(rows) == BATCHES
    # The fixture is what the experiment asks for: routers near ties, and a mismatch as large as
    # large models have.
    assert 1e-3 <= mean(rows, "live", "k3") <= 1e-2
    assert 0.01 <= fmean(row.slots_differ for row in rows) <= 0.1
    assert all(row.tokens_differ >= row.slots_differ > 0 for row in rows)

    lowered = [row.replay["k3"] <= 0.6 * row.live["k3"] for row in rows]
    assert sum(lowered) >= 19, f"k3 lowered to 0.6 and less in {sum(lowered)} of {BATCHES} batches"
    # f2 is a token or two in a batch of 384, so it is judged over all of them; the same for the
    # tail
    assert mean(rows, "live", "f2") > 0
    assert mean(rows, "replay", "f2") <= 0.1 * mean(rows, "live", "f2")
    for figure in ("abs_p99", "abs_max"):
        assert mean(rows, "replay", figure) < mean(rows, "live", figure), figure


@POLICY_DTYPES
def test_what_replay_leaves_is_what_a_dense_model_has(
    policy_dtype: str, rows_of: Callable[..., list[SimpleNamespace]]
) -> None:
    floor = mean(rows_of(policy_dtype, dense=True), "live", "k3")
    assert mean(rows_of(policy_dtype), "replay", "k3") <= 1.5 * floor
    assert mean(rows_of(policy_dtype), "live", "k3") > 10 * floor, (
        "the control: live routing is far above it"
    )
