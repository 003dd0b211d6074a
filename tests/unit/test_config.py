"""Every rule about combinations of settings, and every warning; test_config_*.py have the rest."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from r3 import checks
from r3.assets import TINY_MOE, TINY_MOE_TIES, WORD_PROBLEMS_EVAL, WORD_PROBLEMS_TRAIN
from r3.config import ADVANTAGES as ADVANTAGE_NAMES
from r3.config import LOSSES as LOSS_NAMES
from r3.config import OF_OBJECTIVE, SETTINGS, Config, ConfigError, keyword_arguments, with_values
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.extras import device_problems
from r3.models.shape import ModelShape
from tests.families import engine_sizes, family_checkpoint
from tests.settings import TINY, changed, found
from tests.tables import table
from tests.tiny import tiny_config

DENSE = ModelShape.from_hf(KNOWN_SHAPES["Qwen/Qwen3-0.6B"])


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

    assert tuple(ADVANTAGES) == ADVANTAGE_NAMES and tuple(LOSSES) == LOSS_NAMES
    assert set(get_args(SETTINGS["algo.correction"].kind)) == {"none", "bypass", *CORRECTIONS}


def settings_in(text: str) -> dict[str, Any]:
    """Settings of a table: JSON with places of files in braces."""
    places = {"train": WORD_PROBLEMS_TRAIN, "eval": WORD_PROBLEMS_EVAL, "ties": TINY_MOE_TIES}
    for name, path in (places | {"here": __file__}).items():
        text = text.replace(f"{{{name}}}", str(path))
    return json.loads(text)


@pytest.mark.parametrize(("settings", "field", "rule"), table("wrong_settings"))
def test_one_bad_setting_is_one_problem(settings: str, field: str, rule: str) -> None:
    values = settings_in(settings)
    field = field or next(iter(values))
    problems = found(values)
    assert list(problems) == [field]
    message = problems[field]
    assert rule.replace("{train}", str(WORD_PROBLEMS_TRAIN)) in message
    assert message.startswith(f"{field} = ") and ". Fix: " in message


@pytest.mark.parametrize(("settings", "rule"), table("uneven_settings"))
def test_sizes_must_divide_what_they_cut(settings: str, rule: str) -> None:
    values = settings_in(settings)
    problems = found({"parallel.ep": 1, "rollout.prompts_per_step": 256, **values}, 256)
    assert rule in problems[next(iter(values))]


def refusal(config: Config, shape: ModelShape, world_size: int = 2) -> str:
    """What is said of a config with a model of this shape."""
    return str(ConfigError(checks.examine(config, world_size, shape).problems))


def refusal_on_cpu(config: Config, folder: Path) -> str:
    """What is said of a model that vLLM would run on CPU."""
    return str(ConfigError(device_problems(config, ModelShape.read(folder), is_cuda=False)))


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({}, ""),
        ({"ffn_size": 3070, "moe_layers": ()}, "dense layers' width of 3070"),
        ({"shared_ffn_size": 1022}, "shared experts' width of 1022"),
    ],
)
def test_tensor_parallelism_must_divide_the_widths(sizes: dict[str, Any], what: str) -> None:
    config = with_values(TINY, {"model.path": "", "parallel.tp": 4, "parallel.etp": 1})
    shape = replace(ModelShape.read(TINY_MOE), num_heads=8, num_kv_heads=4, **sizes)
    said = refusal(config, shape, 4)
    assert said.count(f"must divide the model's {what}") == said.count("width of") == bool(what)


def test_a_dense_model_has_no_experts_to_lay_out() -> None:
    config = with_values(TINY, {"model.path": "not/downloaded", "engine.kv_cache_gib": 0.0})
    problems = checks.examine(config, 2, DENSE).problems
    assert "dense" in {problem.place: problem.rule for problem in problems}["parallel.ep"]


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
    from r3.rollout import read_task
    from r3.runtime.device import has_gpu

    folder = family_checkpoint(tmp_path / "unfit", name)
    config = tiny_config(folder)
    message = refusal_on_cpu(config, folder)
    assert all(rule in message for rule in rules) and "run on a GPU, or" in message
    if not has_gpu():
        with pytest.raises(ConfigError, match=rules[0].replace("+", ".")):
            read_task(config)
    fit = family_checkpoint(tmp_path / "fit", name, **engine_sizes(name))
    assert device_problems(config, ModelShape.read(fit), is_cuda=False) == []
    half = with_values(config, {"parallel.engine_tp": 4})  # 64 / 4 is no multiple of 32
    assert "on each of the 4 ranks" in refusal_on_cpu(half, fit)


def test_what_vllm_lacks_for_gated_delta_layers_on_cpu_is_refused(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "next", "qwen3_next", linear_key_head_dim=12)
    config = tiny_config(folder)
    message = refusal_on_cpu(config, folder)
    assert "linear_key_head_dim is 12" in message and "it is 64 or 128" in message
    assert "gated delta layers on CPU in bfloat16 only" in message
    half = with_values(config, {"engine.dtype": "bfloat16", "model.dtype": "bfloat16"})
    for name in ("qwen3_next", "qwen3_5_moe"):
        fit = family_checkpoint(tmp_path / name, name, **engine_sizes(name))
        assert device_problems(half, ModelShape.read(fit), is_cuda=False) == []


@pytest.mark.parametrize("name", ["tp", "cp"])
def test_gated_delta_layers_are_not_divided(name: str, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "next", "qwen3_next")
    config = with_values(tiny_config(folder), {f"parallel.{name}": 2})
    message = refusal(config, ModelShape.read(folder))
    assert f"parallel.{name} = 2" in message and "gated delta layers are not divided" in message


def test_sparse_attention_is_plain_up_to_index_topk_and_refused_beyond(tmp_path: Path) -> None:
    """The published limit is 2,048 tokens; that of this model is 128, its context 256."""
    folder = family_checkpoint(tmp_path / "dsa", "glm-5")
    shape = ModelShape.read(folder)
    for values, said in (
        ({"rollout.max_response_tokens": 128}, "context of 128 tokens (index_topk: R3 has no"),
        ({"data.max_prompt_tokens": 105}, "105 prompt + 24 response tokens exceed the model's"),
        ({"engine.max_model_len": 129}, "exceeds the model's context of 128 tokens (index_topk"),
        ({"eval.max_tokens": (128,)}, "context of 128 tokens (index_topk"),
    ):
        assert said in refusal(with_values(tiny_config(folder), values), shape), values
    fits = with_values(tiny_config(folder), {"data.max_prompt_tokens": 104})
    assert checks.examine(fits, 2, shape).problems == ()

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = torch.arange(3, 43)[None]

    def logits(index_topk: int) -> Any:
        config = AutoConfig.from_pretrained(folder, index_topk=index_topk)
        model = AutoModelForCausalLM.from_pretrained(folder, config=config)
        with torch.no_grad():
            return model(tokens).logits[0]

    whole, same, sparse = logits(128), logits(40), logits(12)
    assert torch.equal(whole, same), "the indexers have no part in it"
    # Control: what is refused is another attention, after the tokens that it sees whole.
    # Before them float32 rounding alone: attention with a mask may take another kernel.
    parts = (whole - sparse).abs()
    assert parts[:12].max() < 1e-5 and parts[12:].max() > 1e-2


def test_windows_and_biased_experts_are_not_divided(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "oss", "gpt_oss", **engine_sizes("gpt_oss"))
    shape, config = ModelShape.read(folder), tiny_config(folder)
    for changes, said in (
        ({"parallel.cp": 2}, "parallel.cp = 2: must be 1: windows of attention"),
        ({"parallel.tp": 2}, "parallel.etp = 2: experts with biases are whole on a rank"),
        ({"model.experts": "fused"}, "model.experts = 'fused': only grouped experts have biases"),
    ):
        assert said in refusal(with_values(config, changes), shape)
    fine = with_values(config, {"parallel.tp": 2, "parallel.etp": 1, "parallel.ep": 2})
    assert checks.examine(fine, 2, shape).problems == ()
    assert "attention with sinks on CPU in bfloat16 only" in refusal_on_cpu(config, folder)


def test_lists_that_do_not_fit_hide_no_missing_file() -> None:
    problems = found({"eval.path": ["missing.jsonl", "absent.jsonl"]})
    assert problems.keys() == {"eval.name", "eval.path"}


def test_lists_of_evaluation_are_spread_over_the_sets() -> None:
    values = {"eval.path": ["x", "y"], "eval.name": ["a", "b"], "eval.samples": [1, 8]}
    first, second = changed(values).eval.sets
    assert (first.path, first.name, first.samples, first.function) == ("x", "a", 1, "")
    assert (second.path, second.name, second.samples, second.temperature) == ("y", "b", 8, 0.0)
    assert changed({"eval.path": ""}).eval.sets == ()
    values = {"eval.path": ["x", "y", "z"], "eval.env": ["", "guess_number", "e.py:E"]}
    training = replace(TINY.env, name="calculator", max_turns=3)
    assert [each.environment(training) for each in changed(values).eval.sets] == [
        training,
        replace(training, name="guess_number"),
        replace(training, name="single_turn", path="e.py:E"),
    ]


def test_arguments_of_environments_belong_to_their_sets() -> None:
    values = {"eval.path": ["x", "y", "z"], "eval.name": ["easy", "hard.2", "game"]}
    values |= {"eval.env_args": ["limit=3", "hard.2.limit=9", "game.text=a.b=c"]}
    sets = changed(values | {"eval.env": ["", "", "e.py:E"]}).eval.sets
    training = replace(TINY.env, path="t.py:T", args=("limit=1", "mode=2"))
    found = [keyword_arguments(each.environment(training).args) for each in sets]
    assert found[0] == {"limit": 3, "mode": 2}
    assert found[1] == {"limit": 9, "mode": 2}
    assert found[2] == {"limit": 3, "text": "a.b=c"}, "another class: not those of training"
    plain = replace(sets[0], env_args=())
    assert plain.environment(training) == training


@pytest.mark.parametrize(("settings", "said"), table("ignored_settings"))
def test_what_would_be_ignored_is_said(settings: str, said: str) -> None:
    values = settings_in(settings)
    config = changed(values)
    assert checks.problems(config, 2) == []
    (warning,) = checks.examine(config, 2, named=values.keys()).warnings
    assert said in warning
    assert "has no effect" not in said or warning.startswith(f"{next(iter(values))} = ")


def test_a_warm_up_of_all_updates_ends_at_the_learning_rate() -> None:
    from r3.policy import learning_rate  # imports Megatron-Core

    for warmup, reaches in ((25, True), (26, False)):
        train = changed({"train.warmup_updates": warmup}).train
        last = learning_rate(train.total_updates - 1, train.total_updates, train)
        assert (last == train.lr) == reaches
        notes = checks.examine(changed({"train.warmup_updates": warmup}), 2).warnings
        assert any("train.lr is never reached" in note for note in notes) != reaches


def test_settings_of_a_preset_without_effect_are_not_warned_of() -> None:
    config = changed({"train.min_lr": 1e-5, "algo.minirl_cap": 3.0})
    (warning,) = checks.examine(config, 2, named={"train.min_lr"}).warnings
    assert warning.startswith("train.min_lr = 1e-05 has no effect")


def test_replay_of_a_dense_model_is_a_warning() -> None:
    config = replace(PRESETS["qwen3-0.6b"](), replay=TINY.replay)
    warnings = checks.examine(config, 1, DENSE).warnings
    assert "replay.mode = 'r3' has no effect" in "\n".join(warnings)
    assert checks.examine(PRESETS["qwen3-0.6b"](), 1, DENSE).warnings == ()


def test_settings_of_replay_mean_nothing_to_a_dense_model() -> None:
    given = {"replay.shadow_every": 5, "replay.plausibility": 0.1, "replay.on_missing": "live"}
    config = changed(given, PRESETS["qwen3-0.6b"]())
    found = checks.examine(config, 1, DENSE, named=given).warnings
    ends = [text for text in found if text.endswith("has no effect: the model is dense")]
    assert sorted(text.split()[0] for text in ends) == sorted(given) and len(found) == 3


def test_a_rank_of_experts_means_nothing_to_a_dense_model() -> None:
    given = {"lora.rank": 8, "lora.expert_rank": 2}
    config = changed(given, PRESETS["qwen3-0.6b"]())
    (warning,) = checks.examine(config, 1, DENSE, named=given).warnings
    assert warning == "lora.expert_rank = 2 has no effect: the model is dense"


# Bounds of a ratio that moves, one update, KL taken from rewards that are not divided, no groups,
# adapters, functions and metrics that there are, one turn, learned rows, what is evaluated.
WITH_EFFECT: list[dict[str, Any]] = [
    {"algo.clip_high": 0.4, "algo.clip_dual": 3.0, "train.updates_per_step": 2},
    {"algo.clip_high": 0.4, "algo.correction": "bypass"},
    {"algo.loss": "cispo", "algo.clip_low": 1.0, "algo.clip_high": 4.0}
    | {"train.updates_per_step": 2},
    {"algo.kl_coef": 0.1, "algo.kl_in": "reward", "algo.kl_estimator": "k1"}
    | {"algo.advantage": "dr_grpo", "replay.reference": True},
    {"rollout.group_size": 1, "algo.advantage": "reinforce_pp"},
    {"lora.rank": 8},
    {"reward.function": ["exact", "gsm8k"], "reward.correct": "gsm8k"},
    {"checkpoint.keep_best": "eval/heldout/accuracy", "train.patience": 2},
    {"replay.mode": "r2", "train.epochs_per_step": 2},
    {"replay.mode": "r2", "replay.reference": True, "algo.kl_coef": 0.1},
    {"env.max_turn_tokens": 8},
    {"rollout.top_p": 0.9, "rollout.top_k": 20},
    {"eval.path": "", "env.name": "calculator", "train.objective": "sft"} | OF_OBJECTIVE["sft"],
    {"eval.only": True, "data.system_prompt": "Think.", "eval.max_prompts": 8, "train.seed": 3}
    | {"rollout.max_response_tokens": 30, "train.micro_batch_tokens": 2048},
]


@pytest.mark.parametrize("values", WITH_EFFECT)
def test_settings_with_an_effect_are_nothing_to_warn_of(values: dict[str, Any]) -> None:
    report = checks.examine(changed(values), 2, named=values.keys())
    assert (report.problems, report.warnings) == ((), ())
