"""Settings: fields and YAML, what may change on resume, and every rule about configs and data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from r3.assets import TINY_MOE, WORD_PROBLEMS_EVAL, WORD_PROBLEMS_TRAIN
from r3.cli import checks
from r3.cli import memory_plan as plan
from r3.config import (
    SETTINGS,
    Config,
    ConfigError,
    ParallelConfig,
    describe_fields,
    flatten,
    from_yaml,
    parse_value,
    resume_problems,
    to_yaml,
    with_values,
)
from r3.config.rules import Above, AtLeast, Between, Matches, Not, Rule, ZeroOr
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.data.sources import Columns, read_rows
from r3.models.shape import ModelShape, ShapeError, checkpoint_tensors
from tests.families import engine_sizes, family_checkpoint
from tests.tiny import tiny_config

# In float32, so that what bfloat16 adds is one setting away.
TINY = with_values(
    PRESETS["tiny"](),
    {"model.dtype": "float32", "model.fp32_head": False, "engine.dtype": "float32"},
)
DENSE = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-0.6B"])
HF_TINY = json.loads((TINY_MOE / "config.json").read_text())


TWO_SETS = [str(WORD_PROBLEMS_EVAL)] * 2
HTTP = {
    "reward.function": "http",
    "reward.url": "http://localhost:8000/v1",
    "reward.model": "grader",
}


def changed(values: dict[str, Any], config: Config = TINY) -> Config:
    """A config with some fields given as the command line or YAML gives them."""
    return with_values(config, {name: parse_value(name, value) for name, value in values.items()})


def found(values: dict[str, Any], world_size: int = 2) -> dict[str, str]:
    """Field -> message of what is wrong with `tiny` once some fields are changed."""
    problems = checks.problems(changed(values), world_size)
    return {problem.field: str(problem) for problem in problems}


# ---- the tree and its YAML


@pytest.mark.parametrize("preset", PRESETS)
def test_yaml_gives_the_same_config_back(preset: str) -> None:
    config = PRESETS[preset]()
    assert from_yaml(to_yaml(config)) == config


def test_yaml_writes_every_field_and_absent_ones_keep_their_defaults() -> None:
    text = to_yaml(Config())
    assert all(f"  {name.partition('.')[2]}: " in text for name in SETTINGS)
    assert from_yaml("train: {steps: 3}") == with_values(Config(), {"train.steps": 3})


def test_yaml_is_read_as_a_person_means_it() -> None:
    # YAML 1.1 takes 1e-4 for text and a bare off for False.
    config = from_yaml(
        "train: {lr: 1e-4}\nreplay: {mode: off}\nengine: {sleep_level: 1}\nlog: {progress: no}"
    )
    assert (config.train.lr, config.replay.mode) == (1e-4, "off")
    assert (config.engine.sleep_level, config.log.progress) == (1, False)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (tuple[str, ...], ["a.jsonl", "b c.parquet"], ("a.jsonl", "b c.parquet")),
        (tuple[str, ...], "one.jsonl", ("one.jsonl",)),
        (tuple[str, ...], "", ()),
        (tuple[str, ...], [], ()),
        (tuple[float, ...], ["0.5", 1, "1e-4"], (0.5, 1.0, 1e-4)),
        (tuple[int, ...], ("1", 2), (1, 2)),
        (tuple[bool, ...], ["true", False], (True, False)),
    ],
)
def test_a_list_field_takes_lists_one_value_and_nothing(
    kind: Any, value: object, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "train.lr", replace(SETTINGS["train.lr"], kind=kind))
    parsed = parse_value("train.lr", value)
    assert parsed == expected and [type(x) for x in parsed] == [type(x) for x in expected]  # type: ignore[attr-defined]
    config = with_values(Config(), {"train.lr": parsed})
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize("value", [["1", "x"], [1, [2]], {"a": 1}, [True], [None]])
def test_a_list_of_the_wrong_things_is_refused(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    floats = replace(SETTINGS["train.lr"], kind=tuple[float, ...])
    monkeypatch.setitem(SETTINGS, "train.lr", floats)
    with pytest.raises(ValueError, match="must be a number"):
        parse_value("train.lr", value)


def test_everything_wrong_in_a_yaml_is_said_at_once() -> None:
    text = "\n".join(
        [
            "train: {stepz: 3, lr: fast, seed: 1.5}",
            "replay: {mode: r4, reference: 2}",
            "trian: {}",
            "data: {path: 7}",
            "log: verbose",
        ]
    )
    with pytest.raises(ConfigError) as error:
        from_yaml(text)
    fields = [problem.field for problem in error.value.problems]
    assert fields == [
        "train.stepz",
        "train.lr",
        "train.seed",
        "replay.mode",
        "replay.reference",
        "trian",
        "data.path",
        "log",
    ]
    assert "did you mean train.steps" in str(error.value)
    assert "config: 8 problems" in str(error.value)


@pytest.mark.parametrize("text", ["a: [", "just words", "- 1", ""])
def test_a_yaml_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        from_yaml(text)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("train.lr", "1e-4", 1e-4),
        ("train.steps", "7", 7),
        ("log.progress", "false", False),
        ("engine.sleep_level", "2", 2),
        ("replay.mode", "r2", "r2"),
        ("data.path", "", ()),
        ("data.system_prompt", "", ""),
    ],
)
def test_text_becomes_a_value_of_the_field_type(name: str, text: str, value: object) -> None:
    parsed = parse_value(name, text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.steps", "1.5"),
        ("train.steps", True),
        ("train.lr", None),
        ("replay.mode", "r4"),
        ("log.progress", "maybe"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_value(name, value)


def test_lengths_leave_room_for_the_response() -> None:
    config = with_values(
        Config(), {"rollout.max_response_tokens": 100, "train.micro_batch_tokens": 1000}
    )
    assert config.longest_prompt(512) == 412
    assert config.longest_prompt(4096) == 900  # a sequence must fit into a micro-batch too
    short = with_values(config, {"data.max_prompt_tokens": 50})
    assert (short.longest_prompt(512), short.longest_sequence(512)) == (50, 150)
    assert with_values(config, {"engine.max_model_len": 300}).longest_prompt(512) == 200


def test_smallest_world() -> None:
    assert ParallelConfig().smallest_world == 1
    assert ParallelConfig(ep=8).smallest_world == 8
    assert ParallelConfig(tp=2, etp=1, ep=4, pp=2).smallest_world == 8


# ---- resume


def test_resuming_may_not_change_what_is_learnt() -> None:
    changes = {
        "model.path": "elsewhere",
        "data.path": "other.jsonl",
        "rollout.prompts_per_step": 32,
        "rollout.group_size": 4,
        "algo.clip_high": 0.3,
        "train.seed": 1,
        "train.lr": 1e-5,
        "replay.mode": "off",
    }
    problems = resume_problems(TINY, with_values(TINY, changes))
    assert {problem.field: problem.value for problem in problems} == changes
    assert "was started with 0.0002" in str(next(p for p in problems if p.field == "train.lr"))


def test_resuming_may_change_length_layout_logging_and_memory() -> None:
    changes = {
        "train.steps": 99,
        "train.micro_batch_tokens": 2048,
        "parallel.ep": 1,
        "engine.kv_cache_gib": 0.5,
        "eval.every": 2,
        "checkpoint.every": 3,
        "log.dir": "elsewhere",
        "debug.prove_sync_every": 1,
        "model.recompute": "full",
    }
    assert resume_problems(TINY, with_values(TINY, changes)) == []


def test_the_number_of_steps_is_frozen_under_a_decaying_schedule() -> None:
    old = with_values(TINY, {"train.lr_schedule": "cosine"})
    problems = resume_problems(old, with_values(old, {"train.steps": 99}))
    assert [problem.field for problem in problems] == ["train.steps"]


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({"data.on_too_long": "drop"}, ["train.micro_batch_tokens"]),
        ({"env.name": "calculator"}, ["train.micro_batch_tokens"]),
        ({"data.on_too_long": "drop", "data.max_prompt_tokens": 100}, []),
    ],
    ids=[
        "decides which prompts are dropped",
        "decides how long a conversation may be",
        "another setting does",
    ],
)
def test_micro_batch_size_is_frozen_where_it_limits_prompts(
    settings: dict[str, object], frozen: list[str]
) -> None:
    old = with_values(TINY, {"data.max_prompt_tokens": 0, **settings})
    problems = resume_problems(old, with_values(old, {"train.micro_batch_tokens": 2048}))
    assert [problem.field for problem in problems] == frozen


def test_every_field_says_whether_it_may_change_on_resume() -> None:
    free = {name.partition(".")[0] for name, setting in SETTINGS.items() if setting.resume}
    fixed = {name.partition(".")[0] for name, setting in SETTINGS.items() if not setting.resume}
    assert free - fixed == {"parallel", "eval", "checkpoint", "log", "debug"}
    assert fixed - free == {"data", "rollout", "algo"}


# ---- rules


@pytest.mark.parametrize(
    ("preset", "world_size"), [("tiny", 2), ("tiny", 4), ("tiny-smoke", 2), ("tiny-tools", 2)]
)
def test_embedded_presets_have_no_problem_and_no_warning(preset: str, world_size: int) -> None:
    report = checks.examine(PRESETS[preset](), world_size)
    assert (report.problems, report.warnings) == ((), ())


def test_choices_of_the_algorithm_are_those_there_is_code_for() -> None:
    """r3/config imports nothing heavy, so it names them itself."""
    from r3.algo.advantage import ADVANTAGES
    from r3.algo.loss import CORRECTIONS, LOSSES

    assert set(get_args(SETTINGS["algo.advantage"].kind)) == ADVANTAGES.keys()
    assert set(get_args(SETTINGS["algo.loss"].kind)) == LOSSES.keys()
    assert set(get_args(SETTINGS["algo.correction"].kind)) == {"none", "bypass", *CORRECTIONS}


def test_reinforce_pp_needs_no_groups() -> None:
    config = with_values(TINY, {"rollout.group_size": 1, "algo.advantage": "reinforce_pp"})
    assert checks.problems(config, 2) == []


def test_every_number_has_a_rule() -> None:
    numbers = [name for name, each in SETTINGS.items() if each.kind in (int, float)]
    assert len(numbers) > 60
    # Every finite number is a reward.
    assert [name for name in numbers if not SETTINGS[name].rule] == ["env.unfinished_reward"]


@pytest.mark.parametrize(
    ("rule", "good", "bad", "words"),
    [
        (AtLeast(1), [1, 2.5], [0, -1], "must be at least 1"),
        (Above(0), [1e-9], [0, -1], "must be above 0"),
        (Between(0, 1), [0, 0.5, 1], [-0.1, 1.1], "must be between 0 and 1"),
        (Between(0, 1, exclude=(0, 1)), [0.5], [0, 1], "between 0 and 1 (0 and 1 excluded)"),
        (ZeroOr(Above(1)), [0, 2], [1, -1], "must be 0 or above 1"),
        (Not(0, "why"), [-1], [0], "must not be 0: why"),
        (Not(""), ["x"], [""], "must not be empty"),
        (Matches("[a-z]+", "lower case"), ["ab"], ["aB", ""], "must be lower case"),
    ],
    ids=str,
)
def test_a_rule_accepts_what_its_words_say(
    rule: Rule, good: list[Any], bad: list[Any], words: str
) -> None:
    assert all(map(rule.accepts, good)) and not any(map(rule.accepts, bad))
    assert words in str(rule)


def test_the_rule_at_a_field_is_the_one_that_is_checked_and_described() -> None:
    """Resume behaviour, rule, fix and help are read from the annotation, and from nowhere else."""
    setting = SETTINGS["train.steps"]
    assert setting.problem(1) is None
    assert str(setting.problem(0)) == "train.steps = 0: must be at least 1. Fix: the default is 100"
    (described,) = [each for each in describe_fields() if each.name == "train.steps"]
    assert (described.type, described.default) == ("integer", "100")
    assert (described.rule, described.resume) == (
        "must be at least 1",
        "yes, unless train.lr_schedule decays",
    )
    assert described.help.startswith("Number of steps.")


def test_every_help_text_is_a_sentence_or_several() -> None:
    """A subject, a full stop, no line that had to be cut."""
    for each in describe_fields():
        assert each.help.endswith("."), each.name
        assert not each.help[0].isspace() and len(each.help) < 330, each.name


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"rollout.group_size": 1}, "rollout.group_size", "needs at least 2"),
        ({"rollout.group_size": 1, "algo.advantage": "dr_grpo"}, "rollout.group_size", "dr_grpo"),
        ({"rollout.group_size": 0}, "rollout.group_size", "at least 1"),
        (
            {"rollout.prompts_per_step": 15},
            "rollout.prompts_per_step",
            "multiple of the 2 ranks. Fix: set it to 14 or 16",
        ),
        (
            {"train.updates_per_step": 3},
            "rollout.prompts_per_step",
            "multiple of train.updates_per_step = 3",
        ),
        ({"rollout.prompts_per_step": 8192}, "data.path", "has 4096 rows"),
        ({"rollout.temperature": 0.0}, "rollout.temperature", "above 0"),
        ({"rollout.top_p": 0.0}, "rollout.top_p", "between 0 and 1 (0 excluded)"),
        ({"rollout.top_p": 1.1}, "rollout.top_p", "between 0 and 1 (0 excluded)"),
        ({"rollout.top_k": -1}, "rollout.top_k", "at least 0"),
        ({"algo.clip_low": 1.5}, "algo.clip_low", "between 0 and 1 (0 excluded)"),
        ({"replay.plausibility": 1.5}, "replay.plausibility", "between 0 and 1: it is a fraction"),
        ({"algo.clip_high": 0.0}, "algo.clip_high", "above 0"),
        ({"algo.clip_dual": 1.0}, "algo.clip_dual", "0 or above 1"),
        ({"algo.minirl_cap": 0.5, "algo.loss": "minirl"}, "algo.minirl_cap", "at least 1"),
        ({"algo.correction_high": 0.5}, "algo.correction_high", "0 or at least 1"),
        ({"algo.correction_low": 1.0}, "algo.correction_low", "between 0 and 1 (1 excluded)"),
        ({"algo.dynamic_sampling": -1}, "algo.dynamic_sampling", "at least 0"),
        (
            {"algo.dynamic_sampling": 1, "algo.advantage": "reinforce_pp"},
            "algo.dynamic_sampling",
            "it has no groups",
        ),
        ({"rollout.step_token_budget": -1}, "rollout.step_token_budget", "at least 0"),
        ({"rollout.max_staleness": -1}, "rollout.max_staleness", "at least 0"),
        (
            {
                "algo.dynamic_sampling": 1,
                "rollout.step_token_budget": 8,
                "rollout.max_staleness": 1,
            },
            "rollout.max_staleness",
            "leaves out groups of this step by their rewards",
        ),
        ({"algo.overlong_buffer": -1}, "algo.overlong_buffer", "at least 0"),
        (
            {"algo.overlong_buffer": 41},
            "algo.overlong_buffer",
            "exceeds rollout.max_response_tokens = 40",
        ),
        ({"algo.overlong_penalty": 0.0}, "algo.overlong_penalty", "above 0"),
        (
            {"algo.loss": "minirl", "algo.correction": "token_tis"},
            "algo.correction",
            "mismatch twice",
        ),
        ({"algo.loss": "minirl", "algo.correction": "bypass"}, "algo.correction", "mismatch twice"),
        ({"algo.loss": "pg", "algo.correction": "bypass"}, "algo.correction", "pg has none"),
        ({"algo.loss": "cispo", "algo.clip_high": 4.0}, "algo.clip_low", "from above only"),
        ({"algo.kl_coef": -0.1}, "algo.kl_coef", "at least 0"),
        ({"train.lr": 0.0}, "train.lr", "above 0"),
        ({"train.lr": float("nan")}, "train.lr", "finite"),
        ({"train.lr": float("inf")}, "train.lr", "finite"),
        (
            {"train.min_lr": 1.0, "train.lr_schedule": "cosine"},
            "train.min_lr",
            "must not exceed train.lr",
        ),
        ({"train.steps": 0}, "train.steps", "at least 1"),
        ({"train.warmup_updates": -1}, "train.warmup_updates", "at least 0"),
        ({"train.logprob_chunk_tokens": -1}, "train.logprob_chunk_tokens", "at least 0"),
        ({"train.beta1": 1.0}, "train.beta1", "between 0 and 1 (1 excluded)"),
        ({"train.beta2": -0.1}, "train.beta2", "between 0 and 1 (1 excluded)"),
        ({"train.seed": -1}, "train.seed", "between 0 and 2147483647"),
        ({"train.micro_batch_tokens": 40}, "train.micro_batch_tokens", "longest sequence"),
        (
            {"data.max_prompt_tokens": 480},
            "data.max_prompt_tokens",
            "context of 512. Fix: set it to at most 472",
        ),
        ({"rollout.max_response_tokens": 512}, "rollout.max_response_tokens", "context of 512"),
        ({"engine.max_model_len": 600}, "engine.max_model_len", "context of 512"),
        ({"engine.max_model_len": 40}, "engine.max_model_len", "do not fit"),
        ({"engine.kv_cache_gib": 1e-5}, "engine.kv_cache_gib", "cannot hold one conversation"),
        ({"engine.memory_fraction": 1.0}, "engine.memory_fraction", "between 0 and 1"),
        ({"replay.min_coverage": 1.5}, "replay.min_coverage", "between 0 and 1"),
        ({"parallel.ep": 4}, "parallel.ep", "number of ranks, which is 2"),
        ({"parallel.ep": 0}, "parallel.ep", "at least 1"),
        ({"parallel.tp": 4, "parallel.ep": 1}, "parallel.tp", "number of ranks, which is 2"),
        ({"parallel.pp": 3}, "parallel.pp", "number of ranks, which is 2"),
        ({"parallel.cp": 4}, "parallel.cp", "number of ranks, which is 2"),
        ({"parallel.etp": 2}, "parallel.ep", "etp * ep * pp = 4"),
        ({"parallel.engine_tp": 3}, "parallel.engine_tp", "number of ranks, which is 2"),
        (
            {"parallel.tp": 2, "train.micro_batch_tokens": 4097, "parallel.etp": 1},
            "train.micro_batch_tokens",
            "multiple of 2",
        ),
        ({"reward.function": "gsm9k"}, "reward.function", "neither a built-in reward nor"),
        ({"reward.function": "missing.py:score"}, "reward.function", "cannot be read"),
        ({"reward.function": []}, "reward.function", "is empty"),
        ({"reward.function": ["exact", "exact"]}, "reward.function", "names a function twice"),
        ({"reward.weights": [1.0, 2.0]}, "reward.weights", "has 2 values for the 1 functions"),
        ({"reward.weights": [0.0]}, "reward.weights", "are all 0"),
        (
            {"reward.function": ["none", "exact"], "env.name": "guess_number"},
            "reward.function",
            "beside other functions",
        ),
        ({"reward.function": ["none"]}, "reward.function", "single_turn gives no reward"),
        (
            {"env.name": "calculator", "reward.function": ["env", "exact"]},
            "reward.function",
            "calculator gives no reward",
        ),
        ({"eval.function": ["env"]}, "eval.function", "single_turn gives no reward"),
        ({"reward.args": ["limit=3"]}, "reward.args", "fits 0 functions of your files"),
        ({"reward.args": ["short.limit=3"]}, "reward.args", "names short, which is not a function"),
        ({"reward.args": ["limit"]}, "reward.args", "must be key=value or FUNCTION.key=value"),
        ({"data.template_kwargs": ["tools=1"]}, "data.template_kwargs", "must be key=value, for"),
        ({"reward.workers": -1}, "reward.workers", "at least 0"),
        ({"reward.retries": -1}, "reward.retries", "at least 0"),
        ({"reward.timeout_s": 0.0}, "reward.timeout_s", "above 0"),
        ({"reward.backoff_s": -1.0}, "reward.backoff_s", "at least 0"),
        ({"reward.max_tokens": 0}, "reward.max_tokens", "at least 1"),
        ({"reward.max_connections": 0}, "reward.max_connections", "at least 1"),
        ({"reward.model_batch": 0}, "reward.model_batch", "at least 1"),
        ({"reward.model_tokens": 0}, "reward.model_tokens", "at least 1"),
        ({"reward.model_wait_s": -0.1}, "reward.model_wait_s", "at least 0"),
        (HTTP | {"reward.url": ""}, "reward.url", "must be the address of a server"),
        (HTTP | {"reward.url": "localhost:8000"}, "reward.url", "must be the address of a server"),
        (HTTP | {"reward.model": ""}, "reward.model", "is empty"),
        (HTTP | {"reward.prompt_file": "missing.txt"}, "reward.prompt_file", "cannot be read"),
        (HTTP | {"reward.prompt_file": __file__ + "/.."}, "reward.prompt_file", "cannot be read"),
        (HTTP | {"reward.pattern": "("}, "reward.pattern", "is not a regular expression"),
        (HTTP | {"reward.pattern": "score"}, "reward.pattern", "must have one group"),
        (
            {"eval.function": "http", "reward.model": "m"},
            "reward.url",
            "must be the address of a server",
        ),
        ({"reward.function": "model"}, "reward.model_path", "is not a folder"),
        ({"eval.samples": 4}, "eval.samples", "are identical"),
        ({"eval.name": "a/b"}, "eval.name", "made of letters, digits"),
        ({"eval.path": "missing.jsonl"}, "eval.path", "no such file"),
        (
            {"eval.path": TWO_SETS},
            "eval.name",
            "each of the 2 sets differently. Fix: add --eval.name set1 set2",
        ),
        (
            {"eval.path": TWO_SETS, "eval.name": ["a", "a"]},
            "eval.name",
            "each of the 2 sets differently",
        ),
        ({"eval.name": ["a", "b"]}, "eval.name", "has 2 values for the 1 paths"),
        (
            {"eval.path": TWO_SETS, "eval.name": ["a", "b"], "eval.samples": [1, 1, 1]},
            "eval.samples",
            "has 3 values for the 2 paths of eval.path. Fix: give one per set, or one for all",
        ),
        ({"eval.max_prompts": []}, "eval.max_prompts", "has 0 values"),
        (
            {
                "eval.path": TWO_SETS,
                "eval.name": ["a", "b"],
                "eval.samples": [1, 4],
                "eval.temperature": [1, 0],
            },
            "eval.samples",
            "are identical",
        ),
        (
            {"eval.samples": 4, "eval.temperature": 1, "eval.pass_at": [1, 8]},
            "eval.pass_at",
            "pass@8 needs as many samples, and eval.samples is 4",
        ),
        ({"eval.pass_at": [0]}, "eval.pass_at", "at least 1"),
        ({"eval.top_p": [1.5]}, "eval.top_p", "between 0 and 1 (0 excluded)"),
        ({"eval.temperature": [float("nan")]}, "eval.temperature", "finite"),
        ({"eval.max_tokens": 512}, "eval.max_tokens", "context of 512"),
        ({"eval.function": "gsm9k"}, "eval.function", "neither a built-in reward nor"),
        (
            {"eval.env": "chess"},
            "eval.env",
            "there is no such environment. Fix: use one of single_turn",
        ),
        ({"eval.env": "missing.py:Env"}, "eval.env", "cannot be read"),
        ({"eval.env": ["single_turn", "calculator"]}, "eval.env", "has 2 values for the 1 paths"),
        ({"eval.function": "gym"}, "eval.function", "scores only tasks of reasoning-gym"),
        ({"reward.function": "gym", "eval.path": ""}, "reward.function", "and {train} is none"),
        ({"eval.path": "", "eval.only": True}, "eval.only", "nothing to evaluate"),
        ({"data.weights": [1.0, 2.0]}, "data.weights", "has 2 values for the 1 paths"),
        ({"data.weights": [0.0]}, "data.weights", "above 0"),
        ({"data.path": ""}, "data.path", "is empty"),
        ({"data.path": "missing.jsonl"}, "data.path", "no such file"),
        ({"model.path": ""}, "model.path", "is empty"),
        ({"model.path": "Qwen/Qwen3-30B-A3B"}, "model.path", "hf download Qwen/Qwen3-30B-A3B"),
    ],
)
def test_one_bad_setting_is_one_problem(values: dict[str, Any], field: str, rule: str) -> None:
    problems = found(values)
    assert list(problems) == [field]
    message = problems[field]
    assert rule.replace("{train}", str(WORD_PROBLEMS_TRAIN)) in message
    assert message.startswith(f"{field} = ") and ". Fix: " in message


def test_expert_parallelism_must_divide_the_experts() -> None:
    assert (
        "divide the model's 8 experts"
        in found({"parallel.ep": 16, "rollout.prompts_per_step": 16}, 16)["parallel.ep"]
    )


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"parallel.tp": 8}, "parallel.tp", "4 attention heads"),
        ({"parallel.tp": 4}, "parallel.tp", "2 key-value heads"),
        ({"parallel.pp": 8}, "parallel.pp", "8 chunks of a model of 4 layers: each needs a layer"),
        ({"parallel.pp": 2, "parallel.vpp": 3}, "parallel.vpp", "6 chunks of a model of 4 layers"),
        (
            {"parallel.vpp": 2},
            "parallel.vpp",
            "interleaves the stages of a pipeline, and parallel.pp is 1",
        ),
        ({"parallel.vpp": 0}, "parallel.vpp", "at least 1"),
        (
            {"parallel.pp": 2, "parallel.pp_layers": (3, 2)},
            "parallel.pp_layers",
            "add up to the model's 4",
        ),
        (
            {"parallel.pp": 2, "parallel.pp_layers": (4, 0)},
            "parallel.pp_layers",
            "2 positive numbers",
        ),
        (
            {"parallel.pp": 2, "parallel.vpp": 2, "parallel.pp_layers": (2, 2)},
            "parallel.pp_layers",
            "4 positive",
        ),
        ({"parallel.pp_layers": (2, 2)}, "parallel.pp_layers", "1 positive numbers"),
        ({"parallel.etp": 128}, "parallel.etp", "width of 64"),
        ({"parallel.engine_tp": 8}, "parallel.engine_tp", "4 attention heads"),
        (
            {"parallel.tp": 2, "parallel.etp": 1, "model.experts": "sequential"},
            "parallel.etp",
            "never reduce their gradients",
        ),
    ],
)
def test_sizes_must_divide_what_they_cut(values: dict[str, Any], field: str, rule: str) -> None:
    problems = found({"parallel.ep": 1, "rollout.prompts_per_step": 256, **values}, 256)
    assert rule in problems[field]


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        (
            {"ffn_size": 3070, "moe_layers": ()},
            "must divide the model's dense layers' width of 3070",
        ),
        ({"shared_ffn_size": 1022}, "must divide the model's shared experts' width of 1022"),
    ],
)
def test_tensor_parallelism_must_divide_the_widths(sizes: dict[str, Any], rule: str) -> None:
    config = with_values(TINY, {"model.path": "", "parallel.tp": 4, "parallel.etp": 1})
    shape = replace(ModelShape.read(TINY_MOE), num_heads=8, num_kv_heads=4)
    said = [str(problem) for problem in checks.examine(config, 4, shape).problems]
    assert not any("width of" in problem for problem in said)
    said = [str(problem) for problem in checks.examine(config, 4, replace(shape, **sizes)).problems]
    assert sum(rule in problem for problem in said) == 1


def test_a_dense_model_has_no_experts_to_lay_out() -> None:
    config = with_values(TINY, {"model.path": "not/downloaded", "engine.kv_cache_gib": 0.0})
    problems = checks.examine(config, 2, DENSE).problems
    assert "dense" in {problem.field: problem.rule for problem in problems}["parallel.ep"]


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("qwen3_moe", ["head_dim is 16", "the experts' width is 40", "a multiple of 32"]),
        ("moonlight", ["kv_lora_rank + qk_rope_head_dim is 40", "is 512 + 64", "width is 40"]),
    ],
)
def test_sizes_that_vllm_cannot_run_on_cpu_are_refused(
    name: str, rules: list[str], tmp_path: Path
) -> None:
    from r3.rollout.task import read_task
    from r3.runtime.device import has_gpu

    folder = family_checkpoint(tmp_path / "unfit", name)
    config = tiny_config(folder)
    message = str(ConfigError(checks.cpu_engine_problems(config, ModelShape.read(folder))))
    assert all(rule in message for rule in rules) and "run on a GPU, or" in message
    if not has_gpu():
        with pytest.raises(ConfigError, match=rules[0].replace("+", ".")):
            read_task(config)
    fit = family_checkpoint(tmp_path / "fit", name, **engine_sizes(name))
    assert checks.cpu_engine_problems(config, ModelShape.read(fit)) == []
    half = with_values(config, {"parallel.engine_tp": 4})  # 64 / 4 is no multiple of 32
    assert "on each of the 4 ranks" in str(
        checks.cpu_engine_problems(half, ModelShape.read(fit))[0]
    )


def test_many_problems_come_together() -> None:
    problems = found(
        {
            "rollout.group_size": 1,
            "rollout.prompts_per_step": 15,
            "train.lr": -1.0,
            "parallel.ep": 3,
            "engine.memory_fraction": 1.0,
            "data.path": "missing.jsonl",
            "model.path": "missing",
        }
    )
    assert problems.keys() == {
        "rollout.group_size",
        "rollout.prompts_per_step",
        "train.lr",
        "parallel.ep",
        "engine.memory_fraction",
        "data.path",
        "model.path",
    }


# ---- data sets

GOOD = '{"question": "1+1?", "answer": "#### 2"}'


@pytest.mark.parametrize(
    ("line", "where", "rule"),
    [
        ('{"question": "1+1?", "answer"', ":2'", "is not JSON"),
        ('["1+1?", "2"]', ":2'", "is a list, not an object"),
        ('{"answer": "#### 2"}', ":2:question'", "is missing; the row has answer"),
        ('{"question": "1+1?"}', ":2:answer'", "is missing"),
        ('{"question": 3, "answer": "#### 2"}', ":2:question'", "is a int, neither"),
        ('{"question": "  ", "answer": "#### 2"}', ":2:question'", "is empty"),
        ('{"question": "1+1?", "answer": 2}', ":2:answer'", "is a int, not a string"),
        ('{"question": [], "answer": "#### 2"}', ":2:question'", "is an empty list"),
        (
            '{"question": [{"role": "user"}], "answer": "#### 2"}',
            ":2:question'",
            "message 0 has no 'content'",
        ),
        ('{"question": "1+1?", "answer": "two"}', ":2:answer'", "has no '####'"),
        ('{"question": "\udcff", "answer": "#### 2"}', ":2'", "is not UTF-8 at byte 14"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(
    tmp_path: Path, line: str, where: str, rule: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join([GOOD, line, *[GOOD] * 20]), encoding="utf-8", errors="surrogateescape"
    )
    (message,) = found({"data.path": str(path)}).values()
    assert f"{path}{where}" in message and rule in message and ". Fix: " in message


def test_of_many_bad_rows_five_are_shown_and_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD, *["oops"] * 12, *[GOOD] * 20]))
    problems = checks.problems(changed({"data.path": str(path)}), 2)
    assert [problem.value for problem in problems] == [
        *(f"{path}:{line}" for line in range(2, 7)),
        str(path),
    ]
    assert problems[-1].rule == "7 more faults, 12 in all"


def test_rows_may_be_chats_and_blank_lines_still_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    chat = {"ask": [{"role": "user", "content": "1+1?"}], "gold": "2", "source": "x"}
    path.write_bytes(b"\xef\xbb\xbf" + f"{json.dumps(chat)}\n\n{json.dumps(chat)}\n".encode())
    rows, bad = read_rows(str(path), Columns(prompt="ask", answer="gold"))
    assert not bad
    assert [(row.number, row.answer, row.columns["source"]) for row in rows] == [
        (1, "2", "x"),
        (3, "2", "x"),
    ]


def test_answers_without_a_number_are_fine_for_other_rewards(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"question": "say hi", "answer": "hi"}'] * 16))
    assert found({"data.path": str(path), "reward.function": "exact", "eval.path": ""}) == {}


def test_remote_sources_are_read_when_the_run_starts() -> None:
    assert found({"data.path": ["hub:owner/name", "gym:chain_sum"], "eval.path": ""}) == {}
    assert found({"data.path": "gym:chain_sum", "reward.function": "gym", "eval.path": ""}) == {}


def test_lists_that_do_not_fit_hide_no_missing_file() -> None:
    problems = found({"eval.path": ["missing.jsonl", "absent.jsonl"]})
    assert problems.keys() == {"eval.name", "eval.path"}


def test_evaluation_alone_needs_no_training_data() -> None:
    assert found({"data.path": "", "eval.only": True}) == {}


def test_lists_of_evaluation_are_spread_over_the_sets() -> None:
    settings = changed(
        {"eval.path": ["x", "y"], "eval.name": ["a", "b"], "eval.samples": [1, 8]}
    ).eval
    first, second = settings.sets
    assert (first.path, first.name, first.samples, first.function) == ("x", "a", 1, "")
    assert (second.path, second.name, second.samples, second.temperature) == ("y", "b", 8, 0.0)
    assert changed({"eval.path": ""}).eval.sets == ()
    sets = changed(
        {"eval.path": ["x", "y", "z"], "eval.env": ["", "guess_number", "e.py:E"]}
    ).eval.sets
    training = replace(TINY.env, name="calculator", max_turns=3)
    environments = [each.environment(training) for each in sets]
    assert environments[0] == training
    assert environments[1] == replace(training, name="guess_number")
    assert environments[2] == replace(training, name="single_turn", path="e.py:E")


# ---- rewards


def classifier(folder: Path, **changes: Any) -> Path:
    """As much of a reward model as is looked at before a run."""
    from safetensors.numpy import save_file

    facts = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(facts | changes))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY_MOE / name).read_bytes())
    save_file({"score.weight": np.zeros((1, 1000), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "lacking", "rule"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "",
            "checkpoint of LlamaForCausalLM, not of a sequence",
        ),
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
    path = classifier(tmp_path, **changes)
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
    settings = {
        "reward.function": ["gsm8k", "model"],
        "reward.model_path": str(classifier(tmp_path)),
    }
    assert found(settings) == {}
    config = with_values(
        tiny_config(), {name: parse_value(name, value) for name, value in settings.items()}
    )
    phases = plan.memory(config, ModelShape.read(config.model.path), 2)
    assert phases["GENERATE"]["reward model"] == 2 * 1000  # bfloat16
    assert not any("reward model" in phases[phase] for phase in ("SYNC", "TRAIN"))


def test_a_reward_model_must_fit_beside_engine_and_policy(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = classifier(tmp_path)
    save_file(
        {"score.weight": np.zeros((2**20,), np.float32)}, path / "model.safetensors"
    )  # 2 MiB in bfloat16
    settings = {"reward.function": "model", "reward.model_path": str(path)}
    config = with_values(
        tiny_config(engine={"kv_cache_gib": 0.0, "memory_fraction": 0.5}),
        {name: parse_value(name, value) for name, value in settings.items()},
    )
    shape = ModelShape.read(config.model.path)
    policy = plan.memory(config, shape, 1)["GENERATE"]["policy weights"] / 2**30
    enough = 2 * (policy + 2 / 2**10)  # half of it is the engine's
    assert plan.reward_model_problems(config, shape, 1, 1.01 * enough) == []
    (problem,) = plan.reward_model_problems(config, shape, 1, 0.99 * enough)
    assert problem.field == "reward.model_path" and "exceed the device's" in problem.rule
    assert plan.reward_model_problems(tiny_config(), shape, 1, 0.0) == []


def test_a_config_of_before_with_one_function_still_loads() -> None:
    assert from_yaml("reward: {function: exact}").reward.function == ("exact",)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (
            "def other(response, prompt): return 1.0",
            "defines no function 'score'. Fix: it defines other",
        ),
        ("class score: ...", "defines no function 'score'"),
        ("def score(:", "is not valid Python"),
    ],
)
def test_a_reward_file_must_define_the_function(tmp_path: Path, source: str, rule: str) -> None:
    path = tmp_path / "reward.py"
    path.write_text(source)
    assert rule in found({"reward.function": f"{path}:score"})["reward.function"]


def test_a_reward_file_is_not_run_to_be_checked(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("raise SystemExit('imported')\ndef score(response, prompt): return 1.0")
    assert found({"reward.function": f"{path}:score"}) == {}


def test_builtin_rewards_are_those_that_exist() -> None:
    from r3.rewards import REWARDS
    from r3.rewards.scorer import ENVIRONMENT

    assert set(checks.BUILTIN_REWARDS) == {*REWARDS, *ENVIRONMENT, "math", "http", "model"}


# ---- checkpoints


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def with_hf(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(HF_TINY | changes))


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (without("config.json"), "no config.json"),
        (write("config.json", b"{"), "config.json is not JSON"),
        (write("config.json", b"[]"), "not a JSON object"),
        (
            with_hf(architectures=["GPT2LMHeadModel"]),
            "known are Qwen3MoeForCausalLM, Qwen3ForCausalLM",
        ),
        (with_hf(architectures=None), "architecture None is not known"),
        (with_hf(hidden_size="wide"), "hidden_size must be a positive integer, got 'wide'"),
        (
            with_hf(rope_parameters={"rope_type": "dynamic", "factor": 4.0}),
            "rope_type 'dynamic' is not supported",
        ),
        (with_hf(quantization_config={"bits": 4}), "quantization_config is not supported"),
        (with_hf(num_hidden_layers=5), "missing model.layers."),
        (
            with_hf(vocab_size=500),
            "model.embed_tokens.weight has shape (512, 128), config.json implies (500, 128)",
        ),
        (without("tokenizer.json"), "no tokenizer.json"),
        (without("chat_template.jinja"), "no chat template"),
        (without("model.safetensors"), "no *.safetensors files"),
        (
            write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
            "git-lfs pointer",
        ),
        (
            write("model.safetensors", (TINY_MOE / "model.safetensors").read_bytes()[:-1]),
            "unfinished download",
        ),
        (
            write(
                "model.safetensors.index.json",
                b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            ),
            "1 of 1 shards are missing, model-00001-of-00002.safetensors first",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], rule: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_MOE, folder)
    spoil(folder)
    problems = checks.problems(with_values(TINY, {"model.path": str(folder)}), 2)
    assert [problem.field for problem in problems] == ["model.path"]
    assert rule in str(problems[0])


def test_a_chat_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_MOE, folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "chat_template": template
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert found({"model.path": str(folder)}) == {}


def test_the_shape_names_the_tensors_of_the_shipped_checkpoint() -> None:
    shape = ModelShape.read(TINY_MOE)
    assert checkpoint_tensors(TINY_MOE) == shape.tensor_shapes
    assert shape.moe_layers == (0, 1, 2, 3)
    assert (shape.num_experts, shape.topk, shape.rope_theta) == (8, 2, 10000.0)


def test_published_sizes() -> None:
    moe = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"])
    assert moe.num_params == 30_532_122_624
    assert moe.num_expert_params == 48 * 128 * 3 * 2048 * 768
    assert DENSE.num_params == 596_049_920
    assert DENSE.moe_layers == () and DENSE.num_expert_params == 0


def test_spellings_of_config_json() -> None:
    older = {
        key: value
        for key, value in HF_TINY.items()
        if key not in ("num_local_experts", "rope_parameters")
    }
    assert ModelShape.from_hf(
        older | {"num_experts": 8, "rope_theta": 10000.0}
    ) == ModelShape.from_hf(HF_TINY)
    mixed = ModelShape.from_hf(
        HF_TINY | {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    )
    assert mixed.moe_layers == (1, 5)
    assert "model.layers.3.mlp.gate_proj.weight" in mixed.tensor_shapes
    with pytest.raises(ShapeError, match="num_experts_per_tok"):
        ModelShape.from_hf(
            {key: value for key, value in HF_TINY.items() if key != "num_experts_per_tok"}
        )


# ---- warnings


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        (
            {"train.min_lr": 1e-5},
            "train.min_lr = 1e-05 has no effect: train.lr_schedule is constant",
        ),
        (
            {"replay.mode": "off", "replay.on_missing": "live"},
            "replay.on_missing = 'live' has no effect",
        ),
        (
            {"replay.min_coverage": 0.9},
            "replay.min_coverage = 0.9 has no effect: it needs replay.mode r3",
        ),
        (
            {"replay.mode": "r2", "replay.on_missing": "live"},
            "replay.on_missing = 'live' has no effect",
        ),
        (
            {"model.fp32_head": True},
            "model.fp32_head = True has no effect: policy and engine are float32",
        ),
        (
            {"replay.mode": "r2", "replay.shadow_every": 5},
            "replay.shadow_every = 5 has no effect: replay.mode is r2",
        ),
        ({"model.dtype": "float32", "engine.dtype": "bfloat16"}, "the engine rounds every weight"),
        ({"replay.reference": True}, "replay.reference = True has no effect: algo.kl_coef is 0"),
        ({"algo.kl_estimator": "k1"}, "algo.kl_estimator = 'k1' has no effect"),
        ({"algo.kl_in": "reward"}, "algo.kl_in = 'reward' has no effect: algo.kl_coef is 0"),
        ({"algo.kl_coef": 0.1, "algo.kl_estimator": "k1"}, "no gradient on average"),
        ({"algo.kl_coef": 0.1, "algo.kl_in": "reward"}, "biased penalty"),
        ({"algo.loss": "gspo", "algo.aggregation": "sequence"}, "never clip with gspo"),
        (
            {"algo.loss": "gspo", "algo.clip_low": 3e-4, "algo.clip_high": 4e-4},
            "The paper uses sequence",
        ),
        ({"algo.loss": "cispo", "algo.clip_low": 1.0}, "algo.clip_high = 0.28 is a bound of PPO"),
        (
            {"algo.loss": "pg", "train.updates_per_step": 2},
            "all updates of a step but the first are biased",
        ),
        ({"algo.loss": "pg", "algo.clip_low": 0.1}, "algo.clip_low = 0.1 has no effect"),
        ({"algo.loss": "minirl", "algo.clip_dual": 3.0}, "algo.clip_dual = 3.0 has no effect"),
        ({"algo.minirl_cap": 3.0}, "algo.minirl_cap = 3.0 has no effect"),
        (
            {"algo.correction": "token_tis", "algo.correction_low": 0.5},
            "algo.correction_low = 0.5 has no effect",
        ),
        (
            {"algo.correction": "bypass", "algo.correction_high": 5.0},
            "algo.correction_high = 5.0 has no effect",
        ),
        ({"algo.overlong_penalty": 0.5}, "algo.overlong_penalty = 0.5 has no effect"),
        ({"rollout.max_staleness": 2}, "rollout.max_staleness = 2 has no effect"),
        (
            {"rollout.step_token_budget": 20, "rollout.max_staleness": 2},
            "no weight pi_old / mu corrects",
        ),
        ({"engine.memory_fraction": 0.3}, "engine.memory_fraction = 0.3 has no effect"),
        ({"eval.path": "", "eval.samples": 1}, "eval.every = 5 has no effect: eval.path is empty"),
        ({"train.warmup_updates": 25}, "train.lr is never reached"),
        ({"rollout.top_p": 0.9}, "mismatch metrics"),
        (
            {"eval.path": str(WORD_PROBLEMS_TRAIN)},
            "4096 of 4096 questions of eval.path are trained on as well",
        ),
    ],
)
def test_what_would_be_ignored_is_said(values: dict[str, Any], warning: str) -> None:
    config = changed(values)
    assert checks.problems(config, 2) == []
    warnings = checks.warnings(config, 2)
    assert len(warnings) == 1 and warning in warnings[0]


def test_settings_of_a_preset_without_effect_are_not_warned_of() -> None:
    config = changed({"train.min_lr": 1e-5, "algo.minirl_cap": 3.0})
    (warning,) = checks.examine(config, 2, given={"train.min_lr"}).warnings
    assert warning.startswith("train.min_lr = 1e-05 has no effect")


def test_replay_of_a_dense_model_is_a_warning() -> None:
    config = replace(PRESETS["qwen3-0.6b"](), replay=TINY.replay)
    assert any(
        "replay.mode = 'r3' has no effect" in text
        for text in checks.examine(config, 1, DENSE).warnings
    )
    assert checks.examine(PRESETS["qwen3-0.6b"](), 1, DENSE).warnings == ()


def test_r2_with_one_update_is_nothing_to_warn_of() -> None:
    assert checks.warnings(with_values(TINY, {"replay.mode": "r2"}), 2) == []


def test_flatten_names_every_field() -> None:
    assert flatten(Config()).keys() == SETTINGS.keys()
