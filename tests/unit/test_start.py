"""A task is read from several sources and for several held-out sets, each with what is its own."""

import importlib.util
import json
import re
import shutil
import socket
import sys
import tempfile
from contextlib import closing as closing_task
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r3 import assets
from r3.config import Config, ConfigError, with_values
from r3.data import DataError
from r3.extras import check, machine
from r3.models.shape import ModelShape
from r3.rewards.scorer import RewardError
from r3.rollout import EnvironmentFailed, Task, read_task
from r3.run import RunDir
from r3.runtime import importing
from r3.runtime.device import writable_caches
from r3.tools.beside.result import closing, result
from tests.errors import NOTHING, Patch, message_of
from tests.rows import parquet, write
from tests.runs import program
from tests.settings import changed
from tests.tiny import prompts_of_step, random_rollouts, tiny_config


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Two sources of ten and four rows, drawn one to one; two sets over one file, the second judged
    exactly.
    """
    rows = [json.loads(line) for line in assets.WORD_PROBLEMS_TRAIN.read_text().splitlines()[:14]]
    ten = write(tmp_path, *map(json.dumps, [*rows[:10], rows[0]]))
    settings: dict[str, Any] = {"data.path": [str(ten), parquet(tmp_path, rows[10:])]}
    settings |= {"data.weights": [1, 1], "data.drop_duplicates": True}
    settings |= {"eval.path": [str(assets.WORD_PROBLEMS_EVAL)] * 2, "eval.name": ["short", "long"]}
    settings |= {"eval.max_prompts": [3, 5], "eval.max_tokens": [0, 300]}
    return settings | {"eval.function": ["gsm8k", "exact"]}


def test_rows_of_each_environment_are_read_its_own_way(tmp_path: Path) -> None:
    """The calculator's tools are in the prompts of its rows; plain rows need a graded answer."""
    plain, tools, own = (tmp_path / f"{name}.jsonl" for name in ("plain", "tools", "own"))
    row = {"question": "Tom has 3 eggs. How many?", "answer": "#### 3"}
    for path in (plain, tools):
        path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "id": path.name}))
    own.write_text('{"question": "Any?", "answer": "no number"}\n' * 2)
    code = tmp_path / "env.py"
    code.write_text(
        "class Own:\n    def reset(self, prompt): return prompt.messages\n"
        "    def step(self, message): return [], 1.0, True\n"
    )
    settings: dict[str, Any] = {"data.path": [*map(str, (plain, tools, own))], "eval.path": []}
    settings |= {"data.env": ["single_turn", "calculator", f"{code}:Own"]}
    with closing_task(read_task(changed(settings, tiny_config()))) as task:
        lengths = [len(each.tokens_T) for each in task.prompts.prompts]
        assert lengths[0] == lengths[1] < lengths[2] == lengths[3]
        shown = [[tool["function"]["name"] for tool in each.tools] for each in task.prompts.prompts]
        assert shown == [[], [], ["calc"], ["calc"], [], []]
        split = task.conversation_setup.split(task.prompts.prompts)
        assert [len(prompts) for _, prompts in split] == [2, 2, 2]
        assert [setup.environments.one_turn for setup, _ in split] == [True, False, False]
    swapped = settings | {"data.env": ["single_turn", "calculator", "single_turn"]}
    with pytest.raises(DataError, match=r"own\.jsonl:1: answer: has no '####'"):
        read_task(changed(swapped, tiny_config()))


def test_a_task_of_several_sources_and_sets(settings: dict[str, Any]) -> None:
    task = read_task(changed(settings, tiny_config()))
    assert task.prompts.read == (("rows.jsonl", 10), ("rows.parquet", 4))
    assert task.prompts.dropped_duplicates == 1
    drawn = prompts_of_step(task.prompts, seed=0, step=0, count=8)
    assert sum(prompt.id.startswith("rows.parquet:") for prompt in drawn) == 4

    short, long = task.heldout
    sizes = {each.settings.name: len(each.prompts) for each in task.heldout}
    assert sizes == {"short": 3, "long": 5}
    assert task.max_model_len == max(len(prompt.tokens_T) for prompt in long.prompts) + 300
    prompt = short.prompts[0]
    rollout = random_rollouts(task.shape, [9])[0]
    rollout = replace(rollout, response="#### " + prompt.answer.rpartition("####")[2])
    assert (short.scorer(rollout, prompt), long.scorer(rollout, prompt)) == (1.0, 0.0)


def test_held_out_questions_are_never_dropped(settings: dict[str, Any], tmp_path: Path) -> None:
    long = {"question": "Tom has eggs. " * 200, "answer": "#### 1"}
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    settings = {name: value for name, value in settings.items() if "eval." not in name}
    settings |= {"data.on_too_long": "drop", "eval.path": [str(tmp_path / "long.jsonl")]}
    with pytest.raises(DataError, match="longer than 488 tokens") as error:
        read_task(with_values(tiny_config(), settings))
    assert "--eval.max_tokens" in str(error.value) and "on_too_long" not in str(error.value)


def test_evaluation_alone_reads_no_training_data(settings: dict[str, Any]) -> None:
    settings |= {"data.path": "missing.jsonl", "data.weights": [], "eval.only": True}
    task = read_task(changed(settings, tiny_config()))
    assert (len(task.prompts), len(task.heldout)) == (0, 2)


ENVIRONMENT = """
class Limited:
    def __init__(self, limit=1):
        self.limit = limit
    def reset(self, prompt):
        if self.limit > 8:
            raise ValueError(f"{self.limit} is above 8")
        return [*prompt.messages] * self.limit
    def step(self, message):
        return [], None, True
"""


def config_of(folder: Path, rows: list[Any], code: str = "", **sections: Any) -> Config:
    """A config of these rows alone, and of `mine.py` beside them."""
    (folder / "mine.py").write_text(code)
    path = str(write(folder, *map(json.dumps, rows)))
    return tiny_config(**{"data": {"path": (path,)}, "eval": {"path": ()}} | sections)


def checked(config: Config) -> str:
    """What `--check` says of a task."""
    with closing_task(read_task(config)) as task:
        return "\n".join(check().check_task(task, config.algo))


def test_a_reward_that_no_reference_answer_earns_is_warned_of(tmp_path: Path) -> None:
    function = "def high(response, prompt):\n    return int(response.split()[-1]) > 50\n"
    reward = {"function": (f"{tmp_path}/mine.py:high",)}

    def said(*answers: str) -> str:
        rows = [{"question": "?", "answer": answer} for answer in answers]
        return checked(config_of(tmp_path, rows, function, reward=reward))

    warning = "warning: the reference answers of the first 2 rows are worth 0 at most. high may not"
    assert warning in said("#### 7", "#### 8")
    assert "warning" not in said("#### 7", "#### 88"), "one row may be odd"
    repeated = "note: 1 of 2 rows repeat an earlier one (rows.jsonl:2 is rows.jsonl:1)"
    assert repeated in said("#### 7", "#### 7") and repeated not in said("#### 7", "#### 88")
    rows = [
        {"question": "?", "answer": "#### 7", "verifier": "high" if i else "gsm8k"}
        for i in range(3)
    ]
    reward = {"function": ("row",), "row_functions": ("gsm8k", *reward["function"])}
    of_rows = "of the first 2 rows of high are worth 0 at most. high may not fit the data"
    assert of_rows in checked(config_of(tmp_path, rows, function, reward=reward))


def test_sets_have_columns_system_prompts_and_environments_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    (own_rows := tmp_path / "own.jsonl").write_text('{"problem": "3+4?", "solution": "#### 7"}')
    settings: dict[str, Any] = {"eval.path": [str(assets.WORD_PROBLEMS_EVAL), str(own_rows)]}
    settings |= {"eval.name": ["same", "own"], "eval.env_args": "own.limit=2"}
    settings |= {"eval.prompt_key": ["", "problem"], "eval.answer_key": ["", "solution"]}
    settings |= {"data.system_prompt": "Think.", "eval.system_prompt": ["none", "Be brief."]}
    settings |= {"env.path": f"{tmp_path}/mine.py:Limited"}

    def task(**more: str) -> Task:
        given = settings | {name.replace("_", ".", 1): value for name, value in more.items()}
        return read_task(changed(given, tiny_config()))

    found = task()
    same, own = found.heldout
    assert found.prompts.prompts[0].messages[0]["content"] == "Think."
    assert [message["role"] for message in same.prompts[0].messages] == ["user"]
    assert [message["content"] for message in own.prompts[0].messages] == ["Be brief.", "3+4?"]
    assert own.prompts[0].answer == "#### 7"
    assert same.conversation_setup is found.conversation_setup is not own.conversation_setup
    said = "\n".join(check().check_task(found, tiny_config().algo))
    assert "    same: environment: reset on word_problems_eval.jsonl:1 returned 1 message" in said
    assert "    own: environment: reset on own.jsonl:1 returned 4 message(s)" in said
    assert "    own: reward of the reference answer of own.jsonl:1: gsm8k 1" in said
    found.close()
    failing = task(eval_env_args="own.limit=9")
    with pytest.raises(EnvironmentFailed, match=r"9 is above 8") as error:
        list(check().check_task(failing, tiny_config().algo))
    failing.close()
    first, *_, last = str(error.value).splitlines()
    expected = f"own: environment {tmp_path}/mine.py:Limited: reset failed on own.jsonl:1 (error)"
    assert first == expected
    assert last.endswith("tools and metadata; here metadata has no column")
    assert "r3_user_" not in str(error.value)


FLOW = """
class Flow:
    async def run(self, task, model):
        return 1.0
"""


def test_a_reward_that_an_environment_may_replace_is_a_note(tmp_path: Path) -> None:
    """Rows without `####` are none for gsm8k, which a workflow with rewards never asks."""
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(8)]
    code = f"{FLOW}\ndef f(response, prompt): return prompt.metadata['level']"
    said = checked(config_of(tmp_path, rows, code, env={"path": f"{tmp_path}/mine.py:Flow"}))
    assert "note: reward gsm8k fails on the reference answer of rows.jsonl:1: ValueError" in said
    assert "set --reward.function none" in said
    # A function that will be asked still fails.
    reward = {"function": (f"{tmp_path}/mine.py:f",)}
    with pytest.raises(RewardError, match="KeyError: 'level'"):
        checked(config_of(tmp_path, rows, code, reward=reward))


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (("self_judge",), ["self_judge: not called, because the engine is asked"]),
        (
            ("gsm8k", "self_judge", "none-of"),
            ["reward self_judge: not called", ": gsm8k 1, brief -0.6 "],
        ),
        (("row",), ["reward self_judge: not called", "of rows.jsonl:2: row 1, row_gsm8k 1 "]),
        (("env", "none-of"), ["reward env: not called, because the env", ": brief -0.6 "]),
    ],
)
def test_functions_that_only_a_run_can_call_are_left_out(
    functions: tuple[str, ...], said: list[str], tmp_path: Path
) -> None:
    """Each beside others, whose values are those of a run; in training and on a held-out set."""
    mine = f"{tmp_path}/mine.py"
    code = f"{TALK}\ndef brief(response, prompt): return -len(response) / 10\n"
    row = {"question": "?", "answer": "#### 7"}
    rows = [{**row, "verifier": verifier} for verifier in ("self_judge", "gsm8k")]
    function = tuple(f"{mine}:brief" if each == "none-of" else each for each in functions)
    reward = {"function": function, "row_functions": ("gsm8k", "self_judge")}
    env = {"path": f"{mine}:Talk"} if "env" in functions else {}
    heldout = {"path": (f"{tmp_path}/rows.jsonl",)}
    config = config_of(tmp_path, rows, code, eval=heldout, reward=reward, env=env)
    found = checked(config).splitlines()
    for text in said:
        assert len([line for line in found if text in line]) == 2, "\n".join(found)
    assert not any("warning" in line for line in found)


TALK = """
class Talk:
    def reset(self, prompt):
        return prompt.messages
    def step(self, message):
        return [], float(message["content"].split()[-1]), True
"""


SHARES = """
class Base:
    seen, own, words = [], [], ("a",)
class Talk(Base):
    def __init__(self):
        self.own = []
    def reset(self, prompt):
        self.own.append(prompt.id)
        return prompt.messages
    def step(self, message):
        {}
        return [], 1.0, True
"""


@pytest.mark.parametrize("shares", [True, False])
def test_what_all_conversations_share_is_a_note(shares: bool, tmp_path: Path) -> None:
    code = SHARES.format("self.seen.append(1)" if shares else "pass")
    row, env = {"question": "?", "answer": "#### 7"}, {"path": f"{tmp_path}/mine.py:Talk"}
    said = checked(config_of(tmp_path, [row], code, env=env))
    assert ("note: environment: calls changed seen, which belongs to the class" in said) == shares
    assert "changed own" not in said


def test_an_environment_makes_a_step(tmp_path: Path) -> None:
    """With the reference answer as the model's message."""
    env = {"path": f"{tmp_path}/mine.py:Talk"}
    config = config_of(tmp_path, [{"question": "?", "answer": "#### 7"}], TALK, env=env)
    assert "returned 0 message(s), reward 7, done True" in checked(config)
    config_of(tmp_path, [{"question": "?", "answer": "no"}], TALK)
    with pytest.raises(EnvironmentFailed, match=r"step failed on rows.jsonl:1 \(error\)"):
        checked(config)
    lenient = changed({"env.on_error": "drop"}, config)
    assert re.search(r"note: .*step failed on rows.jsonl:1 \(error\)", checked(lenient))


# ---- the closing line


def run_of(folder: Path, *rows: dict[str, float]) -> RunDir:
    """A run's folder with one row per step, the first of step 0."""
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return RunDir(folder)


def test_a_run_ends_with_its_mismatch_with_and_without_replay(tmp_path: Path) -> None:
    """Means over the steps: (1e-4 + 3e-4) / 2 and (1e-3 + 9e-3) / 2."""
    names = [f"mismatch/k3_{name}" for name in ("replay", "live", "ratio")]
    one, two = (
        dict(zip(names, row, strict=True)) for row in ((1e-4, 1e-3, 10.0), (3e-4, 9e-3, 30.0))
    )
    accuracies = [{"eval/heldout/accuracy": accuracy} for accuracy in (0.25, 0.75)]
    run_dir = run_of(tmp_path, accuracies[0], one, two | accuracies[1])
    said = "2 steps, heldout accuracy 0.250 -> 0.750; replay: k3 2.0e-04, live: 5.0e-03, 25 times"
    assert result(Config(), run_dir, 2) == said
    assert closing(tiny_config(), run_dir, 61.2, 2, {}).startswith(f"done       in 61 s: {said}; ")


def test_an_evaluation_ends_with_its_figures(tmp_path: Path) -> None:
    row = {"eval/heldout/accuracy": 0.25, "eval/hard/accuracy": 0.5, "eval/hard/reward": 1.5}
    said = closing(tiny_config(eval={"only": True}), RunDir(tmp_path), 6.4, 8, row)
    assert "in 6 s: hard reward 1.500, heldout accuracy 0.250; answers in" in said


def test_a_run_without_paired_passes_ends_without_a_mismatch(tmp_path: Path) -> None:
    """Replay is off, or no step was compared (replay.shadow_every)."""
    run_dir = run_of(tmp_path, {}, {"mismatch/k3": 1e-3})
    assert result(Config(), run_dir, 1) == "1 step"
    assert result(Config(), RunDir(tmp_path / "nothing"), 0) == "0 steps"


@pytest.mark.large
def test_mistakes_show_before_megatron_and_vllm_are_imported() -> None:
    text = "import sys, r3.run.prepare; print(sorted({'megatron', 'vllm'} & set(sys.modules)))"
    done = program(sys.executable, "-c", text)
    assert (done.returncode, done.stdout) == (0, "[]\n")


def test_importing_hides_modules_that_are_not_imported_yet() -> None:
    sys.modules.pop("this", None)
    with importing(without=("this", "json")):
        assert importlib.import_module("json") is json
        with pytest.raises(ModuleNotFoundError, match="this"):
            importlib.import_module("this")
    assert importlib.util.find_spec("this") and "this" not in sys.modules


require_others_in_reach = machine().require_others_in_reach
_RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "rule"),
    [
        (_RANK, "WORLD_SIZE = '2': without MASTER_ADDR and MASTER_PORT, rank 1 cannot find"),
        (_RANK | {"MASTER_ADDR": "a"}, "without MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "3"}, "WORLD_SIZE = '1': without MASTER_ADDR and MASTER_PORT, rank 3 cannot"),
        ({"GLOO_SOCKET_IFNAME": "lo,nosuch0"}, "has no network interface nosuch0"),
        (_RANK | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}, ""),
        ({}, ""),
    ],
)
def test_a_rank_that_would_wait_without_end_says_why(
    variables: dict[str, str], rule: str, monkeypatch: Patch
) -> None:
    """Not rank 0 alone: the other ranks may be on another machine, or not exist at all."""
    for name in (*_RANK, "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = message_of(require_others_in_reach, ConfigError)
    assert (rule in said and "LaunchError" in said) if rule else said == NOTHING
    if "RANK" in variables:
        require_others_in_reach(launched=False)  # a launcher will set its own


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("localhost", "its name localhost resolves to "),  # as Debian's 127.0.1.1
        ("nowhere.invalid", "its name nowhere.invalid does not resolve"),  # RFC 2606
        ("192.0.2.7", ""),
    ],
)
def test_a_machine_that_others_cannot_reach_is_named(
    name: str, rule: str, monkeypatch: Patch
) -> None:
    """Gloo gives the others the address of the name, and they would wait without end."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    variables = _RANK | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    said = message_of(require_others_in_reach, ConfigError)
    assert re.search(f"GLOO_SOCKET_IFNAME.*{rule}", said) if rule else said == NOTHING
    for variable, value in {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        with monkeypatch.context() as patch:  # all ranks are here
            patch.setenv(variable, value)
            require_others_in_reach()


def test_small_shared_memory_is_refused_before_its_use(monkeypatch: Patch) -> None:
    """Docker gives 64 MiB; torch's own error names no limit, and no setting."""
    shape = ModelShape.read(assets.TINY_MOE)
    free = 4 * shape.num_params
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    machine().require_memory(shape)  # just enough
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free - 1))
    with pytest.raises(ConfigError, match=r"/dev/shm has [\d.]+ MiB free, and 2 ranks share") as it:
        machine().require_memory(shape)
    assert "--shm-size" in str(it.value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    machine().require_memory(shape)  # one rank shares nothing


def test_a_home_that_cannot_be_written_is_left_alone(monkeypatch: Patch) -> None:
    """vLLM would print eight tracebacks about it."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nobody")
    moved = writable_caches()
    assert set(moved) == {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"}
    assert all(path.startswith(tempfile.gettempdir()) for path in moved.values())
    monkeypatch.setenv("HOME", tempfile.gettempdir())
    assert writable_caches() == {}
