"""Checkpoints that are damaged, cannot be written, or should not be: a run goes on or says why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.errors import NOTHING
from tests.ranks import checkpoint_cases as cases
from tests.world import run_rows, run_world

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Results of two ranks, which must resume from the same folders."""
    one, two = run_world(cases.damaged, 2, out=str(tmp_path_factory.mktemp("damaged")))
    assert one.resumed.keys() == two.resumed.keys()
    for name in cases.DAMAGE:
        assert one.resumed[name].folder == two.resumed[name].folder, name
    return one


def test_whole_checkpoint_is_used_as_found(damaged: SimpleNamespace) -> None:
    assert damaged.resumed["whole"] == SimpleNamespace(folder="step_000002", notes=["as found"])


@pytest.mark.parametrize("name", cases.DAMAGE)
def test_damage_is_found_and_the_older_checkpoint_used(damaged: SimpleNamespace, name: str) -> None:
    found = damaged.resumed[name]
    said, resuming = found.notes[0], found.notes[-1]
    assert found.folder == "step_000001"
    assert "step_000002 is damaged: " in said and "falling back" in said
    assert "resuming from" in resuming and resuming.endswith("step_000001 after step 1")
    culprit = {
        "bit of a moment": "__0_0.distcp has other content",
        "shard of another step": "__1_0.distcp has other content",
        "shard truncated": "__0_0.distcp has 1000 bytes, not",
        "shard missing": "__1_0.distcp is missing",
        "shards swapped": "__0_0.distcp has",
        "optimizer step edited": "r3.json has",
        "metadata of another size": ".metadata has 11 bytes, not",
        "metadata with a program": ".metadata has",
        "metadata forged": ".metadata: not a checkpoint's metadata",
        "metadata forged otherwise": ".metadata: not a checkpoint's metadata (BINBYTES exceeds",
        "manifest missing": "manifest.json is missing",
        "manifest of another step": "it is of step 1, not 2",
        "whole folder of another step": "it is of step 1, not 2",
    }
    assert culprit.get(name, "") in said and "weights_only" not in "".join(found.notes)
    # No rank looks into a pickle whose hash is wrong, also if another rank has found that.
    assert "asks for" not in said


def test_older_checkpoint_loads(damaged: SimpleNamespace) -> None:
    assert damaged.updates == 1


def test_damage_stops_the_run_if_asked(damaged: SimpleNamespace) -> None:
    found = damaged.resumed["stop"]
    (said,) = found.notes
    assert found.folder == ""
    assert "common.pt has other content" in said and "checkpoint.on_damage is stop" in said


def test_run_stops_if_no_checkpoint_is_whole(damaged: SimpleNamespace) -> None:
    found = damaged.resumed["both damaged"]
    assert found.folder == "" and "no checkpoint of the run is whole" in found.notes[0]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Results of two ranks, which must be the same."""
    one, two = run_world(cases.refused, 2, out=str(tmp_path_factory.mktemp("refused")))
    assert one == two
    return one


def test_program_in_metadata_is_not_executed(refused: SimpleNamespace) -> None:
    found = refused.code_in_metadata
    assert not found.executed
    for text in (found.load, found.resume):
        assert "asks for " in text and ".open, which no checkpoint of R3 needs" in text
    assert [text.partition(":")[0] for text in found.others] == [
        "UnpicklingError",
        "CheckpointException",
    ]
    assert "Weights only load failed" in found.others[0]


def test_pickled_environments_need_the_signature_of_the_run(refused: SimpleNamespace) -> None:
    resumed = refused.suspended_conversations
    assert resumed["own"] == SimpleNamespace(folder="step_000001", notes=["as found"])
    assert resumed["other"].folder == ""
    assert "not signed with the key in run.json" in resumed["other"].notes[0]


def test_disk_that_cannot_be_written_is_said_and_the_save_repeated(
    refused: SimpleNamespace,
) -> None:
    said = refused.unwritable.saved
    assert "rank 0: " in said["shard"] and "/checkpoints" in said["shard"]
    assert refused.unwritable.remaining == []  # nothing half-written
    assert "Not a directory" in said["not a folder"]
    assert said["good"] == "step_000001"


def test_broken_weights_and_moments_are_never_saved(refused: SimpleNamespace) -> None:
    broken = refused.unsound
    for name in ("nan weight", "large weight", "infinite moment", "negative variance"):
        message = broken[name].message
        assert "rank 1: " in message and "Nothing was saved" in message, message
        assert broken[name].remaining == ["latest", "step_000001"]
    assert broken["nothing"].message == NOTHING


def test_state_is_written_as_it_was_while_the_policy_trains_on(tmp_path: Path) -> None:
    one, two = run_world(cases.beside, 2, out=str(tmp_path))
    assert one == two and one.startswith("SaveError: rank 1: "), "every rank learns of one's disk"


@pytest.mark.large
def test_state_gathered_in_pieces_is_what_megatron_gathers() -> None:
    given: list[tuple[dict[str, int], int]] = [
        *(({}, 1 << 24), ({}, 1000)),
        *(({"ep": 2}, 777), ({"tp": 2}, 5000)),
    ]
    rows = [{"parallel": parallel, "piece": piece} for parallel, piece in given]
    assert all(sum(ranks) >= 3 for ranks in run_rows(cases.gathered, 2, rows))
