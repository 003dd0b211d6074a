"""A run that is finished says so before anything heavy is imported, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from r3.cli.parse import Invocation, from_python
from r3.config import to_yaml
from r3.run.folder import RunDir, write_text
from r3.run.result import FINISHED, says_finished

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


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


def test_a_finished_run_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert says_finished(invocation(run))
    said = f"{run.path} is finished: 3 steps. Set a larger --train.steps"
    assert capsys.readouterr().out.startswith(said)
    shutil.rmtree(run.hf(3))
    assert not says_finished(invocation(run)), "its export is still to be written"
    assert says_finished(invocation(run, **{"checkpoint.export": False}))


METRIC = "eval/heldout/accuracy"


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
    values: dict[int, float],
    expected: str,
    run: RunDir,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"step": step, METRIC: value} for step, value in values.items()]
    write_text(run.metrics, "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "tor')
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the start says it, once
        assert says_finished(invocation(run, **{"checkpoint.keep_best": METRIC}))
    assert expected in " ".join(capsys.readouterr().out.split())


def test_what_is_left_to_do_is_not_finished(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ({"train.steps": 4}, {"train.steps": 2}, {"eval.only": True}):
        assert not says_finished(invocation(run, **more)), more
    assert not says_finished(replace(invocation(run), check=True)), "a check is made all the same"
    for damaged in ("nonsense\n{}\n", f'{{"{METRIC}": 0.5}}\n'):
        write_text(run.metrics, damaged)
        best = {"checkpoint.keep_best": METRIC}
        assert not says_finished(invocation(run, **best)), "the start names the damaged rows"
    assert capsys.readouterr().out == ""


def test_the_check_of_a_launch_ends_the_launch(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R3_RESUME", "launch/local.sh --from RUN_DIR")
    with pytest.raises(SystemExit) as end:
        says_finished(replace(invocation(run), check=True))
    assert end.value.code == FINISHED


def test_a_finished_run_that_is_launched_again_starts_no_ranks(run: RunDir) -> None:
    command = [ROOT / "launch" / "local.sh", "--from", str(run.path)]
    environment = os.environ | {"PYTHON": sys.executable, "NPROC": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{run.path} is finished: 3 steps.")
    assert done.stdout.count("\n") == 1


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, r3.run.result; print([n for n in sys.modules if n in ('torch', 'vllm')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
