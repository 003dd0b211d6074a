"""Every token goes to the experts of its route, in every layout; replay refuses shifted routes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.families import family_checkpoint
from tests.policies import LENGTHS
from tests.ranks import route_cases as cases
from tests.sweeps import layout_of, sweep
from tests.world import run_world, shared_worlds

pytestmark = pytest.mark.ranks


_ROWS: dict[str, dict[str, Any]] = {
    "single": {"ranks": 1},
    "single-padded": {"ranks": 1, "padded": True},
    "single-unpacked": {"ranks": 1, "micro_batch_tokens": 50},
    "dp2": {"ranks": 2},
    "ep2": {"ranks": 2},
    "tp2": {"ranks": 2},
    "pp2-vpp2": {"ranks": 2},
    "cp2": {"ranks": 2},
    "pp2-uneven-tp2-ep2-etp1": {
        "ranks": 4,
        "parallel": {"pp": 2, "pp_layers": [3, 1], "tp": 2, "ep": 2, "etp": 1},
    },
}
ROUTED = {name: {"parallel": layout_of(name), **row} for name, row in _ROWS.items()}


KEPT = ("single-padded", "single-unpacked", "pp2-vpp2", "cp2", "pp2-uneven-tp2-ep2-etp1")


@pytest.fixture(scope="module")
def routes_used(other_model: str) -> Callable[[str], list[SimpleNamespace]]:
    return shared_worlds(cases.routes_used, ROUTED, kept=KEPT, model=other_model)


@pytest.mark.parametrize("layout", sweep(ROUTED, KEPT))
def test_every_token_follows_its_route_under_every_layout(
    layout: str, routes_used: Callable[[str], list[SimpleNamespace]]
) -> None:
    """The digest of all (rollout, position, layer, experts) over all ranks: none is lost, doubled
    or at another's place.
    """
    results = routes_used(layout)
    assert [(result.wrong, result.differing) for result in results] == [(0, 0)] * len(results)
    # every token but a rollout's last, in each of three MoE layers, once
    assert sum(result.slots for result in results) == 3 * (sum(LENGTHS) - len(LENGTHS))
    expected = {result.expected for result in results}
    assert expected == {sum(result.digest for result in results) % 2**64}
    assert expected.isdisjoint(result.shifted for result in results)
    if layout == "pp2-vpp2":
        assert results[0].micro_batches % 2, "the schedule must need a filler"
    elif layout == "single-unpacked":
        assert results[0].micro_batches > 4
    elif layout == "single-padded":
        assert results[0].micro_batches < len(LENGTHS), (
            "some sequences must be padded to another's length"
        )


def test_a_stage_of_dense_layers_neither_gets_nor_records_a_route(tmp_path: Path) -> None:
    model = str(family_checkpoint(tmp_path, "moonlight"))  # the first of three layers is dense
    parallel = {"pp": 2, "pp_layers": [1, 2]}
    first, second = run_world(cases.routes_used, 2, model=model, parallel=parallel)
    assert first.slots == 0 and second.slots > 50
    assert second.wrong == second.differing == 0


def test_replay_refuses_what_would_lose_or_shift_a_route(other_model: str) -> None:
    (found,) = run_world(cases.replay_guards, 1, model=other_model)
    assert found.listed == 0, "no router is in the class-level list of Megatron"
    messages = found.messages
    assert "never used" in messages["never_used"]
    assert "previous micro-batch were never used" in messages["loaded_twice"]
    assert "without routes loaded" in messages["not_loaded"]
    assert "routes (" in messages["too_few_rows"] and "tokens" in messages["too_few_rows"]
    assert "update 0: the gradient norm is nan" in messages["nan"]
