"""Wrong files of users end with one message that names them, and never with a traceback."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from r3 import assets
from r3.config import ConfigError, EnvConfig, RewardConfig
from r3.data.sources import Columns, read_rows
from r3.envs import find
from r3.models.hf_config import ShapeError
from r3.models.shape import ModelShape
from r3.rewards import resolve
from r3.rewards.http import ChatJudge
from r3.rollout.task import read_task
from r3.runtime.workers import UserFileError, load
from tests.tiny import tiny_config

pytestmark = pytest.mark.unit

COLUMNS = Columns(prompt="question", answer="answer", answer_holds="####")


@pytest.mark.parametrize("code", ["0", "3", "'text'", ""])
def test_exit_at_import_is_no_success(code: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"import sys\ndef score(response, prompt): return 1.0\nsys.exit({code})\n")
    with pytest.raises(ConfigError, match=r"mine\.py calls sys\.exit\("):
        resolve(f"{path}:score")
    path.write_text(f"import sys\nclass Mine:\n    pass\nsys.exit({code})\n")
    with pytest.raises(ConfigError, match=r"mine\.py calls sys\.exit\("):
        find(EnvConfig(path=f"{path}:Mine"))


@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(60)"])
def test_import_that_never_ends_names_the_file(body: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def score(response, prompt): return 1.0\n{body}\n")
    began = time.monotonic()
    with pytest.raises(UserFileError, match=r"mine\.py was not imported after 0\.5 s"):
        load(f"{path}:score", limit_s=0.5)
    assert time.monotonic() - began < 10
    path.write_text("def score(response, prompt): return 1.0\n")
    assert load(f"{path}:score", limit_s=0.5)("", None) == 1.0


def test_time_limit_ends_with_the_import(tmp_path: Path) -> None:
    path = tmp_path / "quick.py"
    path.write_text("def score(response, prompt): return 1.0\n")
    load(f"{path}:score", limit_s=0.2)
    time.sleep(0.4)  # an alarm that was left would raise here


@pytest.mark.parametrize("kind", ["fifo", "folder", "missing", "long"])
def test_path_that_is_no_file_is_said(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300 if kind == "long" else "mine") / ".."
    path = tmp_path / (("x" * 300 if kind == "long" else "mine") + ".py")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=r"(mine|x+)\.py"):
        resolve(f"{path}:score")
    with pytest.raises(ConfigError, match=r"(mine|x+)\.py"):
        find(EnvConfig(path=f"{path}:Mine"))


def test_data_from_a_fifo_or_a_long_name_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    for source in (str(tmp_path / "rows.jsonl"), "x" * 5000, f"{'x' * 5000}:train", "a\0b"):
        rows, (problem,) = read_rows(source, COLUMNS)
        assert rows == [] and problem.field == "file"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (r'{"question": "a \ud800 b", "answer": "#### 1"}', "half of a character"),
        (r'{"question": "a", "answer": "#### 1", "more": [{"x": "\udfff"}]}', "half of a"),
        ('{"question": ' + "[" * 100_000 + "}", "nested too deeply"),
        ('{"question": "a", "answer": "#### 1", "n": ' + "7" * 5000 + "}", "long numbers"),
        ('{"question": "a", "answer": "#### none"}', "no plain number behind '####'"),
        ('{"question": "a", "answer": "#### 1/2"}', "no plain number behind '####'"),
        ('{"question": "a", "answer": "none"}', "has no '####'"),
    ],
)
def test_row_that_would_fail_later_is_named(line: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = '{"question": "a", "answer": "#### $-1,234.5"}'
    path.write_text(f"{good}\n{line}\n")
    rows, (problem,) = read_rows(str(path), COLUMNS)
    assert len(rows) == 1
    assert problem.line == 2 and rule in str(problem)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", "x"),
        ("rope_parameters", [1]),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", True),
        ("layer_types", 5),
        ("mlp_only_layers", 3),
        ("mlp_only_layers", ["0"]),
        ("architectures", [["a"]]),
        ("architectures", {"a": 1}),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1.5]),
    ],
)
def test_config_value_of_the_wrong_kind_is_named(key: str, value: object) -> None:
    values = json.loads((Path(assets.TINY_MOE) / "config.json").read_text())
    with pytest.raises(ShapeError, match=f"key {key} must be "):
        ModelShape.from_hf(values | {key: value})
    ModelShape.from_hf(values)


def test_config_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ShapeError, match="is not JSON"):
        ModelShape.read(tmp_path)


def shrink_vocabulary(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": 16}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "tokenizer.json").write_text('{"version"'),
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        lambda folder: (folder / "tokenizer_config.json").write_text("{"),
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        shrink_vocabulary,
    ],
)
def test_broken_tokenizer_is_one_message(damage: Callable[[Path], object], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(assets.TINY_MOE, model)
    read_task(tiny_config(model))
    damage(model)
    with pytest.raises(ConfigError, match=r"model\.path .*its tokenizer"):
        read_task(tiny_config(model))


def http(**fields: str) -> RewardConfig:
    return RewardConfig(function=("http",), model="judge", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret", "sk-s\u00e9cret", "\tsk-secret"])
def test_key_that_no_header_may_hold_is_never_printed(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADER_KEY", key)
    with pytest.raises(ConfigError, match=r"character \d+ of its \d+") as error:
        ChatJudge(http(url="http://host/v1", api_key_env="GRADER_KEY"))
    assert "cret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:secret@host/v1",
        "https://secret@host:8000/v1",
        "https://host/v1?key=secret",
        "https://me:secret@host:99999/v1",
        "http://me:secret@[::1/v1",
    ],
)
def test_secret_in_an_address_is_refused_and_never_printed(url: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.url") as error:
        ChatJudge(http(url=url))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["http://host:99999/v1", "http://[::1/v1"])
def test_address_that_cannot_be_called_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address"):
        ChatJudge(http(url=url))
