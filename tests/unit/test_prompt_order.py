"""Rows become prompts or are named; their order is a pure function of seed and step."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from r3 import assets
from r3.data import Columns, DataError, Dataset, load_prompts, turns
from r3.types import Prompt
from tests.rows import OPTIONS, write
from tests.tiny import prompts_of_step, tokenizer_with

GOOD = '{"question": "Tom has 3 books. How many?", "answer": "#### 3"}'


def test_the_shipped_questions_load(tokenizer: Any) -> None:
    dataset = load_prompts(assets.WORD_PROBLEMS_EVAL, tokenizer, **OPTIONS)
    lines = assets.WORD_PROBLEMS_EVAL.read_text().splitlines()
    assert len(dataset) == len(lines)
    assert dataset.dropped_too_long == 0
    row, prompt = json.loads(lines[1]), dataset.prompts[1]
    assert prompt.id == "word_problems_eval.jsonl:2"
    assert prompt.answer == row["answer"]
    assert prompt.messages == ({"role": "user", "content": row["question"]},)
    text = f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.tokens_T) == text
    assert all(type(token) is int for token in prompt.tokens_T)


def test_what_a_row_may_be(tokenizer: Any, tmp_path: Path) -> None:
    roles = {"a": "user", "b": "assistant", "c": "user"}
    chat = [{"role": role, "content": text} for text, role in roles.items()]
    rows = [GOOD, "", json.dumps({"question": chat, "answer": "", "level": 3}), "  "]
    dataset = load_prompts(
        write(tmp_path, b"\xef\xbb\xbf" + rows[0].encode(), *rows[1:]), tokenizer, **OPTIONS
    )
    ids = [prompt.id for prompt in dataset.prompts]
    assert ids == ["rows.jsonl:1", "rows.jsonl:3"], "blank lines count"
    assert dataset.prompts[1].messages == tuple(chat)
    assert dataset.prompts[1].metadata == {"level": 3}


def test_rows_tokenised_together_get_the_tokens_of_each(tokenizer: Any, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    rows: list[dict[str, Any]] = [{"question": f"Add {n} and é.", "answer": ""} for n in range(600)]
    for number in (1, 2, 300):
        rows[number]["tools"] = [tool]
    path = write(tmp_path, *map(json.dumps, rows))
    options = OPTIONS | {"columns": Columns(tools="tools"), "max_prompt_tokens": 300}
    prompts = load_prompts(path, tokenizer, **options).prompts
    assert [prompt.id for prompt in prompts] == [f"rows.jsonl:{n + 1}" for n in range(600)]
    for row, prompt in zip(rows, prompts, strict=True):
        message = {"role": "user", "content": row["question"]}
        shown = {"tools": row.get("tools"), "add_generation_prompt": True, "return_dict": True}
        alone = tokenizer.apply_chat_template([message], **shown)["input_ids"]
        assert prompt.tokens_T == tuple(alone), prompt.id


def test_only_the_rows_that_a_template_refuses_are_named(tokenizer: Any, tmp_path: Path) -> None:
    refuses = "{% if 'no' in messages[0].content %}{{ raise_exception('not this') }}{% endif %}"
    refusing = tokenizer_with(refuses + tokenizer.chat_template)
    texts = ["a", "b", "no", "c", "d", "no", "e"]
    lines = [json.dumps({"question": text, "answer": ""}) for text in texts]
    with pytest.raises(DataError) as caught:
        load_prompts(write(tmp_path, *lines), refusing, **OPTIONS)
    assert [problem.line for problem in caught.value.problems] == [3, 6]
    for problem in caught.value.problems:
        assert problem.column == "question" and problem.rule.startswith("is refused ")
        assert "(not this)" in problem.rule


def test_all_bad_rows_are_counted_and_ten_named(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_prompts(write(tmp_path, GOOD, *["nonsense"] * 13), tokenizer, **OPTIONS)
    lines = str(caught.value).splitlines()
    assert lines[0] == "data: 13 problems"
    assert len(lines) == 1 + 10 + 1
    assert "rows.jsonl:11:" in lines[10]
    assert lines[11].endswith("and 3 more")


def test_too_long_rows_are_one_problem_naming_the_longest(tokenizer: Any, tmp_path: Path) -> None:
    long = [json.dumps({"question": "book " * n, "answer": "b"}) for n in (200, 300, 250)]
    with pytest.raises(DataError) as caught:
        load_prompts(write(tmp_path, GOOD, *long, "nonsense"), tokenizer, **OPTIONS)
    odd, problem = caught.value.problems  # what else is wrong is not hidden
    assert odd.line == 5
    path, limit = tmp_path / "rows.jsonl", OPTIONS["max_prompt_tokens"]
    assert problem.rule.startswith(
        f"3 of 4 rows are longer than {limit} tokens with the chat template; the longest has "
    )
    assert problem.rule.endswith(f" ({path}:3)")
    assert "--data.on_too_long drop" in problem.fix and "data.max_prompt_tokens" in problem.fix
    with pytest.raises(DataError, match="1 of 1 row is longer than"):
        load_prompts(write(tmp_path, long[0]), tokenizer, **OPTIONS)


def test_too_long_rows_can_be_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, json.dumps({"question": "book " * 200, "answer": "b"}), GOOD)
    dataset = load_prompts(path, tokenizer, **OPTIONS | {"on_too_long": "drop"})
    assert (len(dataset), dataset.dropped_too_long) == (2, 1)
    tokens = len(dataset.prompts[0].tokens_T)
    just = OPTIONS | {"max_prompt_tokens": tokens}
    assert len(load_prompts(write(tmp_path, GOOD), tokenizer, **just)) == 1
    with pytest.raises(DataError, match=f"no row of 1 remains: 1 exceed {tokens - 1} tokens"):
        options = OPTIONS | {"max_prompt_tokens": tokens - 1, "on_too_long": "drop"}
        load_prompts(write(tmp_path, GOOD), tokenizer, **options)


def test_a_source_without_rows_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        load_prompts(write(tmp_path, "", ""), tokenizer, **OPTIONS)


def test_template_kwargs_reach_the_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    polite = tokenizer_with("{{- 'Tom' if polite is defined }}" + tokenizer.chat_template)
    path = write(tmp_path, GOOD)
    plain, changed = (
        load_prompts(path, polite, **OPTIONS, template_kwargs=variables).prompts[0].tokens_T
        for variables in ({}, {"polite": True})
    )
    added = len(changed) - len(plain)
    assert added > 0 and changed[added:] == plain


# --- the order of prompts ---------------------------------------------------------------------


def numbered(count: int) -> Dataset:
    prompts = (Prompt(id=str(i), messages=(), tokens_T=(i,), answer="") for i in range(count))
    return Dataset(prompts=tuple(prompts))


def walk(dataset: Dataset, *, seed: int, steps: int, count: int) -> list[str]:
    def of(step: int) -> list[str]:
        return [p.id for p in prompts_of_step(dataset, seed=seed, step=step, count=count)]

    return [each for step in range(steps) for each in of(step)]


# Divides, does not divide, equals and exceeds the 10 rows.
@pytest.mark.parametrize("count", [1, 3, 7, 10, 23])
def test_each_epoch_is_a_permutation(count: int) -> None:
    dataset = numbered(10)
    order = walk(dataset, seed=1, steps=30, count=count)
    assert len(order) == 30 * count
    epochs = [order[i : i + 10] for i in range(0, len(order) - 9, 10)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    # 10! orders: epochs are shuffled anew
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert walk(dataset, seed=2, steps=30, count=count) != order


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.3), (3.0, 1.0, 1e-3), (5.0,), (0.1,) * 7])
def test_turns_keep_to_the_shares_at_every_place(weights: tuple[float, ...]) -> None:
    counts = [turns(weights, places) for places in range(400)]
    for places, (now, after) in enumerate(pairwise(counts)):
        assert sum(now) == places
        seen = sorted(b - a for a, b in zip(now, after, strict=True))
        assert seen == [0] * (len(weights) - 1) + [1]
        exact = [places * weight / sum(weights) for weight in weights]
        assert all(abs(a - b) < len(weights) for a, b in zip(now, exact, strict=True))


def test_turns_by_hand() -> None:
    assert [turns((1, 1), n) for n in range(5)] == [[n // 2, n - n // 2] for n in range(5)]
    assert turns((3, 1), 100) == [75, 25]


def test_weighted_sources_have_epochs_of_their_own_and_resume_exactly() -> None:
    pool = numbered(14)
    dataset = Dataset(prompts=pool.prompts, read=(("a", 10), ("b", 4)), weights=(0.25, 0.75))
    assert len(dataset) == 14
    # 140 places: 35 of the first ten, 105 of the last four
    order = walk(dataset, seed=1, steps=20, count=7)
    first, second = [i for i in order if int(i) < 10], [i for i in order if int(i) >= 10]
    assert (len(first), len(second)) == (35, 105)
    for stream, size in ((first, 10), (second, 4)):
        epochs = [stream[i : i + size] for i in range(0, len(stream) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    for step in (0, 3, 19):
        drawn = [p.id for p in prompts_of_step(dataset, seed=1, step=step, count=7)]
        assert drawn == order[step * 7 : step * 7 + 7]
    assert walk(dataset, seed=2, steps=20, count=7) != order


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        prompts_of_step(numbered(0), seed=0, step=0, count=1)
