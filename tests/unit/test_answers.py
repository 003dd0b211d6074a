"""Reference answers and responses with the value that a person would give."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3 import extras
from r3.config import RewardConfig
from r3.data import Columns, load_prompts, read_rows
from r3.rewards import CallError, Score, exact, gsm8k
from r3.types import Prompt
from tests.rows import write
from tests.tables import table

# Of these math-verify says that they are equal: the control of the rules around it.
LENIENT = [
    ("1010_2", "1010_3"), ("1010_2", "1010"), ("7", "8 = 7"), ("no", "on"), ("0", "3x-y+13=0"),
    ("5", r"5\text{ million}"), ("1 1/2", "1"), ("0.0000001", "0.0000002"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"),
]  # fmt: skip


def asked(*answers: str) -> Prompt:
    several = answers if len(answers) > 1 else ()
    return Prompt(id="rows:7", messages=(), tokens_T=(), answer=answers[0], answers=several)


@pytest.fixture(scope="module")
def equal() -> Iterator[Callable[[str, Prompt], Score]]:
    """The function of `reward.function math`."""
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    judge = extras.judge("math", "math", RewardConfig(), model=None, renderer=None)
    yield judge.function
    judge.pool.close()


@pytest.mark.parametrize(("reference", "response", "value"), table("math_answers"))
def test_math_as_a_person_would_grade(
    equal: Any, reference: str, response: str, value: str
) -> None:
    assert equal(response, asked(reference)).value == float(value)


@pytest.mark.parametrize(("reference", "answer"), LENIENT)
def test_math_is_stricter_than_its_library(equal: Any, reference: str, answer: str) -> None:
    from math_verify import parse, verify

    assert equal(rf"\boxed{{{answer}}}", asked(reference)).value == 0
    assert verify(parse(f"${reference}$"), parse(rf"\boxed{{{answer}}}"))


def test_math_takes_several_answers_and_refuses_one_whose_numbers_differ(equal: Any) -> None:
    answers = asked("2", r"\frac{1}{2}")
    found = [equal(rf"\boxed{{{each}}}", answers).value for each in ("2", "0.5", "1")]
    assert found == [1.0, 1.0, 0.0]
    with pytest.raises(CallError, match="has no expression: '8 = 7'"):
        equal(r"\boxed{7}", asked("8 = 7"))


@pytest.mark.parametrize(("answer", "response", "value"), table("gsm8k_answers"))
def test_gsm8k_reads_numbers_as_models_write_them(answer: str, response: str, value: str) -> None:
    assert gsm8k(response, asked(f"steps\n#### {answer}")) == float(value)


def test_gsm8k_reads_an_answer_that_much_text_follows() -> None:
    more = "The steps above confirm that 3 and 4 are right. " * 9
    assert gsm8k(f"#### 7\n{more}", asked("#### 7")) == 1.0


def test_gsm8k_and_exact_take_any_of_several_answers() -> None:
    assert [gsm8k(f"#### {n}", asked("#### 7", "#### 8")) for n in (7, 8, 9)] == [1.0, 1.0, 0.0]
    assert [exact(word, asked("seven", "7")) for word in ("seven", " 7\n", "8")] == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="no '#### number': 'eight'"):
        gsm8k("#### 7", asked("#### 7", "eight"))


@pytest.mark.parametrize(
    ("written", "answers"),
    [
        *[("20", ("20",)), (20, ("20",)), (20.0, ("20",)), (0.5, ("0.5",)), (0.1, ("0.1",))],
        *[(float(2**53), (str(2**53),)), (10**30, (str(10**30),)), (1 / 3, (str(1 / 3),))],
        (0.10000000149011612, ("0.1",)),  # a table's 0.1 in single precision
        *[(-1234.5677490234375, ("-1234.5677",)), (True, ("True",)), (False, ("False",))],
        *[(["7", 7, "seven"], ("7", "seven")), ([7.5, True], ("7.5", "True"))],
    ],
)
def test_answers_become_texts(tmp_path: Path, written: Any, answers: tuple[str, ...]) -> None:
    path = write(tmp_path, json.dumps({"question": "?", "answer": written}))
    (row,), problems = read_rows(str(path), Columns())
    assert row.answers == answers and not problems


def test_prompts_have_all_answers(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, json.dumps({"question": "?", "answer": ["7", 8]}))
    (prompt,) = load_prompts(path, tokenizer, columns=Columns(), max_prompt_tokens=100).prompts
    assert (prompt.answer, prompt.answers, prompt.accepted) == ("7", ("7", "8"), ("7", "8"))
    assert replace(prompt, answers=()).accepted == ("7",)
