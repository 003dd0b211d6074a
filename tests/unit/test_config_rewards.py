"""What the checks of a config say about reward functions and reward models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from r3.config import Config
from r3.extras import planner
from r3.models.shape import ModelShape
from r3.rewards import REWARDS
from r3.tools.planning import memory_plan as plan
from tests.families import classifier
from tests.rows import write
from tests.settings import changed, found, found_in_files
from tests.tiny import edit_json, tiny_config


@pytest.mark.parametrize(
    ("functions", "rule"),
    [
        (["gsm8k", "env"], "'env': is no function that scores a response"),
        (["row"], "'row': is no function that scores a response"),
        (["gsm8k", "math2"], "'math2': is neither a built-in reward nor"),
        (["missing.py:f"], "there is no file missing.py"),
        (["gsm8k", "gsm8k"], "rows cannot tell two functions named gsm8k apart"),
    ],
)
@pytest.mark.parametrize("setting", ["reward.function", "eval.function"])
def test_functions_that_rows_may_name(setting: str, functions: list[str], rule: str) -> None:
    text = found({setting: "row", "reward.row_functions": functions})["reward.row_functions"]
    assert rule in text


def test_functions_that_rows_name_need_their_settings() -> None:
    values = {"reward.function": "row", "reward.row_functions": ["http", "model"]}
    assert {"reward.url", "reward.model", "reward.model_path"} <= found(values).keys()


@pytest.mark.parametrize(
    ("changes", "lacking", "rule"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "", "checkpoint of LlamaForCausalLM, not of a"),
        ({"id2label": {"0": "bad", "1": "good"}}, "", "has 2 labels, and a reward is one number"),
        ({"id2label": None}, "", "has 2 labels"),  # transformers' default
        ({}, "config.json", "its config.json cannot be read"),
        ({}, "model.safetensors", "there are no *.safetensors files"),
        ({}, "chat_template.jinja", "no tokenizer.json with a chat template"),
    ],
)
def test_a_reward_model_must_give_one_number(
    tmp_path: Path, changes: dict[str, Any], lacking: str, rule: str
) -> None:
    path = classifier(tmp_path)
    edit_json(path / "config.json", **changes)
    if lacking:
        (path / lacking).unlink()
    settings = {"reward.function": "model", "reward.model_path": str(path)}
    assert rule in found(settings)["reward.model_path"]


def test_a_reward_model_lies_on_the_ranks_that_judge(tmp_path: Path) -> None:
    settings = {"reward.function": "model", "reward.model_path": str(classifier(tmp_path))}
    assert found(settings | {"reward.model_ranks": [1, 0]}) == {}
    assert "ranks (0, 1)" in found(settings | {"reward.model_ranks": [0]})["reward.model_ranks"]
    shared = settings | {"parallel.ep": 1, "parallel.engine_tp": 2, "reward.model_ranks": [0]}
    assert found(shared) == {}


def test_a_reward_model_is_planned_where_conversations_are_generated(tmp_path: Path) -> None:
    path = classifier(tmp_path)
    settings = {"reward.function": ["gsm8k", "model"], "reward.model_path": str(path)}
    assert found(settings) == {}
    config = changed(settings, tiny_config())
    phases = plan.memory(config, ModelShape.read(config.model.path), 2)
    numbers = sum(each.size for each in load_file(path / "model.safetensors").values())
    assert phases["GENERATE"]["reward model"] == 2 * numbers  # bfloat16
    assert not any("reward model" in phases[phase] for phase in ("SYNC", "TRAIN"))


def test_a_reward_model_must_fit_beside_engine_and_policy(tmp_path: Path) -> None:
    path = classifier(tmp_path)
    # 2 MiB in bfloat16
    save_file({"score.weight": np.zeros((2**20,), np.float32)}, path / "model.safetensors")
    settings = {"reward.function": "model", "reward.model_path": str(path)}
    config = changed(settings, tiny_config())
    shape = ModelShape.read(config.model.path)
    policy = shape.num_params * 4 / 2**30
    enough = 2 * policy + config.engine.kv_cache_gib + 2 / 2**10  # policy, engine, cache, reward

    def found(config: Config, gib: float) -> list[str]:
        problems, _ = planner().memory_problems(config, shape, 1, gib)
        return [str(problem) for problem in problems]

    assert found(config, 1.01 * enough) == []
    (problem,) = found(config, 0.99 * enough)
    assert "GENERATE needs" in problem and "reward model" in problem
    assert found(tiny_config(), 0.99 * enough) == []  # without one there is room


def test_a_group_reward_needs_whole_groups(tmp_path: Path) -> None:
    functions = ("def together(responses, prompt): ...", "def single(response, prompt): ...")
    path = write(tmp_path, *functions, name="reward.py")
    budget = {"rollout.step_token_budget": 8}
    assert found_in_files({"reward.function": f"{path}:together"}) == {}
    assert found_in_files({"reward.function": f"{path}:single", **budget}) == {}
    message = found_in_files({"reward.function": f"{path}:together", **budget})["reward.function"]
    assert "rollout.step_token_budget = 8 suspends some of them. Fix: score one" in message


def test_builtin_rewards_are_those_that_exist() -> None:
    message = found({"reward.function": "x"})["reward.function"]
    words = f"use one of {', '.join(REWARDS)}, row, gym, math, http, self_judge, model, env"
    assert words in message
