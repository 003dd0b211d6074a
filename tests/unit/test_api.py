"""`from r3 import train`: mistakes are exceptions, and importing it costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3 import train
from r3.cli.parse import from_python
from r3.config import ConfigError, with_values
from r3.configs import PRESETS
from tests.world import ROOT

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_all_mistakes_are_raised_at_once_and_nothing_is_written() -> None:
    with pytest.raises(ConfigError) as raised:
        train("tiny", {"train.steps": 0, "train.learning_rate": 1, "rollout.group_size": "many"})
    text = str(raised.value)
    assert "train.steps = 0: must be at least 1" in text
    assert "train.learning_rate = 1: there is no such setting" in text
    assert "rollout.group_size = 'many': must be an integer" in text
    # What the preset needs and one rank cannot give.
    assert "parallel.ep = 2 (set by tiny): must divide the number of ranks" in text
    assert not list(Path.cwd().iterdir())


def test_a_preset_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean tiny"):
        train("tinny")


@pytest.mark.parametrize(("ranks", "started"), [(0, ""), (3, "2")])
def test_ranks_must_be_possible(ranks: int, started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if started:
        monkeypatch.setenv("WORLD_SIZE", started)
    with pytest.raises(ConfigError, match=f"ranks = {ranks}: "):
        train("tiny", ranks=ranks)


def test_a_word_and_its_config_make_the_same_run() -> None:
    settings = {"parallel.ep": 1, "train.lr": "1e-4", "log.dir": "runs/a"}
    by_word = from_python("tiny", settings, world_size=1)
    by_config = from_python(PRESETS["tiny"](), settings, world_size=1)
    expected = {"parallel.ep": 1, "train.lr": 1e-4, "log.dir": "runs/a"}
    assert by_word.config == by_config.config == with_values(PRESETS["tiny"](), expected)
    assert by_word.differences[0] == "tiny with 2 differences"
    assert from_python(PRESETS["tiny"](), {"parallel.ep": 1}, world_size=1).config.log.dir == (
        "runs/python"
    )


def test_importing_it_imports_nothing_heavy() -> None:
    program = """
import sys
import r3
light = {name for name in sys.modules if name.startswith("r3")}
assert light == {"r3"}, light
from r3 import train
heavy = {"torch", "vllm", "megatron", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
try:
    r3.trian
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "module 'r3' has no attribute 'trian'\n"
