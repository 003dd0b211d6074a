"""Own runs without flags: `from r3 import train`, a YAML file, a Python file, --from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.runs import QUIET_THREADS, rows_of
from tests.warm import interpreter
from tests.world import ROOT

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

PROGRAM = """
import os
import sys

from r3 import train
from r3.config import ConfigError
from r3.policy import policy
from r3.run import session as build
from r3.run import session

first = train("my_presets.py:small", {"log.dir": "alone"})
assert [row["step"] for row in first.metrics] == [1], first
assert list(first.export.glob("*.safetensors"))

def held():
    return [len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")]

held_after_one = held()
again = train("my_presets.py:small", {"log.dir": "alone"})  # finished: returns at once
assert again == first

def interrupted(*args, **kwargs):
    raise KeyboardInterrupt

# While a run is built: with an engine alone, with half of a policy, with all.
moments = (build, "Policy"), (policy, "slots"), (build, "WeightStream"), (start, "settle")
for module, name in moments:
    whole = getattr(module, name)
    setattr(module, name, interrupted)
    try:
        train("my_presets.py:small", {"log.dir": "interrupted"})
    except KeyboardInterrupt:
        print("INTERRUPTED in", name)
    setattr(module, name, whole)

longer = train("my_presets.py:small", {"log.dir": "alone", "train.steps": 2, "log.show_every": 0})
assert [row["step"] for row in longer.metrics] == [1, 2]  # another run in the same process
assert held() == held_after_one, (held(), held_after_one)  # threads, descriptors

try:
    train("my_presets.py:small", {"log.dir": "alone", "rollout.group_size": 4})
except ConfigError as error:
    print("REFUSED", error)

open("broken.py", "w").write("def broken(response, prompt):\\n    return 1 / 0\\n")
try:
    train("my_presets.py:small", {"reward.function": "broken.py:broken", "log.dir": "broken"})
except Exception as error:
    print("RAISED", type(error).__name__)

several = {"parallel.ep": 2, "log.dir": "several", "log.show_every": 0}
assert len(train("my_presets.py:small", several, ranks=2).metrics) == 1
print("RANKS", os.environ.get("WORLD_SIZE"))
"""


def python(folder: Path, *words: str) -> str:
    """What a program prints that ends well, in a folder with presets and without a checkout."""
    (folder / "my_presets.py").write_text(PRESETS)
    done = subprocess.run(
        [interpreter(), *words],
        cwd=folder,
        env=os.environ | QUIET_THREADS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_a_script_trains_again_and_again_and_gets_exceptions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    said = python(tmp_path, "mine.py")
    assert "REFUSED config: 1 problem" in said and "rollout.group_size = 4" in said
    assert said.count("INTERRUPTED in") == 4
    assert "RAISED RewardError" in said
    assert "layout     2 rank(s) on cpu" in said  # printed by the ranks, shown here
    assert "RANKS None" in said
    assert [row["step"] for row in rows_of(tmp_path / "several")] == [1]
    # One sample, of the first run alone: it was asked for there, and the broken one has none.
    assert said.count("\nuser\n") == 1 and "\nreference\n" in said


def test_a_run_from_a_yaml_file_goes_on_with_from(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: my_presets.py:small\ntrain: {lr: 3e-4}\n")
    said = python(tmp_path, str(ROOT / "train.py"), "mine.yaml")
    assert "settings   mine.yaml, from my_presets.py:small with 1 difference" in said
    assert "train.lr = 0.0003 (my_presets.py:small: 0.0005)" in said
    assert rows_of(tmp_path / "runs" / "mine")[-1]["optim/lr"] == 3e-4

    said = python(tmp_path, str(ROOT / "train.py"), "--from", "runs/mine", "--train.steps", "2")
    assert "resuming from runs/mine/checkpoints/step_000001 after step 1" in said
    assert [row["step"] for row in rows_of(tmp_path / "runs" / "mine")] == [1, 2]
