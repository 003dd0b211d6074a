"""What a run came to: the best evaluation and its checkpoint, and when the run is finished.

What others' users report of such settings is tried here: a resumed run counts from nothing, and
takes a worse model for the best; the newest checkpoint is deleted in place of the oldest; a figure
that is not a number is the best for ever; the metric is compared in the wrong direction; an equal
value counts as better, so that the run never ends.
"""

import errno
import json
import math
import os
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from r3.cli.parse import Invocation
from r3.config import to_yaml
from r3.launch import from_python
from r3.run import Goal, RunDir, best_step, is_checkpoint_due, write_text
from r3.tools.beside.result import says_finished
from tests.errors import Capsys, Patch
from tests.run_folder import publish
from tests.runs import program
from tests.world import ROOT

METRIC = "eval/heldout/accuracy"


def rows(*values: float | None) -> list[dict[str, float]]:
    """An evaluation every second step, from step 0; None is one without the metric."""
    named = [{} if value is None else {METRIC: value} for value in values]
    return [{"step": 2 * i, **each} for i, each in enumerate(named)]


@pytest.mark.parametrize(
    ("values", "sign", "best", "ends"),
    [
        ((0.3, 0.4, 0.5), 1, 4, False),
        ((0.3, 0.4, 0.4, 0.4), 1, 2, True),  # equal is not better
        ((0.3, 0.2, 0.1), 1, 0, True),  # the starting model
        ((0.3, 0.2, 0.1), -1, 4, False),  # lower is better
        ((0.3, math.nan, 0.2), 1, 0, False),  # what is no number does not count
        ((math.nan, 0.1, 0.2), 1, 4, False),
        ((0.3, None, 0.2), 1, 0, False),  # an evaluation without this metric
        ((0.5, 0.1, 0.6, 0.2), 1, 4, False),  # a new best begins the count again
        ((), 1, None, False),
    ],
)
def test_the_run_ends_when_evaluations_do_not_become_better(
    values: tuple[float | None, ...], sign: int, best: int | None, ends: bool
) -> None:
    goal = Goal(metric=METRIC, sign=sign, patience=2)
    found = goal.values(rows(*values))
    assert best_step(found) == best
    assert bool(goal.end(found)) == ends
    assert not Goal(metric=METRIC, sign=sign).end(found), "without patience no run ends"


def test_the_end_says_what_was_best_and_for_how_long() -> None:
    goal = Goal(metric=METRIC, sign=-1, patience=2)
    assert goal.end(goal.values(rows(0.5, 0.25, 0.3, 0.3))) == (
        "stopped after step 6: eval/heldout/accuracy was best after step 2 (0.25) and not better "
        "in 2 evaluations since (train.patience 2)"
    )
    settings = {"checkpoint.keep_best": METRIC, "train.patience": 2, "train.steps": 6}
    found = Goal.of(settings).values(rows(0.5, 0.6, 0.3, 0.3))
    assert max(found) == 6 and not Goal.of(settings).end(found), "its last step, not an early end"
    assert Goal.of(settings | {"train.steps": "7"}).end(found)


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    values = {0: 0.9, 2: 0.6, 4: 0.5, 8: 0.7}  # step 6 was saved, and not evaluated
    kept = {}
    for step in (2, 4, 6, 8, 10):
        known = {each: value for each, value in values.items() if each <= step}
        kept[step] = publish(tmp_path, step, keep=1, values=known)
    assert kept == {2: ["2"], 4: ["2", "4"], 6: ["2", "6"], 8: ["8"], 10: ["8", "10"]}
    assert (tmp_path / "best").resolve().name == "step_000008"
    assert (tmp_path / "latest").resolve().name == "step_000010"


def test_links_that_were_copied_as_folders_become_links(tmp_path: Path) -> None:
    """As `cp -rL`, rsync with -L and archives for object stores copy them."""
    for step in (1, 2):
        publish(tmp_path, step, keep=0, values={1: 0.5})
    copy, link = tmp_path / "copy", tmp_path / "copy" / "best"
    shutil.copytree(tmp_path, copy)
    assert link.is_dir() and not link.is_symlink()
    publish(copy, 3, keep=0, values={1: 0.5})
    assert link.readlink() == Path("step_000001")
    assert (copy / "latest").readlink() == Path("step_000003")
    link.unlink()
    shutil.copytree(copy / "step_000001", link)
    publish(copy, 4, keep=0, values={})
    assert not link.exists() and not list(copy.glob(".*"))


def test_a_disk_without_links_costs_the_links_alone(
    tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    number = errno.EOPNOTSUPP
    monkeypatch.setattr(os, "symlink", refuse)
    for step in (1, 2):
        kept = publish(tmp_path, step, keep=1, values={2: 0.5})
    assert kept == ["2"] and sorted(path.name for path in tmp_path.iterdir()) == ["step_000002"]
    said = capsys.readouterr().err
    assert f"{tmp_path / 'latest'} is step_000002; this disk has no links" in said
    assert f"{tmp_path / 'best'} is step_000002" in said
    number = errno.ENOSPC  # a full disk is another matter
    with pytest.raises(OSError, match="No space"):
        publish(tmp_path, 3, keep=1, values={})


def test_a_copy_without_the_best_checkpoint_leaves_the_original_alone(tmp_path: Path) -> None:
    """A copy of a run is resumed, without the checkpoint that was the best."""
    values = {2: 0.9, 4: 0.5, 6: 0.4}
    for step in (2, 4, 6):
        publish(tmp_path / "run", step, keep=0, values=values)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    shutil.rmtree(tmp_path / "copy" / "step_000002")
    assert publish(tmp_path / "copy", 8, keep=1, values=values) == ["4", "8"]
    assert (tmp_path / "copy" / "best").readlink() == Path("step_000004")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_without_the_setting_no_link_is_left_behind(tmp_path: Path) -> None:
    publish(tmp_path, 1, keep=1, values={1: 0.5})
    assert (tmp_path / "best").exists()
    assert publish(tmp_path, 2, keep=1, values={}) == ["2"]
    assert not (tmp_path / "best").is_symlink()


def test_a_run_ended_early_is_finished_unless_more_is_asked(tmp_path: Path, capsys: Capsys) -> None:
    run_dir = RunDir(tmp_path)
    for row in rows(0.3, 0.5, 0.4, 0.4):
        run_dir.append_metrics(row)

    settings = {"checkpoint.keep_best": METRIC, "train.patience": 2}
    settings |= {"train.steps": 100, "checkpoint.export": False}

    def is_finished(**more: object) -> bool:
        named = {name.replace("__", "."): value for name, value in more.items()}
        return says_finished(invocation(run_dir, **settings | named))

    write_text(run_dir.config, to_yaml(invocation(run_dir, **settings).config))
    run_dir.checkpoint(6).mkdir(parents=True)
    assert is_finished()
    said = " ".join(capsys.readouterr().out.split())
    assert "best after step 2" in said and "not better in 2 evaluations since" in said
    assert "Set a larger --train.patience to continue" in said
    assert not is_finished(train__patience=3) and not is_finished(train__patience=0)
    assert not is_finished(checkpoint__export=True), "the export is still to be made"
    run_dir.hf(6).mkdir(parents=True)
    assert is_finished(checkpoint__export=True)
    # From an older checkpoint the later rows are made again.
    run_dir.checkpoint(6).rename(run_dir.checkpoint(4))
    assert not is_finished()


def invocation(run: RunDir, **more: object) -> Invocation:
    settings = {"parallel.ep": 1, "train.steps": 3, "log.dir": str(run.path), **more}
    return from_python("tiny", settings, world_size=1)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    write_text(run.config, to_yaml(invocation(run).config))
    write_text(run.metrics, '{"step": 0}\n{"step": 3}\n')
    run.checkpoint(3).mkdir(parents=True)
    run.hf(3).mkdir(parents=True)
    return run


def test_a_finished_run_says_so(run: RunDir, capsys: Capsys) -> None:
    assert says_finished(invocation(run))
    said = f"{run.path} is finished: 3 steps. Set a larger --train.steps"
    assert capsys.readouterr().out.startswith(said)
    shutil.rmtree(run.hf(3))
    assert not says_finished(invocation(run)), "its export is still to be written"
    assert says_finished(invocation(run, **{"checkpoint.export": False}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({0: 0.2, 2: 0.4, 3: 0.6}, "3 steps, heldout accuracy 0.200 -> 0.600; best after step 3"),
        ({2: 0.4, 3: 0.6}, "3 steps; best after step 3"),  # not measured before training
        ({0: 0.2, 2: 0.4}, "3 steps; best after step 2"),  # nor after it
        ({0: 0.9, 3: 0.6}, "best after step 0, which has no checkpoint"),  # the starting model
    ],
)
def test_figures_are_those_before_and_after_training(
    values: dict[int, float], expected: str, run: RunDir, capsys: Capsys
) -> None:
    rows = [{"step": step, METRIC: value} for step, value in values.items()]
    write_text(run.metrics, "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "tor')
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the start says it, once
        assert says_finished(invocation(run, **{"checkpoint.keep_best": METRIC}))
    assert expected in " ".join(capsys.readouterr().out.split())


def test_what_is_left_to_do_is_not_finished(run: RunDir, capsys: Capsys) -> None:
    for more in ({"train.steps": 4}, {"train.steps": 2}, {"eval.only": True}):
        assert not says_finished(invocation(run, **more)), more
    assert not says_finished(replace(invocation(run), check=True)), "a check is made all the same"
    for damaged in ("nonsense\n{}\n", f'{{"{METRIC}": 0.5}}\n'):
        write_text(run.metrics, damaged)
        best = {"checkpoint.keep_best": METRIC}
        assert not says_finished(invocation(run, **best)), "the start names the damaged rows"
    assert capsys.readouterr().out == ""


def test_a_finished_run_that_is_launched_again_starts_no_ranks(run: RunDir) -> None:
    environment = {"PYTHON": sys.executable, "NPROC": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = program(ROOT / "launch/local.sh", "--from", run.path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{run.path} is finished: 3 steps.")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("every", "steps"), [(-1, []), (0, [7]), (1, [*range(1, 8)]), (3, [3, 6, 7])]
)
def test_checkpoints_are_due_as_the_setting_says(every: int, steps: list[int]) -> None:
    assert [step for step in range(1, 8) if is_checkpoint_due(step, every, last=7)] == steps
