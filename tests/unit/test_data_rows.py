"""What a row may be, and every row that is refused: named by line and field, with a rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3 import checks
from r3.config import Config, RewardConfig
from r3.data import Columns, DataError, columns_of, load_prompts, read_rows
from r3.rewards.scorer import _conversation
from r3.rollout import readable
from tests.rows import OPTIONS, parquet, write
from tests.settings import changed, found
from tests.tiny import coded_rollout

PLAIN = Columns()
NUMBERS = Columns(graded_by=("gsm8k",))
SYSTEM = Columns(system_prompt="Be brief.")
TOOLS = Columns(tools="tools")
LEARNED = Columns(supervised=True)
SFT = Columns(answer="", supervised=True)
CONTINUED = Columns(continued=True)
GOOD = '{"question": "Tom has 3 books. How many?", "answer": "#### 3"}'
USER: dict[str, Any] = {"role": "user", "content": "1+1?"}
REPLY: dict[str, Any] = {"role": "assistant", "content": "It is"}


TOOL_FAULTS = ('"{"', '"3"', "[1]", '[{"type": "function"}]')


def asked(*messages: Any) -> str:
    return json.dumps({"question": messages, "answer": "#### 3"})


def answered(answer: str, question: str = '"a"') -> str:
    return f'{{"question": {question}, "answer": {answer}}}'


def with_part(**part: Any) -> str:
    return asked({"role": "user", "content": [{"type": "text", "text": "a"}, part]})


BAD: list[tuple[Columns, str | bytes, str, str]] = [
    # No object of JSON.
    (PLAIN, '{"question": "a", "answer": ', "row", "is not JSON at column 29"),
    (PLAIN, '{"question": "1+1?", "answer"', "row", "is not JSON"),
    (PLAIN, '{"question": "a", "answer": "1", "answer": "2"}', "row", "two keys 'answer'"),
    (PLAIN, '{"question": "a", "answer": "1", "t": {"a": 1, "a": 2}}', "row", "two keys 'a'"),
    (PLAIN, b'{"question": "\xff", "answer": "b"}', "row", "is not UTF-8 at byte 14"),
    (PLAIN, "[1, 2]", "row", "is a list, not an object"),
    (PLAIN, "3", "row", "is a number, not an object"),
    (PLAIN, "null", "row", "is null, not an object"),
    (PLAIN, answered('"1"', r'"a \ud800 b"'), "row", "half of a character"),
    (PLAIN, '{"question": "a", "answer": "1", "m": [{"x": "\\udfff"}]}', "row", "half of a"),
    (PLAIN, '{"question": ' + "[" * 100_000 + "}", "row", "nested too deeply"),
    (PLAIN, answered("7" * 5000), "row", "long numbers"),
    # Columns.
    (PLAIN, '{"answer": "b"}', "question", "is missing; the row has answer"),
    (PLAIN, '{"answer": "b", "a.b": 1}', "question", "is missing; the row has answer, a.b"),
    (PLAIN, '{"question": "a", "text": "b"}', "answer", "is missing; the row has question, text"),
    (
        Columns(prompt="ask.text"),
        '{"ask": {"body": "b", "n": 1}, "answer": "1"}',
        "ask.text",
        "is missing; the row has ask, answer; ask has body, n",
    ),
    (Columns(prompt="ask.text"), answered("1"), "ask.text", "is missing; the row has question"),
    # Answers.
    (PLAIN, answered('{"b": 3}'), "answer", "is an object, not a text"),
    (PLAIN, answered("null"), "answer", "is null: the row has no reference answer"),
    (PLAIN, answered("[]"), "answer", "is an empty list"),
    (PLAIN, answered('["1", null]'), "answer", "is a list with entries that are no texts"),
    (PLAIN, answered('[["7"]]'), "answer", "is a list with entries that are no texts"),
    (PLAIN, answered("NaN"), "answer", "is nan, which is no number"),
    # 2^53 + 2 in a column with gaps
    (PLAIN, answered("9007199254740994.0"), "answer", "a floating-point number that may have lost"),
    (NUMBERS, answered('"#### none"'), "answer", "no plain number after '####'"),
    (NUMBERS, answered('"#### 1/2"'), "answer", "no plain number after '####'"),
    (NUMBERS, answered('"none"'), "answer", "has no '####'"),
    (NUMBERS, answered('["#### 7", "seven"]'), "answer", "has no '####'"),
    (LEARNED, answered('["7", "8"]'), "answer", "is a list of 2 answers, and one is learned"),
    # Questions and messages.
    (PLAIN, answered('"b"', "3"), "question", "is a number, neither a text nor a list"),
    (PLAIN, answered('"b"', "null"), "question", "is null, neither a text nor a list"),
    (PLAIN, answered('"b"', "true"), "question", "is true, neither a text nor a list"),
    (PLAIN, answered('"b"', '{"role": "user"}'), "question", "is an object, neither a text"),
    (PLAIN, answered('"b"', '" "'), "question", "is empty"),
    (PLAIN, asked(), "question", "is an empty list"),
    (PLAIN, asked("a"), "question", "message 0 is a text, not an object"),
    (PLAIN, asked(USER, None), "question", "message 1 is null, not an object"),
    (PLAIN, asked({"role": "user"}), "question", "message 0 has no 'content'"),
    (PLAIN, asked({"role": "user", "content": None}), "question", "message 0 has no 'content'"),
    (PLAIN, asked({"role": "user", "content": 3}), "question", "'content' that is a number"),
    (PLAIN, asked({"role": 1, "content": ""}), "question", "message 0 has no 'role'"),
    (SYSTEM, asked({"role": "system", "content": "s"}, USER), "question", "begins with a system"),
    (PLAIN, asked({"from": "narrator", "value": "a"}), "question", "is from 'narrator'"),
    (PLAIN, asked({"from": 3, "value": "a"}), "question", "is from 3, which is not known"),
    (PLAIN, asked({"from": "human"}), "question", "message 0 has no 'content'"),
    (
        SFT,
        asked(
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": "{}"},
            {"from": "gpt", "value": "b"},
        ),
        "question",
        "message 1 is from 'function_call', which is not known",
    ),
    # More than text.
    (PLAIN, with_part(type="image_url", image_url={"url": "u"}), "question", "vision is not"),
    (PLAIN, with_part(type="image"), "question", "vision is not supported"),
    (PLAIN, with_part(image="a.png"), "question", "vision is not supported"),
    (PLAIN, with_part(type="input_audio", input_audio={}), "question", "audio is not supported"),
    (PLAIN, with_part(type="video"), "question", "video is not supported"),
    (PLAIN, with_part(type="file"), "question", "has a part of type 'file' in its content"),
    (PLAIN, asked({"role": "user", "content": ["a"]}), "question", "a part that is a text"),
    (PLAIN, f'{GOOD[:-1]}, "images": ["a.png"]}}', "images", "vision is not supported"),
    (PLAIN, f'{GOOD[:-1]}, "image": {{"path": "a.png"}}}}', "image", "vision is not supported"),
    # The end of a conversation.
    (PLAIN, asked(USER, REPLY), "question", "ends with an assistant message"),
    (PLAIN, asked(USER, {"from": "gpt", "value": "b"}), "question", "ends with an assistant"),
    (CONTINUED, asked(USER, REPLY | {"content": ""}), "question", "more than a text, or empty"),
    (CONTINUED, asked(USER, REPLY | {"reasoning": "r"}), "question", "more than a text, or"),
    # Tools.
    *((TOOLS, f'{GOOD[:-1]}, "tools": {each}}}', "tools", "") for each in TOOL_FAULTS),
]


@pytest.mark.parametrize(("columns", "line", "field", "rule"), BAD)
def test_a_bad_row_is_named(
    columns: Columns, line: str | bytes, field: str, rule: str, tmp_path: Path
) -> None:
    if not columns.answer:
        line = line if isinstance(line, bytes) else line.replace('"answer"', '"other"')
    path = write(tmp_path, GOOD, "", line)
    _, problems = read_rows(str(path), columns)
    (problem,) = [each for each in problems if each.line == 3]
    assert problem.field == field and rule in str(problem)
    assert problem.fix and "a int" not in str(problem) and "NoneType" not in str(problem)


@pytest.mark.parametrize("place", ["config", "prompts"])
def test_a_bad_row_reaches_check_and_run(place: str, tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, answered("null"), *[GOOD] * 20)
    rule = "is null: the row has no reference answer"
    if place == "config":
        (message,) = found({"data.path": str(path)}).values()
        assert f"'{path}:2:answer': {rule}. Fix: " in message
        return
    with pytest.raises(DataError) as caught:
        load_prompts(path, tokenizer, **OPTIONS)
    assert f"rows.jsonl:2: answer: {rule}. Fix: " in str(caught.value)


def test_of_many_bad_rows_five_are_shown_and_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD, *["oops"] * 12, *[GOOD] * 20]))
    problems = checks.problems(changed({"data.path": str(path)}), 2)
    named = [f"{path}:{line}" for line in range(2, 7)]
    assert [problem.value for problem in problems] == [*named, str(path)]
    assert problems[-1].rule == "7 more faults, 12 in all"


def test_a_fault_of_every_row_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = '{"problem": "1+1?", "solution": "$\\\\frac{4}{2}$"}'
    path.write_text("\n".join([row] * 20))
    problems = checks.problems(changed({"data.path": str(path)}), 2)
    assert [(problem.value, problem.rule) for problem in problems] == [
        (f"{path}:{name}", "is missing; the row has problem, solution; so it is in all 20 rows")
        for name in ("question", "answer")
    ]
    path.write_text("\n".join([row] * 19 + ["oops"]))
    assert len(checks.problems(changed({"data.path": str(path)}), 2)) == 6


@pytest.mark.parametrize("function", ["exact", "gsm8k", "math"])
def test_an_empty_reference_answer_is_refused(function: str, tmp_path: Path) -> None:
    """A response without text would equal it."""
    path = write(tmp_path, json.dumps({"question": "a", "answer": " ", "verifier": function}))
    row = RewardConfig(function=("row",), row_functions=("exact", "gsm8k", "math"))
    for reward in (RewardConfig(function=(function,)), row):
        _, problems = read_rows(str(path), columns_of(Config(reward=reward)))
        assert problems[0].field == "answer" and "is empty, and the" in problems[0].rule
    assert not read_rows(str(path), columns_of(Config(reward=RewardConfig(function=("http",)))))[1]


def test_answers_without_a_number_are_fine_for_other_rewards(tmp_path: Path) -> None:
    path = str(write(tmp_path, *['{"question": "say hi", "answer": "hi"}'] * 16))
    assert found({"data.path": path, "reward.function": "exact", "eval.path": ""}) == {}


# --- rows that are read -------------------------------------------------------------------------


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": text} for speaker, text in pairs]


@pytest.mark.parametrize("as_table", [False, True])
def test_from_and_value_are_read_as_role_and_content(as_table: bool, tmp_path: Path) -> None:
    """ShareGPT's names and those of its followers, with keys of their own that mean the same."""
    rows: list[dict[str, Any]] = [
        {"conversations": said(("system", "s"), ("human", "a"), ("gpt", "b"), ("user", "c"))},
        {"conversations": said(("human", "a"), ("assistant", "b"), ("tool", "3"))},
        {"conversations": said(("human", "a"), ("chatgpt", "b"), ("observation", "3"))},
    ]
    path = Path(parquet(tmp_path, rows)) if as_table else write(tmp_path, *map(json.dumps, rows))
    read, problems = read_rows(str(path), Columns(prompt="conversations", answer=""))
    assert not problems
    roles = [" ".join(each["role"] for each in row.messages) for row in read]
    assert roles == ["system user assistant user", *["user assistant tool"] * 2]
    assert [each["content"] for each in read[0].messages] == ["s", "a", "b", "c"]


@pytest.mark.parametrize(
    "row",
    [
        {"images": []},
        {"images": None, "image": None, "audio": None},
        {"images": [None, None], "videos": ""},  # as many as in other rows
        {"images": float("nan")},  # of tables that were joined
        {"image": "registry/python:3.11"},  # a container of a programming task
    ],
)
def test_a_column_of_images_without_images_is_no_fault(row: Any, tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({**json.loads(GOOD), **row}))
    assert read_rows(str(path), PLAIN)[1] == []


def prompt_text(tokenizer: Any, path: Path, columns: Columns) -> list[str]:
    found = load_prompts(path, tokenizer, columns=columns, max_prompt_tokens=200)
    return [tokenizer.decode(each.tokens_T) for each in found.prompts]


def test_a_final_message_is_continued_where_its_text_ends(tokenizer: Any, tmp_path: Path) -> None:
    """As transformers' `continue_final_message` has it; other rows of the file open a new turn."""
    long = REPLY | {"content": "First I add. Then"}
    path = write(tmp_path, asked(USER, REPLY), asked(USER), asked(USER, long), asked(USER, REPLY))
    texts = prompt_text(tokenizer, path, CONTINUED)
    expected = [
        tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        for chat in ([USER, REPLY], [USER, long])
    ]
    opened = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert texts == [expected[0], opened, expected[1], expected[0]]
    assert texts[0].endswith("assistant\nIt is")


def test_dumps_and_rewards_have_a_continued_message_whole(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, asked(USER, REPLY), asked(USER))
    prompts = load_prompts(path, tokenizer, columns=CONTINUED, max_prompt_tokens=200).prompts
    rollout = replace(coded_rollout([1, 2, 3], 1), response=" 7.", messages=())
    for prompt, text in zip(prompts, ("It is 7.", " 7."), strict=True):
        expected = [USER, {"role": "assistant", "content": text}]
        assert readable(rollout, prompt)["messages"] == expected
        assert _conversation(rollout, prompt) == expected


def test_continued_messages_are_for_single_turns(tmp_path: Path) -> None:
    path = str(write(tmp_path, *[asked(USER, REPLY)] * 20))
    settings = {"data.path": path, "eval.path": ""}
    assert found({**settings, "data.continue_final_message": True}) == {}
    (message,) = found(settings).values()
    assert "--data.continue_final_message true continues it" in message
    own: Mapping[str, Any] = {"data.continue_final_message": True, "env.name": "calculator"}
    assert "calculator decides" in found({**settings, **own})["data.continue_final_message"]
