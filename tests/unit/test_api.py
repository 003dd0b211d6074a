"""`from r3 import train`: mistakes are exceptions, and importing it costs nothing."""

import contextlib
import importlib
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from r3 import Result, RunError, train
from r3.config import ConfigError, with_values
from r3.configs import PRESETS
from r3.launch import from_python
from tests.errors import Patch, message_of
from tests.runs import program
from tests.tiny import FEW_ROWS

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_all_mistakes_are_raised_at_once_and_nothing_is_written() -> None:
    wrong = {"train.steps": 0, "train.learning_rate": 1, "rollout.group_size": "many"}
    text = message_of(lambda: train("tiny", wrong), ConfigError)
    assert "train.steps = 0: must be at least 1" in text
    assert "train.learning_rate = 1: there is no such setting" in text
    assert "rollout.group_size = 'many': must be an integer" in text
    # What the preset needs and one rank cannot give.
    assert "parallel.ep = 2 (set by tiny): must divide the number of ranks" in text
    assert not list(Path.cwd().iterdir())


def test_numbers_of_numpy_are_numbers() -> None:
    """Those of a sweep, such as np.logspace; their values are checked as any others."""
    values = {"train.lr": np.float64(1e-3), "train.steps": np.int64(0)}
    values |= {"eval.samples": [np.int8(1)]}
    values |= {"parallel.ep": np.int32(1)}
    text = message_of(lambda: train("tiny-smoke", values), ConfigError)
    assert "train.steps = 0: must be at least 1" in text
    assert "train.lr" not in text and "eval.samples" not in text and "np." not in text
    with pytest.raises(ConfigError, match=r"train\.steps = 3\.0: must be an integer"):
        train("tiny-smoke", {"parallel.ep": 1, "train.steps": np.float32(3)})


def test_ranks_must_be_possible(monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match="ranks = 0: must be at least 1"):
        train("tiny", ranks=0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match=r"starts ranks of its own\. .* ranks=N"):
        train("tiny", ranks=2)


def test_a_word_and_its_config_make_the_same_run() -> None:
    settings = {"parallel.ep": 1, "train.lr": "1e-4", "log.dir": "runs/a"}
    by_word = from_python("tiny", settings, world_size=1)
    by_config = from_python(PRESETS["tiny"](), settings, world_size=1)
    Path("as_sent.yaml").write_text(by_config.overrides)  # what its ranks read
    assert from_python("as_sent.yaml", {"log.dir": "runs/a"}, world_size=1).config == by_word.config
    expected = {"parallel.ep": 1, "train.lr": 1e-4, "log.dir": "runs/a"}
    assert by_word.config == by_config.config == with_values(PRESETS["tiny"](), expected)
    assert by_word.differences[0] == "tiny with 2 differences"
    unnamed = from_python(PRESETS["tiny"](), {"parallel.ep": 1}, world_size=1)
    assert unnamed.config.log.dir == "runs/python"


LIGHT = """
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


def test_importing_it_imports_nothing_heavy() -> None:
    done = program(sys.executable, "-c", LIGHT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "module 'r3' has no attribute 'trian'\n"


def test_a_function_of_an_imported_file_stands_for_its_name(monkeypatch: Patch) -> None:
    Path("my_reward.py").write_text("def brief(response, prompt):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    brief = importlib.import_module("my_reward").brief
    for settings in ({"reward.function": brief}, {"reward": {"function": [brief]}}):
        with pytest.raises(ConfigError, match="'none=1': brief "):
            train("tiny", {"parallel.ep": 1, "reward.args": ("none=1",), **settings})


def test_a_function_that_ranks_could_not_load_is_refused() -> None:
    rule = "is not defined at the top of an imported file.* Fix: write it into a file of its own"
    with pytest.raises(ConfigError, match=f"reward.function = 'test_a_function_that.*{rule}"):
        train("tiny", {"reward.function": lambda response, prompt: 1.0})


def test_a_result_prints_in_one_line() -> None:
    row = {"step": 2.0, "reward/mean": 0.34375, "time/step_s": 1.0}
    result = Result(folder=Path("runs/a"), metrics=[row] * 60, export=None)
    assert repr(result) == "Result(folder='runs/a', step=2, reward/mean=0.344, export=None)"
    row = {"step": 2.0, "eval/heldout/accuracy": 0.25, "eval/heldout/unjudged": 0.0}
    assert "eval/heldout/accuracy=0.250" in repr(replace(result, metrics=[row]))


def test_what_ranks_are_refused_for_is_one_error_with_the_message() -> None:
    """Where stdout has no descriptor too, from any thread, and with the file as it is now."""
    settings = {"parallel.ep": 1, "eval.path": (), "reward.function": "mine.py:mine"}
    settings |= {"data.path": (FEW_ROWS,)}
    shown = io.StringIO()

    def said(word: str) -> str:
        text = f"def mine(response, prompt):\n    print('hello')\n    return {word}\n"
        Path("mine.py").write_text(text)
        with pytest.raises(RunError) as raised:
            train("tiny", settings)
        assert raised.value.code == 2
        return str(raised.value)

    with contextlib.redirect_stdout(shown):
        assert "NameError: name 'level' is not defined" in said("level")
    assert "ok: " in shown.getvalue() and "hello" in shown.getvalue()
    with contextlib.redirect_stdout(None), ThreadPoolExecutor(1) as threads:
        assert "NameError: name 'stage'" in threads.submit(said, "stage").result()
    assert not Path("runs").exists()
