"""Faults made on purpose in runs of `torchrun train.py`: what the user sees, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import kill, start
from tests.world import ROOT

pytestmark = pytest.mark.e2e


def wait_for_row(process: subprocess.Popen[str], folder: Path, rows: int = 1) -> None:
    """Wait until a run has written so many rows of metrics."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 180
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= rows):
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, kill(process)[-4000:]
        time.sleep(0.05)


def second_start(folder: Path) -> subprocess.CompletedProcess[str]:
    """Start a run of one process and wait for its end."""
    return subprocess.run(
        [sys.executable, "train.py", "tiny-smoke", "--log.dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_run_per_folder_and_none_without_its_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, "--eval.path", "", "--train.steps", "100")
    wait_for_row(process, tmp_path)
    ranks = psutil.Process(process.pid).children(recursive=True)
    for rank in ranks:
        rank.suspend()  # a living run that writes nothing, so that any change is the second start's
    before = contents(tmp_path)
    second = second_start(tmp_path)
    assert (second.returncode, second.stdout) == (2, "")
    assert "another run writes to this folder (process " in second.stderr
    assert "Traceback" not in second.stderr
    assert contents(tmp_path) == before
    for rank in ranks:
        rank.resume()

    os.kill(process.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive, f"{len(gone)} processes ended with their launcher, not {alive}"
    process.communicate()
