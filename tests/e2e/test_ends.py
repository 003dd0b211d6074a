"""Epochs and the best checkpoint of a run, as a user meets them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from r3 import assets
from tests.faults.attempts import launch
from tests.runs import program, rows_of, run, timeless_rows, words
from tests.warm import interpreter

pytestmark = [pytest.mark.e2e, pytest.mark.large]

METRIC = "eval/heldout/accuracy"
SMALL = (
    *words(
        "--rollout.prompts_per_step 8 --rollout.group_size 4 --eval.max_prompts 32 "
        "--parallel.ep 1 --log.tensorboard false"
    ),
    *("--data.path", str(assets.WORD_PROBLEMS_TRAIN)),
)
BEST = ("--eval.every", "1", "--checkpoint.keep_best", METRIC, "--checkpoint.keep", "1")
TRAINED = (
    *(*SMALL, *BEST, "--checkpoint.export_every", "2", "--checkpoint.export", "false"),
    *("--train.epochs_per_step", "2", "--train.updates_per_step", "2", "--algo.loss", "ppo_clip"),
)


def run_alone(folder: Path, *flags: str) -> str:
    """A run of one rank to its end."""
    return run(folder, *flags, ranks=1)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    run_alone(folder, *TRAINED, "--train.steps", "4")
    return folder


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def test_a_resumed_run_of_several_epochs_is_the_same_bit_for_bit(
    straight: Path, tmp_path: Path
) -> None:
    """The first attempt loses run.json, and cannot write samples of evaluations."""
    folder = tmp_path / "resumed"
    ranks = ("--standalone", "--nproc_per_node", "1")
    flags = (*TRAINED, "--train.steps", "3")
    attempt = launch(folder, *flags, ranks=ranks, base=(), is_warm=True)
    attempt.wait_for_rows(1)
    (folder / "run.json").unlink()
    (folder / "eval").rename(tmp_path / "eval")
    (folder / "eval").write_text("a file")
    attempt.end_with(0)
    assert "samples of heldout after step 3 not written: " in attempt.text
    assert "checkpoint of step 3 not written" not in attempt.text
    (folder / "eval").unlink()
    (folder / "run.json").unlink()
    output = run_alone(folder, *TRAINED, "--train.steps", "4")
    assert "run.json is missing" in output and "is damaged" not in output
    assert "after step 3" in output
    assert timeless_rows(folder) == timeless_rows(straight)
    assert weights(folder / "hf" / "step_000004") == weights(straight / "hf" / "step_000004")
    # Both kept the best checkpoint, although the runs saved after other steps.
    assert best_of(folder) == best_of(straight)


def test_each_epoch_is_reported_and_replayed(straight: Path) -> None:
    for row in rows_of(straight)[1:]:
        assert row["routing/rows_replayed"] == 2 * row["routing/rows_captured"] > 0
        assert 0 <= row["policy/kl_old_epoch_1"] < row["policy/kl_old_epoch_2"]
        assert {f"routing/agreement_update_{number}" for number in (1, 2, 3, 4)} <= row.keys()
    facts = json.loads((straight / "checkpoints" / "latest" / "r3.json").read_text())
    assert facts["update_number"] == 4 * 2 * 2


def best_of(folder: Path) -> int:
    """The step of the best evaluation after a step, as rows of metrics have it."""
    values = {row["step"]: row[METRIC] for row in rows_of(folder) if row["step"]}
    return max(sorted(values), key=values.__getitem__)


def test_the_best_checkpoint_is_exported_by_its_name(straight: Path, tmp_path: Path) -> None:
    best = best_of(straight)
    rows = rows_of(straight)
    assert rows[best][METRIC] > rows[0][METRIC], "the model learned something in four steps"
    assert (straight / "checkpoints" / "best").resolve().name == f"step_{best:06d}"
    export = (interpreter(), "-m", "r3.export", straight, "--step", "best", "--to")
    exported = program(*export, tmp_path / "x")
    assert exported.returncode == 0 and f"after step {best}" in exported.stdout, exported.stderr
    assert "note: the best evaluation" not in exported.stdout
    # The starting model, which has no checkpoint, may be better than all that were saved.
    copy = tmp_path / "copy"
    shutil.copytree(straight, copy, symlinks=True)
    lines = [json.dumps(row | ({} if row["step"] else {METRIC: 2.0})) for row in rows]
    (copy / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    exported = program(*export[:3], copy, *export[4:], tmp_path / "y")
    assert exported.returncode == 0, exported.stderr
    assert "best evaluation was after step 0, which has no checkpoint" in exported.stdout
    # One that is gone: the run was made with checkpoint.keep_best.
    (copy / "checkpoints" / f"step_{best:06d}").rename(copy / "checkpoints" / "step_000099")
    exported = program(*export[:3], copy, *export[4:], tmp_path / "z")
    assert exported.returncode == 2 and "keep_best" not in exported.stderr
    assert "--step = 'best': is not kept; the run has checkpoints of steps" in exported.stderr
    (tmp_path / "file").touch()
    exported = program(*export, tmp_path / "file" / "x")
    assert exported.returncode == 2 and "Traceback" not in exported.stderr
    assert "/file/x': was not written: " in exported.stderr
