"""Checkpoints that are damaged, cannot be written, or should not be: found, said, survived."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import checkpoint_cases as cases
from tests.world import run_world

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks say about each kind of damage; both must say the same."""
    one, two = run_world(cases.damaged, 2, out=str(tmp_path_factory.mktemp("damaged")))
    assert one.keys() == two.keys()
    for name in cases.DAMAGE:
        assert one[name][0] == two[name][0], name
    return dict(one)


def test_whole_checkpoint_is_used_as_found(damaged: dict[str, Any]) -> None:
    assert damaged["whole"] == ["step_000002", "as found"]


@pytest.mark.parametrize("name", cases.DAMAGE)
def test_damage_is_found_and_the_older_checkpoint_used(damaged: dict[str, Any], name: str) -> None:
    folder, said, resuming = damaged[name][0], damaged[name][1], damaged[name][-1]
    assert folder == "step_000001"
    assert "step_000002 is damaged: " in said and "falling back" in said
    assert "resuming from" in resuming and resuming.endswith("step_000001 after step 1")
    culprit = {
        "bit of a moment": "__0_0.distcp has other content",
        "shard of another step": "__1_0.distcp has other content",
        "shard truncated": "__0_0.distcp has 1000 bytes, not",
        "shard missing": "__1_0.distcp is missing",
        "shards swapped": "__0_0.distcp has",
        "optimizer step edited": "r3.json has",
        "manifest missing": "manifest.json is missing",
        "manifest of another step": "it is of step 1, not 2",
        "whole folder of another step": "it is of step 1, not 2",
    }
    assert culprit.get(name, "") in said


def test_older_checkpoint_loads(damaged: dict[str, Any]) -> None:
    assert damaged["loaded"] == 1


def test_damage_stops_the_run_if_asked(damaged: dict[str, Any]) -> None:
    folder, said = damaged["stop"]
    assert folder == ""
    assert "common.pt has other content" in said and "checkpoint.on_damage is stop" in said


def test_run_stops_if_no_checkpoint_is_whole(damaged: dict[str, Any]) -> None:
    folder, said = damaged["both damaged"]
    assert folder == "" and "no checkpoint of the run is whole" in said


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks say about checkpoints that must not be read or written."""
    one, two = run_world(cases.refused, 2, out=str(tmp_path_factory.mktemp("refused")))
    assert one == two
    return dict(one)


def test_program_in_metadata_is_not_executed(refused: dict[str, Any]) -> None:
    said = refused["code_in_metadata"]
    assert not said.pop("executed")
    for text in said.values():
        assert "asks for " in text and ".open, which no checkpoint of R3 needs" in text


def test_pickled_environments_need_the_signature_of_the_run(refused: dict[str, Any]) -> None:
    said = refused["suspended_conversations"]
    assert said["own"] == ["step_000001", "as found"]
    assert said["other"][0] == "" and "not signed with the key in run.json" in said["other"][1]


def test_disk_that_cannot_be_written_is_said_and_the_save_repeated(refused: dict[str, Any]) -> None:
    said = refused["unwritable"]
    assert "rank 0: " in said["shard"] and "/checkpoints" in said["shard"]
    assert said["left"] == []  # nothing half-written
    assert "Not a directory" in said["not a folder"]
    assert said["good"] == "step_000001"


def test_broken_weights_and_moments_are_never_saved(refused: dict[str, Any]) -> None:
    said = refused["unsound"]
    for name in ("nan weight", "large weight", "infinite moment", "negative variance"):
        assert "rank 1: " in said[name] and "Nothing was saved" in said[name], said[name]
        assert said[f"{name}, left"] == "['latest', 'step_000001']"
    assert said["nothing"] == "saved"
