"""Own runs without flags: `from r3 import train`, a YAML file, a Python file, --from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.runs import QUIET_THREADS, program, rows_of, soon
from tests.warm import interpreter

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.large]

PRESETS = """
from dataclasses import replace
from r3.configs.tiny import tiny_smoke
from r3.config import with_values

def small():
    return with_values(tiny_smoke(), {
        "parallel.ep": 1, "train.steps": 1, "rollout.prompts_per_step": 4, "eval.path": (),
        "log.show_every": 1,
    })
"""

BRIEF = """
def brief(response, prompt):
    return 1 / (1 + len(response))
"""

PROGRAM = """
import asyncio

from brief import brief
from r3 import RunError, train
from r3.config import ConfigError

ALONE = {"log": {"dir": "alone"}, "reward.function": brief}  # sections and full names together


async def main():
    return train("my_presets.py:small", ALONE)

first = asyncio.run(main())  # as in a notebook, whose cells run in an event loop
assert [row["step"] for row in first.metrics] == [1], first
assert list(first.export.glob("*.safetensors"))
again = train("my_presets.py:small", ALONE)  # finished: returns at once
assert again == first
longer = train("my_presets.py:small", {**ALONE, "train.steps": 2, "log.show_every": 0})
assert [row["step"] for row in longer.metrics] == [1, 2]

broken = {"reward.function": "broken.py:broken", "reward.on_error": "stop", "log.dir": "broken"}
broken |= {"train.min_lr": 1e-7}  # without effect
for settings in ({**ALONE, "rollout.group_size": 4}, broken):
    try:
        train("my_presets.py:small", settings)
    except (ConfigError, RunError) as error:
        print("RAISED", type(error).__name__, error)
"""

SIGNALS = """
import os
import signal
import sys
import threading
import time
from pathlib import Path

from r3 import RunError, train


def sends(number, rows):
    "A signal to this process alone, as a notebook's kernel gets it, when so many rows are there."
    def send():
        file = Path("stopped/metrics.jsonl")
        while not file.exists() or len(file.read_text().splitlines()) < rows:
            time.sleep(0.05)
        os.kill(os.getpid(), number)
    threading.Thread(target=send).start()


many = {"parallel.ep": 2, "log.dir": "stopped", "log.show_every": 0, "train.steps": 100}
sends(signal.SIGINT, 1)
try:
    train("my_presets.py:small", many, ranks=2)
except KeyboardInterrupt:
    print("INTERRUPTED")
sends(signal.SIGTERM, 3)
try:
    train("my_presets.py:small", many, ranks=2)
except RunError as error:
    print("STOPPED", error.code)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert not {"torch", "vllm", "transformers"} & set(sys.modules)
"""

KILLED = """
from r3 import train
train("my_presets.py:small", {"log.dir": "killed", "train.steps": 100})
"""


def said_by(folder: Path, *words: object, python: str = "") -> str:
    """What a program prints that ends well, in a folder with presets and without a checkout.

    Args:
        python: the interpreter; by default one that is quicker, and forwards no signals.
    """
    (folder / "my_presets.py").write_text(PRESETS)
    command = (python or interpreter(), *words)
    done = program(*command, cwd=folder, env=QUIET_THREADS, timeout_s=280, together=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_a_script_trains_again_and_again_and_gets_exceptions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "brief.py").write_text(BRIEF)
    # It passes the trial before the run, where it is called once.
    broken = "calls = []\n\ndef broken(response, prompt):\n    calls.append(1)\n"
    (tmp_path / "broken.py").write_text(f"{broken}    return 1 / (len(calls) < 2)\n")
    said = said_by(tmp_path, "mine.py")
    assert "RAISED ConfigError config: 1 problem" in said and "rollout.group_size = 4" in said
    assert said.count("warning: train.min_lr = 1e-07 has no effect") == 1, "by the ranks"
    assert "RAISED RunError" in said.partition("RAISED ConfigError")[2]
    assert "ZeroDivisionError" in said.rpartition("RAISED RunError")[2]
    # One sample, of the first run alone: it was asked for there, and the broken one has none.
    assert said.count("\nuser\n") == 1 and "\nreference\n" in said


def test_signals_of_the_program_stop_the_ranks_after_their_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SIGNALS)
    said = said_by(tmp_path, "mine.py", python=sys.executable)
    assert said.count("INTERRUPTED\n") == said.count("STOPPED 75\n") == 1
    assert "layout     2 rank(s) on cpu" in said  # printed by the ranks, shown here
    assert "continue with: the same call of r3.train" in said
    first, *_, last = [row["step"] for row in rows_of(tmp_path / "stopped")]
    assert first == 1 and last > 1, "the second call resumed"


def test_ranks_end_with_the_program_that_called(tmp_path: Path) -> None:
    (tmp_path / "my_presets.py").write_text(PRESETS)
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=tmp_path,
        env=os.environ | QUIET_THREADS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert soon((tmp_path / "killed" / "metrics.jsonl").exists, 240.0)
    started = psutil.Process(program.pid).children(recursive=True)
    assert len(started) >= 3  # launcher, torchrun, rank
    program.kill()
    program.wait()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive, [each.cmdline() for each in alive]
