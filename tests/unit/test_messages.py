"""Wrong files of users end with one message that names them, and never with a traceback."""

import copy
import json
import os
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3 import assets
from r3.checks import problems
from r3.config import Config, ConfigError, RewardConfig, from_yaml
from r3.data import Columns, DataError, Renderer, read_rows
from r3.errors import Fault
from r3.models.shape import ModelShape, ShapeError
from r3.rewards.scorer import make_scorer
from r3.rollout import read_task
from r3.user_code import load, time_limit
from tests.errors import Patch
from tests.settings import found, found_in_files
from tests.tiny import edit_json, tiny_config

HF_TINY = json.loads((assets.TINY_MOE / "config.json").read_text())
COLUMNS = Columns(prompt="question", answer="answer", graded_by=("gsm8k",))


@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(60)"])
def test_import_that_never_ends_names_the_file(body: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def score(response, prompt): return 1.0\n{body}\n")
    began = time.monotonic()
    with pytest.raises(Fault, match=r"mine\.py was not imported after 0\.5 s"):
        load(f"{path}:score", limit_s=0.5)
    assert time.monotonic() - began < 10
    path.write_text("def score(response, prompt): return 1.0\n")
    assert load(f"{path}:score", limit_s=0.5)("", None) == 1.0
    time.sleep(0.7)  # an alarm that was left would raise here


def test_data_from_a_fifo_or_a_long_name_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    for source in (str(tmp_path / "rows.jsonl"), "x" * 5000, f"{'x' * 5000}:train", "a\0b"):
        rows, (problem,) = read_rows(source, COLUMNS)
        assert rows == [] and problem.column == "file"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("tokenizer.json", b"{}"), ("tokenizer.json", b'{"version"'), ("tokenizer.json", b"[]")),
        *(("tokenizer_config.json", b"{"), ("tokenizer_config.json", b"[]")),
        ("chat_template.jinja", b"\xff\xfe{{ messages }}"),
        ("config.json", json.dumps(HF_TINY | {"vocab_size": 16}).encode()),
    ],
)
def test_broken_tokenizer_is_one_message(file: str, content: bytes, model: Path) -> None:
    read_task(small_task(model))
    (model / file).write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.path .*its tokenizer"):
        read_task(small_task(model))


def http(**fields: str) -> RewardConfig:
    return RewardConfig(function=("http",), model="judge", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret", "sk-s\u00e9cret", "\tsk-secret"])
def test_key_no_header_may_hold_is_never_printed(key: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("GRADER_KEY", key)
    with pytest.raises(ConfigError, match=r"character \d+ of its \d+") as error:
        make_scorer(http(url="http://host/v1", api_key_env="GRADER_KEY"))
    assert "cret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        *("https://me:secret@host/v1", "https://secret@host:8000/v1", "https://host/v1?key=secret"),
        "https://host/v1?api-version=1&key=secret",
        *("https://me:secret@host:99999/v1", "http://me:secret@[::1/v1"),
    ],
)
def test_secret_in_an_address_is_refused_and_never_printed(url: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.url") as error:
        make_scorer(http(url=url))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["http://host:99999/v1", "http://[::1/v1"])
def test_address_that_cannot_be_called_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address"):
        make_scorer(http(url=url))


def small_task(model: Path, **sections: dict[str, Any]) -> Config:
    """Four rows, so that reading them takes no time."""
    rows = model.with_name("rows.jsonl")
    lines = [json.dumps({"question": text, "answer": "#### 1"}) for text in "abcd"]
    rows.write_text("\n".join(lines))
    small: dict[str, Any] = {"data": {"path": (str(rows),)}, "eval": {"path": ()}}
    return tiny_config(model, **small | sections)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        *(("{{ 1 / 0 }}", "ZeroDivisionError"), ('{{ 1 + "a" }}', "TypeError")),
        *(("{{ range(10 ** 9) }}", "OverflowError"), ('{% include "x" %}', "no loader")),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        *(("{{ messages[7].role }}", "has no element 7"), ("{% for", "unexpected")),
    ],
)
def test_a_template_that_fails_is_one_message(template: str, text: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=f"refused by the model's chat template.*{text}"):
        read_task(small_task(model))
    with pytest.raises(ConfigError, match=r"model\.path .*chat template"):
        read_task(small_task(model, env={"name": "guess_number"}))


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_template_that_never_ends_is_cut(
    in_thread: bool, tokenizer: Any, monkeypatch: Patch
) -> None:
    """In a thread too, where the chat templates of workflows are rendered."""

    def soon(act: Callable[[], str], _: float, error: Callable[[], Exception]) -> str:
        return time_limit(act, 0.5, error)

    monkeypatch.setattr("r3.data.rendering.time_limit", soon)
    own, text = copy.deepcopy(tokenizer), "{% for a in range(99999) %}"
    renderer = Renderer(own)
    own.chat_template = f"{text}{text}{'{% endfor %}' * 2}"
    began = time.monotonic()
    with pytest.raises(ValueError, match="was not rendered after"), ThreadPoolExecutor(1) as thread:
        messages = [{"role": "user", "content": "a"}]
        if in_thread:
            thread.submit(renderer.render, messages).result(60)
        else:
            renderer.render(messages)
    assert time.monotonic() - began < 10


def test_a_time_limit_in_a_thread_ends_with_its_call() -> None:
    """Calls that end at about their limit either raise its error or leave nothing behind."""

    def call(seconds: float, limit_s: float = 0.004) -> str:
        def busy() -> str:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                pass
            return "in time"

        try:
            return time_limit(busy, limit_s, lambda: TimeoutError("late"))
        except TimeoutError:
            return "late"

    def calls() -> list[str]:
        found = [call(0.0038 + number % 40 * 1e-5) for number in range(400)]
        time.sleep(0.1)  # an exception that was left would be raised here
        return [call(0.0, 60.0), call(60.0, 0.1), *found]

    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(calls).result(100)
    assert found[:2] == ["in time", "late"]


def test_a_template_that_shows_no_message_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").write_text("hello")
    with pytest.raises(DataError, match=r"content of message 0 .*leaves it out"):
        read_task(small_task(model))


ODD_VALUES = (None, "x", "", -1, 0, 1.5, float("nan"), 1e400, True, [], [None], {}, {"a": {}})


def test_no_value_in_config_json_ends_in_a_traceback() -> None:
    values = dict(HF_TINY)
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    extra = ("rope_theta", "mlp_only_layers", "decoder_sparse_step", "layer_types", "dtype")
    refused = 0
    of_rope = ("rope_type", "factor", "rope_theta", "original_max_position_embeddings")
    changes = [{key: odd} for key in dict.fromkeys([*values, *extra]) for odd in ODD_VALUES]
    changes += [{"rope_parameters": rope | {key: odd}} for key in of_rope for odd in ODD_VALUES]
    for change in changes:
        try:
            ModelShape.from_hf(values | change)
        except ShapeError:
            refused += 1
    assert refused > 200


def faults_of(model: Path) -> str:
    return "\n".join(map(str, problems(small_task(model), 1)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_weights_of_a_type_not_to_be_loaded_are_refused(dtype: torch.dtype, model: Path) -> None:
    assert faults_of(model) == ""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(dtype)}, file)
    assert "tensor model.norm.weight in " in (found := faults_of(model))
    assert "has data type" in found and "weights must have one of F64, F32, F16, BF16" in found
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].half()}, file)
    assert faults_of(model) == ""


@pytest.mark.parametrize("kind", ["twice", "folder", "broken link", "fifo", "nested"])
def test_a_file_of_weights_that_is_none_is_named(kind: str, model: Path) -> None:
    # Under its standard name, the file of weights would be the only one that is read.
    (model / "model.safetensors").rename(model / "most.safetensors")
    more, header = model / "more.safetensors", b'{"a": ' + b"[" * 100_000
    {
        "twice": lambda: save_file({"model.norm.weight": torch.zeros(3)}, more),
        "folder": more.mkdir,
        "broken link": lambda: more.symlink_to(model / "nowhere"),
        "fifo": lambda: os.mkfifo(more),
        "nested": lambda: more.write_bytes(struct.pack("<Q", len(header)) + header),
    }[kind]()
    expected = {"twice": "tensor model.norm.weight is in m", "nested": "is not a whole safe"}
    assert expected.get(kind, "more.safetensors is a ") in faults_of(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "added_tokens.json"])
def test_a_model_file_that_is_a_fifo_is_refused(name: str, model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert f"{name} is a device or a FIFO" in faults_of(model)


def test_a_tokenizer_without_an_end_token_is_refused(model: Path) -> None:
    edit_json(model / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="names no eos_token"):
        read_task(small_task(model))


@pytest.mark.parametrize("kind", ["fifo", "folder", "missing", "long"])
def test_a_path_that_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    def odd(suffix: str) -> str:
        path = tmp_path / (("x" * 300 if kind == "long" else "mine") + suffix)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder" and suffix != ".parquet":  # a folder of data is one
            path.mkdir()
        return str(path)

    python, rows = odd(".py"), odd(".parquet")
    files = {"env.path": f"{python}:Mine", "algo.loss": f"{python}:f"}
    files["reward.function"] = f"{python}:f"
    others = {"data.path": rows, "eval.path": rows, "model.path": odd("")}
    judge = {"eval.function": "http", "reward.prompt_file": odd(".txt"), "reward.url": "http://x"}
    said = found(files | others | judge)
    assert {*files, *others, "reward.prompt_file"} <= said.keys()
    assert all(python in message for message in found_in_files(files).values())


@pytest.mark.parametrize(
    "kind", ["long", "loop", "below", "null", "not UTF-8", "metrics", "checkpoints", "config"]
)
def test_a_run_folder_that_cannot_be_one_is_a_problem(kind: str, tmp_path: Path) -> None:
    good, run = tmp_path / "new" / "run", tmp_path / "run"
    assert not problems(tiny_config(log={"dir": str(good)}), 1)
    run.mkdir()
    assert not problems(tiny_config(log={"dir": str(run)}), 1)
    (run / "loop").symlink_to(run / "loop")
    (run / "file").touch()
    below = {"long": "/" + "x" * 300, "loop": "/loop", "below": "/file/run", "null": "\0"}
    path = str(run) + (below | {"not UTF-8": os.fsdecode(b"\xff")}).get(kind, "")
    if kind == "metrics":
        (run / "metrics.jsonl").mkdir()
    elif kind == "checkpoints":
        (run / "checkpoints").touch()
    elif kind == "config":
        os.mkfifo(run / "config.yaml")
    (found,) = problems(tiny_config(log={"dir": path}), 1)
    assert found.place == "log.dir"
    str(found).encode()  # can be printed


DEEP = "a: " + "[" * 5000
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


@pytest.mark.parametrize("text", [DEEP, LAUGHS, f"data: {{path: {'[' * 2000}{']' * 2000}}}"])
def test_a_settings_file_that_explodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_yaml(text)
    assert len(str(error.value)) < 2000
