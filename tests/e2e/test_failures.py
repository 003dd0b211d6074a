"""A run that fails ends with one block from one rank, and the launcher adds nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from r3 import assets
from tests.runs import program, rows_of
from tests.tiny import FEW_ROWS
from tests.warm import interpreter

pytestmark = pytest.mark.e2e


def test_a_wrong_reward_prints_one_block_and_keeps_what_was_written(tmp_path: Path) -> None:
    """It fails in the second step."""
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "def mine(response, prompt):\n"
        f"    return 1 / (not Path({str(tmp_path / 'run/metrics.jsonl')!r}).exists())\n"
    )
    flags = (
        "tiny-smoke",
        *("--rollout.prompts_per_step", "4", "--eval.path", "", "--log.dir", str(tmp_path / "run")),
        *("--data.path", FEW_ROWS),
        *("--reward.function", f"{tmp_path}/mine.py:mine", "--reward.retries", "0"),
    )
    done = program("launch/local.sh", *flags, env={"PYTHON": interpreter(), "NPROC": "2"})
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    command = f"NPROC=2 launch/local.sh --from {tmp_path / 'run'}"
    assert lines[-1] == f"  start again with: {command}", "no checkpoint yet"
    assert done.stderr.count("ZeroDivisionError") == 1
    assert f'File "{tmp_path}/mine.py", line 3, in mine' in done.stderr
    assert "reward mine failed (error)" in done.stderr
    assert "word_problems_train.jsonl[:512]:" in done.stderr, "it names the sample"
    assert len(lines) <= 16, "the block must fit on a screen"
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]
    assert sorted(path.name for path in (tmp_path / "run" / "errors").glob("rank_*"))


def check(*flags: str) -> subprocess.CompletedProcess[str]:
    return program(interpreter(), "train.py", "tiny-smoke", "--check", *flags)


def test_check_calls_the_reward_on_the_reference_answer() -> None:
    done = check()
    assert done.returncode == 0, done.stderr
    first, second, heldout = done.stdout.strip().splitlines()[-3:]
    assert re.fullmatch(
        r"ok: \d+ prompts, \d+ held out in heldout; longest prompt \d+ tokens", first
    )
    rewarded = r"reward of the reference answer of \S+: gsm8k 1 \(\d+\.\d s\)"
    assert re.fullmatch(f" *{rewarded}", second)
    assert re.fullmatch(f" *heldout: {rewarded}", heldout)


def test_check_plans_for_the_ranks_that_are_asked_for() -> None:
    layout = ("--parallel.ep", "1", "--parallel.tp", "2")  # no rank alone can have it
    done = check(*layout, "--world-size", "2")
    assert done.returncode == 0, done.stderr


def test_check_finds_a_reward_that_fails(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(response, prompt):\n    return 1 / 0\n")
    done = check("--reward.function", f"{tmp_path}/mine.py:mine", "--reward.retries", "0")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr and "mine.py" in done.stderr


def test_check_resets_the_environment() -> None:
    done = check("--env.name", "calculator", "--model.path", str(assets.TINY_MOE_TOOLS))
    assert done.returncode == 0, done.stderr
    assert "environment: reset on" in done.stdout and "returned 1 message(s)" in done.stdout
