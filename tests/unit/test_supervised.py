"""Rows of supervised training: assistant messages are found exactly, or refused by row."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r3 import assets, extras
from r3.checks import examine, problems, warnings
from r3.config import OF_OBJECTIVE, with_values
from r3.data import Columns, DataError, Dataset, load_prompts
from r3.models.shape import ModelShape
from r3.tools.planning.memory_plan import memory
from r3.types import Prompt, Rollout
from tests.rows import OPTIONS, write
from tests.tiny import ALONE, tiny_config, tokenizer_with

ANSWERS: dict[str, Any] = OPTIONS | {"columns": Columns(supervised=True)}
CHATS = ANSWERS | {"columns": Columns(prompt="messages", answer="", supervised=True)}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tom has 3 books."},
    {"role": "assistant", "content": "3+4=7\n#### 7"},
    {"role": "user", "content": "And Mia?"},
    {"role": "assistant", "content": "#### 2"},
    {"role": "user", "content": "Thanks."},
]

ENDS = {"role": "assistant", "content": "b<|im_end|>c"}

SFT = with_values(tiny_config(), {**OF_OBJECTIVE["sft"], "train.objective": "sft", "eval.path": ()})


def read(folder: Path, tokenizer: Any, options: dict[str, Any], row: dict[str, Any]) -> Prompt:
    """The only row of a file."""
    path = write(folder, json.dumps(row))
    (found,) = load_prompts(path, tokenizer, **options).prompts
    return found


def learned(row: Prompt) -> Rollout:
    """What a step learns of a row."""
    task: Any = SimpleNamespace(prompts=Dataset(prompts=(row,)))
    config = with_values(SFT, {"rollout.prompts_per_step": 1})
    (sample,), _ = extras.rows_of_step(task, config, ALONE, 1)
    return sample.rollout


def test_every_assistant_message_is_a_span(tokenizer: Any, tmp_path: Path) -> None:
    row = read(tmp_path, tokenizer, CHATS, {"messages": CHAT})
    texts = [tokenizer.decode(row.tokens_T[first:end]) for first, end in row.spans]
    assert texts == ["3+4=7\n#### 7<|im_end|>", "#### 2<|im_end|>"]
    assert row.spans[-1][1] == len(row.tokens_T), "nothing after the last message is kept"
    whole = tokenizer.apply_chat_template(CHAT[:5], return_dict=True)["input_ids"]
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert [*row.tokens_T, *newline] == whole, "the tokens are those of the whole text"
    places = np.flatnonzero(learned(row).loss_mask_T).tolist()
    assert places == [place for first, end in row.spans for place in range(first, end)]


def test_the_end_token_is_learned_where_it_also_pads(tmp_path: Path) -> None:
    """Labels that leave out the padding token would leave out the end of every message."""
    tokenizer = tokenizer_with()
    tokenizer.pad_token = tokenizer.eos_token
    row = read(tmp_path, tokenizer, CHATS, {"messages": CHAT})
    rollout = learned(row)
    assert rollout.tokens_T[rollout.loss_mask_T > 0].tolist().count(tokenizer.pad_token_id) == 2


@pytest.mark.parametrize("answer", ["no number", "\n\n#### 7"])
def test_an_answer_follows_the_prompt_of_rl(answer: str, tokenizer: Any, tmp_path: Path) -> None:
    """In one piece, the tokenizer may join the generation prompt's line end with the answer's."""
    given = {"question": "Tom has 3 books.", "answer": answer}
    row = read(tmp_path, tokenizer, ANSWERS, given)
    prompt = read(tmp_path, tokenizer, OPTIONS, given).tokens_T
    ((first, end),) = row.spans
    assert row.tokens_T[:first] == prompt
    assert tokenizer.decode(row.tokens_T[first:end]) == f"{answer}<|im_end|>"


@pytest.mark.parametrize(
    ("options", "row", "expected"),
    [
        (ANSWERS, {"question": "a", "answer": " "}, "answer: is empty, so there is nothing"),
        (ANSWERS, {"question": CHAT[:3], "answer": "b"}, "question: ends with an assistant messa"),
        (CHATS, {"messages": CHAT[:2]}, "messages: has no assistant message"),
        (CHATS, {"messages": "a"}, "messages: has no assistant message"),
        (CHATS, {"messages": [CHAT[1], ENDS]}, "1 holds '<|im_end|>', which ends a message"),
    ],
)
def test_rows_without_anything_to_learn_are_named(
    options: dict[str, Any], row: dict[str, Any], expected: str, tokenizer: Any, tmp_path: Path
) -> None:
    good = {"question": "a", "answer": "b", "messages": CHAT}
    path = write(tmp_path, json.dumps(good), json.dumps(row))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: ") as caught:
        load_prompts(path, tokenizer, **options)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no special token"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
            "differently once the conversation goes on",
        ),
    ],
)
def test_templates_that_hide_spans_are_refused(
    template: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"tokenizer: its chat template hides .*{expected}"):
        read(tmp_path, tokenizer_with(template), ANSWERS, {"question": "a", "answer": "b"})


def test_a_tokenizer_that_marks_the_start_of_a_text_is_refused(tmp_path: Path) -> None:
    """As Llama 2's, which puts a space in front of each text: pieces have other tokens."""
    from tokenizers.normalizers import Prepend

    tokenizer = tokenizer_with()
    tokenizer.backend_tokenizer.normalizer = Prepend("x")
    with pytest.raises(DataError, match="other tokens than the whole"):
        read(tmp_path, tokenizer, ANSWERS, {"question": "a", "answer": "b"})


def test_another_value_than_the_objective_brings_is_refused() -> None:
    others = {"algo.kl_coef": 0.1, "replay.mode": "r2", "algo.loss": "gspo", "algo.args": ("a=1",)}
    found = {each.place: str(each) for each in problems(with_values(SFT, others), 1)}
    assert found.keys() == others.keys()
    rule = "train.objective sft needs off. Fix: leave it out, or add --replay.mode off"
    assert rule in found["replay.mode"]
    assert "add --algo.args ''" in found["algo.args"]
    assert problems(SFT, 1) == []


def test_where_the_optimizer_is_matters_to_an_engine_alone() -> None:
    for name, value in {"train.optimizer": "kept", "train.optimizer_kept_gib": 1.0}.items():
        (warning,) = examine(with_values(SFT, {name: value}), 1, named=[name]).warnings
        assert warning.startswith(f"{name} = {value!r} has no effect: ") and "sampled" in warning
        evaluates = with_values(SFT, {name: value, "eval.path": tiny_config().eval.path})
        assert examine(evaluates, 1, named=[name]).warnings == ()
    streamed = {"train.optimizer": "streamed", "train.optimizer_kept_gib": 1.0}
    assert examine(with_values(SFT, streamed), 1, named=streamed).warnings == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("algo.dynamic_sampling_metric", "reward"), ("rollout.max_response_tokens", 24)]
    + [("reward.weights", (0.5,)), ("env.max_turns", 3)],
)
def test_a_setting_of_what_is_sampled_has_no_effect(name: str, value: object) -> None:
    text = "\n".join(warnings(with_values(SFT, {name: value}), 1))
    assert f"{name} = {value!r} has no effect" in text


def test_a_length_that_divides_the_loss_has_an_effect() -> None:
    divides = with_values(SFT, {"algo.aggregation": "constant"})
    text = "\n".join(warnings(with_values(divides, {"rollout.max_response_tokens": 24}), 1))
    assert "rollout.max_response_tokens" not in text


def test_batches_need_no_equal_share_per_rank() -> None:
    assert problems(with_values(SFT, {"rollout.prompts_per_step": 3}), 2) == []
    rl = with_values(SFT, {"rollout.prompts_per_step": 3, "train.objective": "rl"})
    assert [each.place for each in problems(rl, 2)] == ["rollout.prompts_per_step"]


def test_the_memory_plan_has_no_engine_without_evaluation() -> None:
    shape = ModelShape.read(SFT.model.path)
    engine = {"engine weights", "engine buffers", "sync buffers", "KV cache"}
    plan = memory(SFT, shape, 1)
    assert all(plan[phase].get(part, 0) == 0 for phase in plan for part in engine)
    evaluated = with_values(SFT, {"eval.path": (str(assets.WORD_PROBLEMS_EVAL),)})
    assert evaluated.uses_engine
    assert memory(evaluated, shape, 1)["GENERATE"]["KV cache"] > 0
