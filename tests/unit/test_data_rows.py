"""What a row may be, and every row that is refused: named by line and field, with a rule."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3 import checks
from r3.config import Config, RewardConfig
from r3.data import Columns, columns_of, load_prompts, read_rows
from r3.rewards.scorer import _conversation
from r3.rollout import readable
from tests.rows import parquet, write
from tests.settings import changed, found
from tests.tables import table
from tests.tiny import coded_rollout

PLAIN = Columns()
CONTINUED = Columns(continued=True)
GOOD = '{"question": "Tom has 3 books. How many?", "answer": "#### 3"}'
USER: dict[str, Any] = {"role": "user", "content": "1+1?"}
REPLY: dict[str, Any] = {"role": "assistant", "content": "It is"}


def asked(*messages: Any) -> str:
    return json.dumps({"question": messages, "answer": "#### 3"})


def answered(answer: str, question: str = '"a"') -> str:
    return f'{{"question": {question}, "answer": {answer}}}'


# How rows of bad_rows.txt are read.
READ = {"plain": PLAIN, "nested": Columns(prompt="ask.text"), "continued": CONTINUED}
READ |= {"numbers": Columns(graded_by=("gsm8k",)), "learned": Columns(supervised=True)}
READ |= {"system": Columns(system_prompt="Be brief."), "tools": Columns(tools="tools")}
READ |= {"sft": Columns(answer="", supervised=True)}
READ |= {"unanswered": Columns(answer="", graded_by=("exact",))}
NO_TEXT: list[tuple[str, str | bytes, str, str]] = [
    ("plain", b'{"question": "\xff", "answer": "b"}', "row", "is not UTF-8 at byte 14"),
    ("plain", '{"question": ' + "[" * 100_000 + "}", "row", "nested too deeply"),
    ("plain", answered("7" * 5000), "row", "long numbers"),
]


@pytest.mark.parametrize(("read", "line", "field", "rule"), [*table("bad_rows"), *NO_TEXT])
def test_a_bad_row_is_named(
    read: str, line: str | bytes, field: str, rule: str, tmp_path: Path
) -> None:
    columns = READ[read]
    if not columns.answer:
        line = line if isinstance(line, bytes) else line.replace('"answer"', '"other"')
    path = write(tmp_path, GOOD, "", line)
    _, problems = read_rows(str(path), columns)
    (problem,) = [each for each in problems if each.line == 3]
    assert problem.column == field and rule in str(problem)
    assert problem.fix and "a int" not in str(problem) and "NoneType" not in str(problem)


def test_a_bad_row_reaches_the_check(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, answered("null"), *[GOOD] * 20)
    (message,) = found({"data.path": str(path)}).values()
    assert f"'{path}:2:answer': is null: the row has no reference answer. Fix: " in message


def test_of_many_bad_rows_five_are_shown_and_all_counted(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, *["oops"] * 12, *[GOOD] * 20)
    problems = checks.problems(changed({"data.path": str(path)}), 2)
    named = [f"{path}:{line}" for line in range(2, 7)]
    assert [problem.value for problem in problems] == [*named, str(path)]
    assert problems[-1].rule == "7 more faults, 12 in all"


def test_a_fault_of_every_row_is_one_problem(tmp_path: Path) -> None:
    row = '{"problem": "1+1?", "solution": "$\\\\frac{4}{2}$"}'
    path = write(tmp_path, *[row] * 20)
    problems = checks.problems(changed({"data.path": str(path)}), 2)
    assert [(problem.value, problem.rule) for problem in problems] == [
        (f"{path}:{name}", "is missing; the row has problem, solution; so it is in all 20 rows")
        for name in ("question", "answer")
    ]
    write(tmp_path, *[row] * 19, "oops")
    assert len(checks.problems(changed({"data.path": str(path)}), 2)) == 6


@pytest.mark.parametrize("function", ["exact", "gsm8k", "math"])
def test_an_empty_reference_answer_is_refused(function: str, tmp_path: Path) -> None:
    """A response without text would equal it."""
    path = write(tmp_path, json.dumps({"question": "a", "answer": " ", "verifier": function}))
    row = RewardConfig(function=("row",), row_functions=("exact", "gsm8k", "math"))
    for reward in (RewardConfig(function=(function,)), row):
        _, problems = read_rows(str(path), columns_of(Config(reward=reward)))
        assert problems[0].column == "answer" and "is empty, and the" in problems[0].rule
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


def test_a_final_message_is_continued_where_its_text_ends(tokenizer: Any, tmp_path: Path) -> None:
    """As transformers' `continue_final_message` has it; other rows of the file open a new turn."""
    long = REPLY | {"content": "First I add. Then"}
    path = write(tmp_path, asked(USER, REPLY), asked(USER), asked(USER, long), asked(USER, REPLY))
    prompts = load_prompts(path, tokenizer, columns=CONTINUED, max_prompt_tokens=200).prompts
    texts = [tokenizer.decode(each.tokens_T) for each in prompts]
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
