"""Files of a run are whole or absent, read back bit for bit, and a torn last line is said."""

import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3 import assets, export
from r3.config import ConfigError, to_yaml
from r3.run import (
    RunDir,
    read_jsonl,
    read_metrics,
    replacing,
    truncate_metrics,
    write_eval,
    write_json,
    write_text,
)
from r3.tools import TrainedSample, read_rollouts, write_rollouts
from r3.types import Prompt, Rollout, SamplingMask
from tests.runs import program
from tests.settings import changed
from tests.tiny import QUESTION, coded_rollout


def rollout(index: int, tokens: int, *, response: str = "") -> Rollout:
    """Of which two tokens are the prompt."""
    made = coded_rollout(range(tokens), tokens - 2, seed=index)
    return replace(made, prompt_id=PROMPT.id, sample_index=index, response=response)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def scored(
    rollouts: Sequence[Rollout], rewards: Sequence[float] = (), advantages: Sequence[float] = ()
) -> list[TrainedSample]:
    values = zip_longest(rollouts, rewards, advantages, fillvalue=0.0)
    return [
        TrainedSample(rollout=one, reward=reward, shaped_reward=0.0, advantage=advantage)
        for one, reward, advantage in values
    ]


def dump(
    folder: Path, items: list[TrainedSample], prompts: Mapping[str, Prompt] | None = None
) -> Path:
    """Write the first step; what is returned is what the file holds."""
    rows = write_rollouts(RunDir(folder), 1, items, prompts or {})
    path = RunDir(folder).rollouts(1)
    assert read_jsonl(path) == json.loads(json.dumps(rows))  # which has lists for tuples
    return path


def test_rollouts_read_back_exactly(tmp_path: Path) -> None:
    written = [rollout(0, 7, response="3+4=7\n#### 7"), rollout(1, 3)]
    written.append(rollout(2, 11, response="\u00fc \u2028 \ud800"))
    sets = np.array([0, 0, 2, 1, 0, 0, 3], np.int32), np.arange(6, dtype=np.int32)
    mask = SamplingMask(counts_T=sets[0], token_ids=sets[1])
    written[0] = replace(written[0], sampling_mask=mask)
    path = dump(tmp_path, scored(written, [1.0, 0.1 + 0.2, 0.0], [0.5, -1 / 3, 2.0]))
    assert files(tmp_path) == ["rollouts/step_000001.jsonl", "rollouts/step_000001.safetensors"]
    read, rewards, advantages = read_rollouts(path)
    assert rewards == [1.0, 0.1 + 0.2, 0.0]
    assert advantages == [0.5, -1 / 3, 2.0]
    for before, after in zip(written, read, strict=True):
        names = "prompt_id group sample_index finish_reason policy_version response"
        for name in names.split():
            assert getattr(before, name) == getattr(after, name)
        for name in ("tokens_T", "loss_mask_T", "logprobs_T", "routed_experts"):
            assert getattr(before, name).dtype == getattr(after, name).dtype
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    again = read[0].sampling_mask
    assert read[1].sampling_mask is None and again is not None
    for array, wanted in zip((again.counts_T, again.token_ids), sets, strict=True):
        np.testing.assert_array_equal(array, wanted, strict=True)
    row = read_jsonl(path)[0]
    assert (row["tokens"], row["response_tokens"]) == (7, 5)


PROMPT = replace(QUESTION, messages=({"role": "system", "content": "Count."}, *QUESTION.messages))


def test_a_row_has_question_reference_and_the_whole_conversation(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calc"}}]}
    said = (*PROMPT.messages, call, {"role": "tool", "content": "7"})
    written = [rollout(index, 7, response="7") for index in range(3)]
    more: dict[str, Any] = {"turn_rewards": (None, 0.1), "metrics": {"env/share": 0.1}}
    written[1] = replace(written[1], messages=said, **more)
    written[2] = replace(written[2], prompt_id="rows.jsonl:9")
    item = scored(written)
    item[0] = replace(item[0], parts={"gsm8k": 1.0})
    path = dump(tmp_path, item, {PROMPT.id: PROMPT})
    single, several, unknown = read_jsonl(path)
    assert (single["question"], single["reference"]) == ("3 + 4?", "#### 7")
    assert single["messages"] == [*PROMPT.messages, {"role": "assistant", "content": "7"}]
    assert (single["turn_rewards"], single["rewards"]) == ([], {"gsm8k": 1.0})
    assert several["messages"] == list(said) and several["turn_rewards"] == [None, 0.1]
    assert unknown["messages"] == [{"role": "assistant", "content": "7"}]
    assert "question" not in unknown and "reference" not in unknown
    (_, again, _), _, _ = read_rollouts(path)
    assert (again.messages, again.turn_rewards) == (said, (None, 0.1))
    assert several["metrics"] == again.metrics == {"env/share": 0.1}


def test_a_dump_that_fails_leaves_nothing(tmp_path: Path) -> None:
    unwritable = replace(rollout(0, 4), response=object())  # type: ignore[arg-type]
    for items, said in (([], "at least one rollout"), ([unwritable], "not JSON serializable")):
        with pytest.raises((ValueError, TypeError), match=said):
            write_rollouts(RunDir(tmp_path), 1, scored(items))
    assert files(tmp_path) == []


def test_eval_sets_of_one_step_share_a_file(run_dir: RunDir) -> None:
    write_eval(run_dir, 0, "easy", [{"reward": 0.0}])
    write_eval(run_dir, 0, "hard", [{"reward": 0.5}])
    # Done again after a resume
    path = write_eval(run_dir, 0, "easy", [{"reward": 1.0}, {"reward": 0.0}])
    rows = [(row["set"], row["reward"]) for row in read_jsonl(path)]
    assert rows == [("hard", 0.5), ("easy", 1.0), ("easy", 0.0)]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError, match="disk"), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("disk")
    assert path.read_text() == "old"
    assert files(tmp_path) == ["deep/file.txt"]
    write_json(path, {"a": [1, None]})
    assert json.loads(path.read_text()) == {"a": [1, None]}


def test_a_kill_in_the_middle_of_a_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")
    text = "import os, sys\nfrom pathlib import Path\nfrom r3.run.folder import replacing\n"
    text += "with replacing(Path(sys.argv[1])) as temporary:\n"
    text += "    temporary.write_text('half')\n    os.kill(os.getpid(), 9)\n"
    assert program(sys.executable, "-c", text, path).returncode == -9
    assert path.read_text() == "old"


def test_floats_survive_the_file(run_dir: RunDir) -> None:
    odd = (0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, math.inf, math.nan)
    run_dir.append_metrics({"step": 0} | dict(zip("abcdef", odd, strict=True)))
    (read,) = read_metrics(run_dir.path)
    assert [read[key].hex() for key in "abcdef"] == [value.hex() for value in odd]


@pytest.mark.parametrize(
    "torn",
    [b'{"step": 2, "a": 0.', b'{"step": 2, "a": "\xc3', b"\0" * 20, b"\0" * 20 + b"\n", b"2"],
)
def test_a_torn_last_line_is_left_out_and_said(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n' + torn)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:3: the last line is torn"):
        assert read_metrics(path) == [{"step": 0}, {"step": 1}]


def test_a_last_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    (path := tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_metrics(path) == [{"step": 0}, {"step": 1}]


def test_a_torn_dump_gives_the_rollouts_that_are_whole(tmp_path: Path) -> None:
    path = dump(tmp_path, scored([rollout(0, 7), rollout(1, 3)], [1.0, 0.0], [1.0, -1.0]))
    os.truncate(path, path.stat().st_size - 5)
    with pytest.warns(UserWarning, match="torn"):
        rollouts, rewards, _ = read_rollouts(path)
    assert ([r.sample_index for r in rollouts], rewards) == ([0], [1.0])


def test_truncation_drops_the_steps_to_be_made_again(run_dir: RunDir) -> None:
    for step in range(5):
        run_dir.append_metrics({"step": step, "a": step / 3})
    before = run_dir.metrics.read_bytes().splitlines(keepends=True)
    with run_dir.metrics.open("ab") as file:
        file.write(b'{"step": 5, "a"')
    said = truncate_metrics(run_dir, 3)
    assert run_dir.metrics.read_bytes() == b"".join(before[:3])  # untouched rows, byte for byte
    assert len(said) == 2
    assert "metrics.jsonl:6: the last line is torn" in said[0]
    assert "2 rows from step 3 on were dropped" in said[1]
    assert truncate_metrics(run_dir, 3) == []
    run_dir.append_metrics({"step": 3})
    assert [row["step"] for row in read_metrics(run_dir.path)] == [0, 1, 2, 3]


def test_truncation_says_which_rows_are_missing(run_dir: RunDir) -> None:
    assert truncate_metrics(run_dir, 0) == []
    assert truncate_metrics(run_dir, 4) == ["metrics.jsonl is missing: rows before step 4 are lost"]
    run_dir.append_metrics({"step": 1})
    (said,) = truncate_metrics(run_dir, 4)
    assert said == "metrics.jsonl: 2 rows between steps 2 and 3 are missing"


def test_rows_at_the_head_doubled_rows_and_rows_out_of_order_are_said(run_dir: RunDir) -> None:
    for step, value in ((4, 1), (3, 1), (5, 1), (4, 2)):
        assert run_dir.append_metrics({"step": step, "a": value}) == (step == 4 and value == 1)
    assert truncate_metrics(run_dir, 6) == [
        "metrics.jsonl: several rows of step 4: the last one counts",
        "metrics.jsonl: its rows were not in the order of their steps",
        "metrics.jsonl: 2 rows between steps 1 and 2 are missing",
    ]
    rows = [{"step": 3, "a": 1}, {"step": 4, "a": 2}, {"step": 5, "a": 1}]
    assert read_jsonl(run_dir.metrics) == read_metrics(run_dir.path) == rows
    with run_dir.metrics.open("ab") as file:
        file.write(b'{"a": 1}\n')
    with pytest.raises(ValueError, match=r"a row has no step: \{'a': 1\}"):
        read_metrics(run_dir.path)


@pytest.mark.parametrize("layers", [3, 0], ids=["another memory order", "dense"])
def test_routes_of_any_form_are_written_as_they_read(layers: int, tmp_path: Path) -> None:
    routes = np.asfortranarray(np.arange(4 * layers * 2, dtype=np.int8).reshape(4, layers, 2))
    odd = replace(rollout(0, 5), routed_experts=routes)
    (again,), _, _ = read_rollouts(dump(tmp_path, scored([odd])))
    np.testing.assert_array_equal(again.routed_experts, routes, strict=True)


def test_an_export_finds_a_relative_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.path` counts from where the run was started, which `log.dir` tells."""
    run_dir = RunDir(tmp_path / "start" / "runs" / "mine")
    run_dir.checkpoint(1).mkdir(parents=True)
    shutil.copytree(assets.TINY_MOE, tmp_path / "start" / "model")
    values = {"model.path": "model", "log.dir": "./runs/mine"}
    write_text(run_dir.config, to_yaml(changed(values)))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    for given in (str(run_dir.path), "../start/runs/mine"):
        assert export.parse([given]).config.model.path == str(tmp_path / "start" / "model")
    monkeypatch.chdir(run_dir.path.parent)
    assert export.parse(["mine"]).config.model.path == str(tmp_path / "start" / "model")
    # A folder that was moved does not tell it.
    moved = shutil.copytree(run_dir.path, other / "moved")
    with pytest.raises(ConfigError, match="relative: run this command where the run was started"):
        export.parse([str(moved)])
    monkeypatch.chdir(tmp_path / "start")
    assert export.parse([str(moved)]).config.model.path == "model"
