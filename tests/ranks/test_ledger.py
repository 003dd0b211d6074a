"""Only a stage's layers are sent, each captured row is replayed once, and losses show."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.families import random_checkpoint
from tests.policies import LENGTHS
from tests.ranks import ledger_cases as cases
from tests.sweeps import layout_of, sweep
from tests.world import run_world

pytestmark = pytest.mark.ranks

TOPK = 4
ROWS = sum(LENGTHS) - len(LENGTHS)
LAYOUTS = {"single": 1, "pp2": 2, "ep2": 2, "cp2-tp2": 4}  # and their ranks
KEPT = ("pp2", "ep2")


@pytest.fixture(scope="module", params=sweep(LAYOUTS, KEPT))
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[SimpleNamespace]:
    """The account of every rank. The second of four layers is dense: stages have one and two."""
    model = random_checkpoint(
        tmp_path_factory.mktemp("model"), mlp_only_layers=[1], num_hidden_layers=4
    )
    size, given = LAYOUTS[request.param], {"parallel": layout_of(request.param)}
    accounts = run_world(cases.account, size, model=str(model), **given)
    if request.param == "pp2":
        assert [rank.layers for rank in accounts] == [[0], [2, 3]]
    return accounts


def test_only_the_layers_of_a_stage_travel_at_one_byte_an_expert(
    ranks: list[SimpleNamespace],
) -> None:
    for rank in ranks:
        assert rank.packed_layers == [len(rank.layers)]
        assert rank.itemsize == 1
    # (T-1) * L_stage * K * b, once to every rank of the data-parallel rank that trains on the
    # rollout
    copies = len(ranks) // (1 + max(rank.data_rank for rank in ranks))
    layers = sum(len(rank.layers) for rank in ranks) / (len(ranks) / copies)
    assert ranks[0].sound["routing/bytes"] == ROWS * layers * TOPK * 1


def test_every_captured_row_is_replayed_exactly_once(ranks: list[SimpleNamespace]) -> None:
    data_ranks = {rank.data_rank: rank.packed_tokens for rank in ranks}
    filler = sum(data_ranks.values()) - sum(LENGTHS)
    for rank in ranks:
        row = {name.removeprefix("routing/"): value for name, value in rank.sound.items()}
        assert (row["coverage"], row["rows_expected"], row["rows_captured"]) == (1.0, ROWS, ROWS)
        assert row["rows_replayed"] == ROWS
        assert row["rows_live"] == row["rows_last_token"] == len(LENGTHS)
        assert row["rows_missing"] == row["rows_missing_rollout"] == 0
        assert row["rows_filler"] == filler

        row = {name.removeprefix("routing/"): value for name, value in rank.gaps.items()}
        lost = LENGTHS[4] - 1
        assert (row["rows_missing"], row["rows_missing_rollout"]) == (2, lost)
        assert row["rows_captured"] == row["rows_replayed"] == ROWS - 2 - lost
        assert row["rows_live"] == len(LENGTHS) + 2 + lost
        assert row["coverage"] == pytest.approx(1 - (2 + lost) / ROWS, rel=1e-12)
        assert row["rows_filler"] == filler


def test_a_rollout_of_an_allowed_older_version_is_marked(ranks: list[SimpleNamespace]) -> None:
    assert set().union(*(rank.marked for rank in ranks)) == {ranks[0].older}


def test_what_is_missing_foreign_or_damaged_stops_every_rank_by_name(
    ranks: list[SimpleNamespace],
) -> None:
    for rank in ranks:
        said = rank.messages
        layers = "in MoE layers 0, 2, 3"
        for name in ("missing", "coverage"):
            first = (
                f"random:0/1: no routes for position 3 {layers} (2 of 11 rows missing; not "
                "captured)"
            )
            whole = (
                f"random:2/0: no routes for position 0 {layers} (22 of 22 rows missing; the engine "
                "returned none"
            )
            assert first in said[name] or whole in said[name], said[name]
        assert "Set replay.on_missing=live" in said["missing"]
        assert (
            f"of the step's {ROWS} rows of routes were captured, replay.min_coverage is 99"
            in said["coverage"]
        )
        assert (
            "random:3/1: its routes and log-probabilities are of policy version 6"
            in said["other version"]
        )
        assert "this step trains on (7,)" in said["other version"]
        assert "experts 0 .. 259, the model has 0 .. 15" in said["beyond the experts"]
        for name in ("swapped", "shifted", "layers"):
            if name == "layers" and len(rank.layers) == 1:
                # One layer cannot be swapped: the other stage has an error, which all ranks raise.
                continue
            assert "its packed tokens and routes are not those that were sent" in said[name], (
                f"{name}: {said[name]}"
            )
        assert said["lost"].startswith("LedgerError: routers of the policy counted ")
        assert f"rows replayed, generation {ROWS} rows captured: rows were lost" in said["lost"]
