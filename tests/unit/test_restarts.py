"""Restarts by a launcher: they are counted, and end when they bring no progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from r3.run.folder import RunDir
from r3.run.open import ResumeError, open_run
from tests.tiny import tiny_config

pytestmark = pytest.mark.unit


def attempt(folder: Path, *, reaches: int, saves: int = 0) -> None:
    """Start a run, report steps up to `reaches`, save the state after step `saves`."""
    start = open_run(RunDir(folder), tiny_config(train={"steps": 9}), writes=True)
    assert start.lock is not None
    for step in range(start.step + 1, reaches + 1):
        RunDir(folder).append_metrics({"step": step})
    if saves:
        (folder / "checkpoints" / f"step_{saves:06d}").mkdir(parents=True, exist_ok=True)
    start.lock.release()


@pytest.fixture
def by_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def test_a_step_that_fails_twice_ends_the_run_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(tmp_path, reaches=2, saves=2)  # a person starts the run; step 3 fails
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    attempt(tmp_path, reaches=2)  # step 3 fails again
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "first_failure").write_text("RewardError on rank 0: broken\n  more\n")
    with pytest.raises(
        ResumeError, match=r"step 3 failed twice(.|\n)*RewardError on rank 0: broken\n"
    ):
        attempt(tmp_path, reaches=2)
    with pytest.raises(ResumeError, match="step 3 failed 3 times"):
        attempt(tmp_path, reaches=2)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    attempt(tmp_path, reaches=3, saves=3)  # a person may try again, with full patience
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    attempt(tmp_path, reaches=3)


@pytest.mark.usefixtures("by_launcher")
def test_steps_that_are_never_saved_are_no_progress(tmp_path: Path) -> None:
    for reached in (5, 3):  # both attempts begin with step 1
        attempt(tmp_path, reaches=reached)
    with pytest.raises(ResumeError, match="automatic restarts in a row ended before a checkpoint"):
        for reached in (4, 2):
            attempt(tmp_path, reaches=reached)


@pytest.mark.usefixtures("by_launcher")
def test_restarts_with_progress_never_end(tmp_path: Path) -> None:
    for step in range(1, 8):
        attempt(tmp_path, reaches=step, saves=step)
    assert json.loads((tmp_path / "run.json").read_text())["failures"] == 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "metrics.jsonl:2: not a JSON object"),
        ("[1]", "metrics.jsonl:2: not a JSON object"),
        ("[" * 100_000, "metrics.jsonl:2: not a JSON object"),
        ('{"reward/mean": 1}', "a row has no step"),
        ('{"step": "two"}', "a row has no step"),
    ],
)
def test_a_bad_middle_row_is_one_message(line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ResumeError, match=text):
        open_run(RunDir(tmp_path), tiny_config(), writes=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
