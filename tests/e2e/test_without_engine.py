"""What needs no engine runs where vllm is not installed, as on a GPU machine without it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu_steps import CPU_RUN
from tests.runs import program
from tests.tiny import FEW_ROWS
from tests.warm import interpreter
from tests.world import QUIET_THREADS

pytestmark = pytest.mark.e2e

TINY = ("tiny", "--parallel.ep", "1", "--train.steps", "1", "--rollout.prompts_per_step", "4")
TINY += ("--data.path", FEW_ROWS)
ONE_STEP = ("train.py", *TINY, "--eval.path", "", "--checkpoint.every", "-1")
EXPERIMENTS = """
from benchmarks import gpu
for name in ("facts", "attention", "grouped", "kernels", "layer", "stash", "ipc"):
    assert gpu.EXPERIMENTS[name]().get("passed", True), name
print("passed")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = (interpreter("tests.without_engine:preload"), "-m", "tests.without_engine", *words)
    return program(*command, env=QUIET_THREADS, together=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*ONE_STEP, "--train.objective", "sft"), "step 1/1"),
        (("-m", "r3.rescore", str(CPU_RUN), "--step", "1", "--parallel.ep", "1"), "replay "),
        pytest.param(("-c", EXPERIMENTS), "passed", marks=pytest.mark.large),
    ],
    ids=["sft", "rescore", "experiments"],
)
def test_programs_without_an_engine_import_none(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    folder = ("--log.dir", str(tmp_path / "run")) if words[0] == "train.py" else ()
    done = run(*words, *folder)
    assert done.returncode == 0 and said in done.stdout, done.stdout[-3000:]


def test_the_process_has_no_engine(tmp_path: Path) -> None:
    done = run(*ONE_STEP, "--log.dir", str(tmp_path / "run"))
    assert done.returncode != 0 and "No module named 'vllm" in done.stdout, done.stdout[-3000:]
