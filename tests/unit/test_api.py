"""`from r3 import train`: mistakes are exceptions, and importing it costs nothing."""

from __future__ import annotations

import importlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from r3 import api, train
from r3.api import Result, RunError, _named
from r3.cli.parse import from_python
from r3.config import ConfigError, with_values
from r3.configs import PRESETS
from r3.rewards.scorer import RewardError
from r3.run import embedded_run
from r3.run.embedded_run import imports_that_last, own_process
from r3.runtime.device import seed_everything
from tests.tiny import FEW_ROWS
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


def test_numbers_of_numpy_are_numbers() -> None:
    """Those of a sweep, such as np.logspace; their values are checked as any others."""
    values = {
        "train.lr": np.float64(1e-3),
        "train.steps": np.int64(0),
        "eval.samples": [np.int8(1)],
    }
    with pytest.raises(ConfigError) as raised:
        train("tiny-smoke", {**values, "parallel.ep": np.int32(1)})
    text = str(raised.value)
    assert "train.steps = 0: must be at least 1" in text
    assert "train.lr" not in text and "eval.samples" not in text and "np." not in text
    with pytest.raises(ConfigError, match=r"train\.steps = 3\.0: must be an integer"):
        train("tiny-smoke", {"parallel.ep": 1, "train.steps": np.float32(3)})
    assert _named({"log.tensorboard": True}) == {"log.tensorboard": True}


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


def test_a_function_of_an_imported_file_stands_for_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("my_reward.py").write_text("def brief(response, prompt):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    module = importlib.import_module("my_reward")
    for settings in ({"reward.function": module.brief}, {"reward": {"function": [module.brief]}}):
        named = _named(settings)
        config = from_python("tiny", {"parallel.ep": 1, **named}, world_size=1).config
        assert config.reward.function == ("my_reward.py:brief",)


def test_a_function_that_ranks_could_not_load_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        train("tiny", {"reward.function": lambda response, prompt: 1.0})
    text = str(raised.value)
    assert "reward.function = 'test_a_function_that" in text
    assert "is not defined at the top of an imported file" in text
    assert "Fix: write it into a file of its own" in text


def test_a_call_during_another_one_is_refused_at_once() -> None:
    with api._in_progress, pytest.raises(RunError, match="a run is in progress in this process"):
        train("tiny", {"parallel.ep": 1})
    assert not list(Path.cwd().iterdir())


def test_a_result_prints_in_one_line() -> None:
    row = {"step": 2.0, "reward/mean": 0.34375, "time/step_s": 1.0}
    result = Result(folder=Path("runs/a"), metrics=[row] * 60, export=None)
    assert repr(result) == "Result(folder='runs/a', step=2, reward/mean=0.344, export=None)"
    row = {"step": 2.0, "eval/heldout/accuracy": 0.25, "eval/heldout/unjudged": 0.0}
    assert "eval/heldout/accuracy=0.250" in repr(replace(result, metrics=[row]))


def test_the_process_is_like_a_new_one_and_then_as_it_was() -> None:
    before = _of_this_process()
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    mine = _of_this_process()
    try:
        with own_process():
            assert torch.get_default_dtype() == torch.float32
            seed_everything(7, deterministic=True)
            os.environ |= {"RANK": "0", "MY_VARIABLE": "1"}
            sys.excepthook = threading.excepthook = print
            sys.modules["triton"] = None  # type: ignore[assignment]
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            warnings.simplefilter("error")
            torch.set_num_threads(torch.get_num_threads() + 1)
            logging.root.addHandler(logging.NullHandler())
            assert len(differing := _differing(mine, _of_this_process())) == len(mine), differing
        assert _differing(mine, _of_this_process()) == []
    finally:
        torch.set_default_dtype(kept)
    assert _differing(before, _of_this_process()) == []


def _of_this_process() -> dict[str, object]:
    return {
        "variables": dict(os.environ),
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "hooks": (sys.excepthook, threading.excepthook),
        "triton": sys.modules.get("triton", "absent"),
        "signals": signal.getsignal(signal.SIGUSR1),
        "filters": list(warnings.filters),
        "threads": torch.get_num_threads(),
        "logs": list(logging.root.handlers),
    }


def _differing(before: dict[str, object], now: dict[str, object]) -> list[str]:
    return [name for name in before if before[name] != now[name]]


def test_what_imports_set_once_is_there_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_run, "_variables", {})
    with own_process(), imports_that_last():
        os.environ["OF_A_LIBRARY"] = "1"
    assert "OF_A_LIBRARY" not in os.environ
    with own_process():
        assert os.environ["OF_A_LIBRARY"] == "1"
    assert "OF_A_LIBRARY" not in os.environ


def test_a_call_tries_the_reward_as_it_is_before_it_builds_anything() -> None:
    file = Path("mine.py")
    settings = {"parallel.ep": 1, "eval.path": (), "reward.function": "mine.py:mine"}
    settings |= {"data.path": (FEW_ROWS,)}
    before, modules = _of_this_process(), set(sys.modules)
    for word in ("level", "stage"):  # an edit of the same size between two calls
        file.write_text(f"def mine(response, prompt):\n    return prompt.metadata[{word!r}]\n")
        with pytest.raises(RewardError, match=f"KeyError: '{word}'"):
            train("tiny", settings)
    with ThreadPoolExecutor(1) as threads, pytest.raises(RewardError, match="KeyError: 'stage'"):
        threads.submit(train, "tiny", settings).result()
    assert _differing(before, _of_this_process()) == []
    assert not {"vllm", "megatron"} & (set(sys.modules) - modules)
