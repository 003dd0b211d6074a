"""Settings: fields, rules, YAML, and what may change on resume."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from r3.checks import problems
from r3.config import (
    SETTINGS,
    Config,
    ConfigError,
    Problem,
    Setting,
    argument_value,
    fixed_changes,
    from_yaml,
    help_of,
    keyword_arguments,
    load_yaml,
    nearest_settings,
    other_run,
    parse_value,
    read_values,
    to_yaml,
    values_of,
    with_values,
)
from r3.configs import PRESETS
from r3.tools.beside.notes import conditions
from tests.errors import Patch
from tests.settings import TINY


@pytest.mark.parametrize("preset", PRESETS)
def test_yaml_gives_the_same_config_back(preset: str) -> None:
    config = PRESETS[preset]()
    assert from_yaml(to_yaml(config)) == config


def test_yaml_writes_every_field_and_absent_ones_keep_their_defaults() -> None:
    text = to_yaml(Config())
    assert all(f"  {name.partition('.')[2]}: " in text for name in SETTINGS)
    assert from_yaml("train: {steps: 3}") == with_values(Config(), {"train.steps": 3})


def test_yaml_is_read_as_a_person_means_it() -> None:
    # YAML 1.1 takes 1e-4 for text, 010 for eight, 1:30 for ninety and a bare off for False.
    config = from_yaml(
        "train: {lr: 1e-4, steps: 010}\nreplay: {mode: off}\nengine: {sleep_level: 1}\n"
        "log: {progress: no, tensorboard: on, project: 2024-01-01}\nreward: {pattern: 1:30}"
    )
    assert (config.train.lr, config.train.steps, config.replay.mode) == (1e-4, 10, "off")
    assert (config.engine.sleep_level, config.log.progress) == (1, False)
    assert (config.log.tensorboard, config.log.project) == (True, "2024-01-01")
    assert config.reward.pattern == "1:30"


def test_sections_and_full_names_are_the_same() -> None:
    nested, flat = {"train": {"lr": "1e-4"}}, {"train.lr": "1e-4"}
    assert read_values(nested, [], []) == read_values(flat, [], []) == {"train.lr": 1e-4}
    expected = with_values(Config(), {"train.lr": 0.0001, "train.steps": 3})
    assert from_yaml("train.lr: 1e-4\ntrain: {steps: 3}") == expected
    problems: list[Problem] = []
    read_values({**nested, **flat, "lr": 1, "trian": {}}, problems, [])
    assert [problem.place for problem in problems] == ["train.lr", "lr", "trian"]
    assert "given twice" in problems[0].rule and "did you mean train.lr?" in problems[1].fix


@pytest.mark.parametrize(
    ("text", "field", "lines"),
    [
        ("train: {lr: 1}\nlog: {}\ntrain: {steps: 2}\n", "train", "1 and 3"),
        ("train:\n  lr: 1\n  steps: 2\n  lr: 3\n", "train.lr", "2 and 4"),
        ("train.lr: 1\ntrain:\n  lr: 1\n", "train.lr", "1 and 3"),
        ("base: tiny\nbase: tiny\n", "base", "1 and 2"),
    ],
)
def test_a_key_given_twice_is_refused_with_its_lines(text: str, field: str, lines: str) -> None:
    with pytest.raises(ConfigError, match=f"given twice in my.yaml, in lines {lines}") as error:
        load_yaml(text, "my.yaml")
    assert error.value.problems[0].place == field
    merged = load_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", "my.yaml")
    assert merged["b"] == {"x": 3, "y": 2}  # a merge key is there to be replaced


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("data: {}\n{}system_prompt: Answer after #### please", "Answer after"),
        ("data:\n  system_prompt: #### first", ""),
        ("env:\n  stop:\n  - ### \n", ""),
        ("data:\n  path: rows.jsonl  # mine", None),
        ("data:\n  system_prompt: 'Answer after #### please'  # as gsm8k has it", None),
        ("train:\n  lr: 1e-4 # as in the paper", None),
    ],
)
def test_a_text_that_a_comment_cuts_is_said(text: str, cut: str | None) -> None:
    notes: list[str] = []
    load_yaml(text.replace("{}\n{}", "\n  "), "my.yaml", notes)
    assert len(notes) == (cut is not None)
    assert cut is None or f" is {cut!r}: ' #' begins a comment" in notes[0]


@pytest.mark.parametrize("none", [None, "none", "None", "null"])
def test_none_is_the_empty_text_unless_it_is_a_value(none: object) -> None:
    notes: list[str] = []
    given = {"data.system_prompt": none, "eval.path": none, "data.answer_key": "answer"}
    values = read_values(given, [], notes)
    assert values == {"data.system_prompt": "", "eval.path": (), "data.answer_key": "answer"}
    assert notes[0] == f"data.system_prompt {none}: read as empty, not as the text '{none}'"
    assert len(notes) == 2
    given = {"eval.system_prompt": ["be brief", none], "reward.function": none}
    notes.clear()
    values = read_values({**given, "log.tracker": none}, [], notes)
    assert values.pop("log.tracker") == "none" and not notes
    assert values == {"eval.system_prompt": ("be brief", "none"), "reward.function": ("none",)}
    with pytest.raises(ValueError, match="must be text"):
        parse_value("data.path", ["a.jsonl", None])


def test_paths_have_home_and_variables_filled_in(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/big/data")
    monkeypatch.setenv("EMPTY", "")
    paths = ["~/a.jsonl", "$DATA/b", "${DATA}s/c.jsonl:train", "hub:o/n", "gym:chain_sum,size=2"]
    filled = ("/home/me/a.jsonl", "/big/data/b", "/big/datas/c.jsonl:train", *paths[3:])
    assert parse_value("data.path", paths) == filled
    assert parse_value("log.dir", Path("~/runs")) == "/home/me/runs"
    assert parse_value("reward.function", "~/f.py:g") == ("/home/me/f.py:g",)
    assert parse_value("data.system_prompt", "~ $DATA") == "~ $DATA"  # no path
    for wrong in ("$NOT_SET/x", "${EMPTY}/x", "${DATA:-x}", "~nobody-of-this-name/x"):
        with pytest.raises(ValueError, match=r"not set|is not|no home folder"):
            parse_value("log.dir", wrong)
    (tmp_path / "$NOT_SET").mkdir()
    assert parse_value("log.dir", "$NOT_SET") == "$NOT_SET"  # a folder of this very name


@pytest.mark.parametrize("text", ["1e5", "010", "off", "1:30", "0o17", "2024-01-01", "~", "a #b"])
def test_texts_that_look_like_values_are_written_in_quotes(text: str) -> None:
    config = with_values(Config(), {"log.project": text})
    assert from_yaml(to_yaml(config)) == config
    assert yaml.safe_load(to_yaml(config))["log"]["project"] == text  # YAML 1.1


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
    kind: Any, value: object, expected: object, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(SETTINGS, "train.lr", replace(SETTINGS["train.lr"], kind=kind))
    parsed = parse_value("train.lr", value)
    assert parsed == expected and [type(x) for x in parsed] == [type(x) for x in expected]  # type: ignore[attr-defined]
    config = with_values(Config(), {"train.lr": parsed})
    assert from_yaml(to_yaml(config)) == config


def test_everything_wrong_in_a_yaml_is_said_at_once() -> None:
    text = "train: {stepz: 3, lr: fast, seed: 1.5}\nreplay: {mode: r4, reference: 2}\n"
    text += "trian: {}\ndata: {path: 7}\nlog: verbose"
    with pytest.raises(ConfigError) as error:
        from_yaml(text)
    fields = [problem.place for problem in error.value.problems]
    wrong = "train.stepz train.lr train.seed replay.mode replay.reference trian data.path log"
    assert fields == wrong.split()
    assert "did you mean train.steps" in str(error.value)
    assert "config: 8 problems" in str(error.value)


def test_names_of_trl_and_verl_have_advice() -> None:
    advice = {
        "train.learning_rate": "train.lr",
        "actor_rollout_ref.rollout.n": "rollout.group_size",
        "save_total_limit": "checkpoint.keep",
        "use_dynamic_bsz": "train.micro_batch_tokens",
        "train.temperature": "rollout.temperature or eval.temperature",
    }
    for theirs, ours in advice.items():
        assert nearest_settings(theirs) == f"did you mean {ours}?"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("train.lr", "1e-4", 1e-4), ("train.steps", "7", 7), ("log.progress", "false", False)),
        *(("engine.sleep_level", "2", 2), ("replay.mode", "r2", "r2")),
        *(("data.path", "", ()), ("data.system_prompt", "", "")),
    ],
)
def test_text_becomes_a_value_of_the_field_type(name: str, text: str, value: object) -> None:
    parsed = parse_value(name, text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("train.steps", "1.5"), ("train.steps", True), ("train.lr", None)),
        *(("replay.mode", "r4"), ("log.progress", "maybe")),
        *(("reward.weights", each) for each in (["1", "x"], [1, [2]], {"a": 1}, [True], [None])),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_value(name, value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("true", True), ("True", True), ("False", False), ("None", None), ("null", None)),
        *(("3", 3), ("+3", 3), (".5", 0.5), ("1.", 1.0), ("1e-4", 1e-4), ("[1, 'a']", [1, "a"])),
        *(("{'a': True}", {"a": True}), ('"True"', "True"), ("007", "007"), ("1_0", "1_0")),
        *(("none of these", "none of these"), ("{question}", "{question}"), ("", "")),
    ],
)
def test_an_argument_is_read_as_json_or_python(text: str, value: object) -> None:
    found = argument_value(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("items", "rule"),
    [
        *(([f"n={n}"], "is not a finite number") for n in ("NaN", "nan", "-Infinity", "1e999")),
        (["n=[1, NaN]"], "is not a finite number"),
        (['n={"a": 1, "a": 2}'], "has 'a' twice"),
        (["a=1", "b=2", "a=3"], "a is given twice, before as a=1"),
    ],
)
@pytest.mark.parametrize("name", ["env.args", "reward.args", "algo.args", "eval.env_args"])
def test_an_argument_without_meaning_is_refused(name: str, items: list[str], rule: str) -> None:
    problem = SETTINGS[name].problem(tuple(items))
    assert problem and problem.value == items[-1] and rule in problem.rule
    assert SETTINGS[name].problem(tuple(items[:-1])) is None
    assert SETTINGS[name].problem(('n="nan"',)) is None


MAPPING = {"limit": 3, "scale": 0.5, "loud": True, "nothing": None, "word": "a b", "digits": "07"}
MAPPING |= {"number": "7", "yes": "true", "list": [1, "a"], "deep": {"a": [None]}, "empty": ""}


@pytest.mark.parametrize(
    "name", ["env.args", "reward.args", "algo.args", "eval.env_args", "data.template_kwargs"]
)
def test_arguments_may_be_a_mapping(name: str) -> None:
    assert keyword_arguments(parse_value(name, MAPPING)) == MAPPING
    # args: [limit: 3, word=x]
    assert parse_value(name, [{"limit": 3}, "word=x"]) == ("limit=3", "word=x")
    section, key = name.split(".")
    text = f"{section}:\n  {key}: {{bonus: 1.0, word: off}}"
    assert values_of(load_yaml(text, "f"))[name] == ("bonus=1.0", "word=off")
    with pytest.raises(ValueError, match="when is of type set; use numbers, texts"):
        parse_value(name, {"when": {1}})


def test_lengths_leave_room_for_the_response() -> None:
    sizes = {"rollout.max_response_tokens": 100, "train.micro_batch_tokens": 1000}
    config = with_values(Config(), sizes)
    assert config.longest_prompt(512) == 412
    assert config.longest_prompt(4096) == 900  # a sequence must fit into a micro-batch too
    short = with_values(config, {"data.max_prompt_tokens": 50})
    assert (short.longest_prompt(512), short.longest_sequence(512)) == (50, 150)
    assert with_values(config, {"engine.max_model_len": 300}).longest_prompt(512) == 200


# ---- resume


def test_resuming_may_not_change_what_is_learnt() -> None:
    changes: dict[str, Any] = {"model.path": "elsewhere", "data.path": "other.jsonl"}
    changes |= {"rollout.prompts_per_step": 32, "rollout.group_size": 4, "algo.clip_high": 0.3}
    changes |= {"train.seed": 1, "train.lr": 1e-5, "replay.mode": "off"}
    found = fixed_changes(TINY, with_values(TINY, changes))
    assert {name: now for name, (now, _) in found.items()} == changes
    assert "train.lr = 1e-05 (that run: 0.0002)\n" in str(other_run("runs/a", found))
    many = {f"a.b{n}": (1, 2) for n in range(14)}
    assert "and 2 more" in str(other_run("runs/a", many))


def test_resuming_may_change_length_layout_logging_and_memory() -> None:
    changes: dict[str, Any] = {"train.steps": 99, "train.micro_batch_tokens": 2048}
    changes |= {"parallel.ep": 1, "engine.kv_cache_gib": 0.5, "eval.every": 2, "log.dir": "b"}
    changes |= {"checkpoint.every": 3, "debug.prove_sync_every": 1, "model.recompute": "full"}
    assert fixed_changes(TINY, with_values(TINY, changes)) == {}


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({"train.lr_schedule": "cosine"}, ["train.steps"]),
        # Where the size of a micro-batch limits prompts.
        ({"data.on_too_long": "drop"}, ["train.micro_batch_tokens"]),
        ({"env.name": "calculator"}, ["train.micro_batch_tokens"]),
        ({"data.on_too_long": "drop", "data.max_prompt_tokens": 100}, []),
    ],
)
def test_steps_and_micro_batches_are_frozen_where_others_depend_on_them(
    settings: dict[str, object], frozen: list[str]
) -> None:
    old = with_values(TINY, {"data.max_prompt_tokens": 0, **settings})
    new = with_values(old, {"train.steps": 99, "train.micro_batch_tokens": 2048})
    assert list(fixed_changes(old, new)) == frozen


def test_every_field_says_whether_it_may_change_on_resume() -> None:
    free = {name.partition(".")[0] for name, setting in SETTINGS.items() if setting.resume}
    fixed = {name.partition(".")[0] for name, setting in SETTINGS.items() if not setting.resume}
    assert free - fixed == {"parallel", "eval", "checkpoint", "log", "debug"}
    assert fixed - free == {"data", "rollout", "algo", "lora"}


def test_what_a_setting_needs_is_a_setting_or_a_condition() -> None:
    """A word that is neither would raise an error when somebody sets the setting."""
    met = conditions(Config(), None)
    words = [(name, word) for name, each in SETTINGS.items() for word in each.needs.split()]
    assert len(words) > 150
    unknown = [each for each in words if each[1].partition("=")[0] not in {*SETTINGS, *met}]
    assert unknown == []
    unused = met.keys() - {word for _, word in words}
    assert unused == set(), "a condition that no setting names"


def test_every_number_has_a_rule() -> None:
    numbers = [name for name, each in SETTINGS.items() if each.kind in (int, float)]
    assert len(numbers) > 60
    # Every finite number is a reward.
    unruled = [name for name in numbers if not SETTINGS[name].rule]
    assert unruled == ["env.unfinished_reward", "reward.no_verdict"]


@pytest.mark.parametrize(
    ("rule", "good", "bad", "words"),
    [
        (Setting(ge=1), [1, 2.5], [0, -1, math.inf], "must be at least 1"),
        (Setting(gt=0), [1e-9], [0, -1, math.nan], "must be above 0"),
        (Setting(ge=0, le=1), [0, 0.5, 1], [-0.1, 1.1], "must be between 0 and 1"),
        (Setting(gt=0, lt=1), [0.5], [0, 1], "must be between 0 and 1 (0 and 1 excluded)"),
        (Setting(zero=True, gt=1), [0, 2], [1, -1], "must be 0 or above 1"),
        (Setting(le=1, ge=0, why="a part"), [1], [2], "must be between 0 and 1: a part"),
        (Setting(pattern="[a-z]+", words="lower case"), ["ab"], ["aB", ""], "must be lower case"),
        (Setting(kind=tuple[int, ...], ge=1), [(), (1, 2)], [(1, 0)], "must be at least 1"),
    ],
    ids=lambda each: each.rule if isinstance(each, Setting) else "",
)
def test_a_rule_accepts_what_its_words_say(
    rule: Setting, good: list[Any], bad: list[Any], words: str
) -> None:
    assert not any(map(rule.problem, good)) and all(map(rule.problem, bad))
    assert rule.rule == words


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("train.steps", True, "must be an integer"),
        ("train.steps", 1.0, "must be an integer"),
        ("train.lr", "1e-4", "must be a number"),
        ("log.progress", 1, "must be True or False"),
        ("data.path", "rows.jsonl", "must be a list (in Python, a tuple)"),
        ("data.path", (Path("rows.jsonl"),), "must be text"),
        ("engine.sleep_level", True, "must be one of 1, 2"),
        ("replay.mode", "on", "must be one of off, r2, r3"),
    ],
)
def test_sections_made_in_python_are_checked_as_well(name: str, value: object, rule: str) -> None:
    (problem,) = problems(with_values(TINY, {name: value}), 2)
    assert (problem.place, problem.rule) == (name, rule)


def test_the_rule_at_a_field_is_the_one_that_is_checked_and_described() -> None:
    """Resume behaviour, rule, fix and help are read from the annotation, and from nowhere else."""
    setting = SETTINGS["train.steps"]
    assert setting.problem(1) is None
    said = "train.steps = 0: must be at least 1. Fix: correct it; the default is 100"
    assert str(setting.problem(0)) == said
    assert (setting.type_in_words, setting.rule) == ("integer", "must be at least 1")
    assert setting.resume and "unless train.lr_schedule decays" in (setting.unless or ())
    assert help_of(setting.name).startswith("Number of steps.")


def test_every_help_text_is_a_sentence_or_several() -> None:
    """A subject, a full stop, no line that had to be cut."""
    for each in SETTINGS.values():
        text = help_of(each.name)
        assert text.endswith("."), each.name
        assert not text[0].isspace() and len(text) < 330, each.name
