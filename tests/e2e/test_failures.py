"""A run that fails ends with one block from one rank, and the launcher adds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world import ROOT

pytestmark = pytest.mark.e2e


def test_a_wrong_reward_prints_one_block(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(response, prompt):\n    return 1 / 0\n")
    flags = (
        "tiny-smoke",
        *("--train.steps", "1", "--eval.path", "", "--log.dir", str(tmp_path / "run")),
        *("--reward.function", f"{tmp_path}/mine.py:mine", "--reward.retries", "0"),
    )
    done = subprocess.run(
        ["launch/local.sh", *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "NPROC": "2"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert lines[-1] == f"  continue with: train.py --from {tmp_path / 'run'}"
    assert done.stderr.count("ZeroDivisionError") == 1
    assert f'File "{tmp_path}/mine.py", line 2, in mine' in done.stderr
    assert len(lines) <= 16, "the block must fit on a screen"
    assert sorted(path.name for path in (tmp_path / "run" / "errors").glob("rank_*"))
