"""Reference answers and responses with the value that a person would give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3 import assets
from r3.data.numbers import final_number, plain
from r3.data.prompts import load_prompts
from r3.data.rows import Columns
from r3.data.sources import read_rows
from r3.rewards import exact, gsm8k
from r3.types import Prompt
from tests.rows import write

pytestmark = pytest.mark.unit

# fmt: off
MATH = [
    ("42", r"\boxed{42}", 1),
    ("42", "The answer is 42.", 1),
    ("42", r"\boxed{41} no, \boxed{42}", 1),
    ("42", r"\boxed{42} no, \boxed{41}", 0),
    ("1000", r"\boxed{1\,000}", 1),
    ("1,000", r"\boxed{1000}", 1),
    (r"1\,000", r"\boxed{1000}", 1),
    ("1000", r"\boxed{1{,}000}", 1),
    ("1000", r"\boxed{1~000}", 1),
    (r"1\ 000", r"\boxed{1000}", 1),
    ("6.02e23", r"\boxed{6.02 \times 10^{23}}", 1),
    (r"6.02\times 10^{23}", r"\boxed{6.02e23}", 1),
    ("1e-3", r"\boxed{0.001}", 1),
    ("0.001", r"\boxed{1e-3}", 1),
    ("1e-3", r"\boxed{10^{-3}}", 1),
    ("1e-3", "0.002", 0),
    ("1E5", r"\boxed{100000}", 1),
    ("2e3", r"\boxed{2}", 0),
    ("-1.5e2", r"\boxed{-150}", 1),
    ("42", r"\boxed{42} or \boxed{4", 0),
    ("42", r"\boxed{42", 0),
    ("7", r"\boxed 7", 1),
    ("42", r"\fbox{42}", 1),
    ("42", r"\fbox{41}, so \boxed{42}", 1),
    ("42", r"we get 17 things: \fbox{42}", 1),
    ("1/2", r"\boxed{0.5}", 1),
    ("1/2", r"\boxed{\frac{1}{2}}", 1),
    ("1/2", r"\boxed{\dfrac12}", 1),
    (r"\frac{1}{2}", r"\boxed{1/2}", 1),
    ("0.5", r"\boxed{\tfrac{2}{4}}", 1),
    ("50%", r"\boxed{50\%}", 1),
    ("50", r"\boxed{50\%}", 1),
    ("0.5", r"\boxed{50\%}", 1),
    ("-3", '\\boxed{\u22123}', 1),
    ("-3", '\u22123', 1),
    ("3", '\\boxed{\u22123}', 0),
    ('\u22123', r"\boxed{-3}", 1),
    ("1000", '\\boxed{1\u2009000}', 1),
    ("1000", '1\u202f000', 1),
    ("12345", '\\boxed{12\xa0345}', 1),
    (r"\sqrt{2}", r"\boxed{\sqrt 2}", 1),
    (r"\sqrt{2}", r"\boxed{1.414}", 0),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    (r"\pi", r"\boxed{\pi}", 1),
    (r"2\pi", r"\boxed{6.28}", 0),
    ("(1,2)", r"\boxed{(1, 2)}", 1),
    ("(1,2)", r"\boxed{(2, 1)}", 0),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
    ("[0,1)", r"\boxed{[0,1)}", 1),
    ("[0,1)", r"\boxed{(0,1)}", 0),
    ("1,2", r"\boxed{1, 2}", 1),
    ("1,2", r"\boxed{2, 1}", 1),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    ("x^2+1", r"\boxed{x^2-1}", 0),
    ("x=3", r"\boxed{3}", 1),
    ("3", r"\boxed{x = 3}", 1),
    ("x=3", r"\boxed{x=3}", 1),
    ("18", r"\boxed{\$18}", 1),
    ("18", r"\boxed{18 \text{ dollars}}", 1),
    ("18", r"\boxed{18\text{ cm}^2}", 1),
    ("90", r"\boxed{90^\circ}", 1),
    (r"90^\circ", r"\boxed{90}", 1),
    ("B", r"\boxed{B}", 1),
    ("B", r"\boxed{\text{B}}", 1),
    (r"\text{(B)}", r"\boxed{B}", 1),
    ("B", r"\boxed{C}", 0),
    ("Yes", r"\boxed{\text{Yes}}", 1),
    ("Evelyn", r"\boxed{\text{Evelyn}}", 1),
    ("Evelyn", r"\boxed{\text{Briana}}", 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", 0),
    (r"\infty", r"\boxed{\infty}", 1),
    ("-2", r"\boxed{-2}", 1),
    ("2", r"\boxed{-2}", 0),
    ("3+4i", r"\boxed{3+4i}", 1),
    ("0", r"\boxed{0}", 1),
    ("0", r"\boxed{1}", 0),
    ("007", r"\boxed{7}", 1),
    ("5", "Final answer: $5$", 1),
    ("5", r"\boxed{6} wait, the final answer is $5$", 0),
    ("5", "no idea", 0),
    ("5", "", 0),
    ("5", r"\boxed{}", 0),
    ("steps #### 7", r"\boxed{7}", 1),
    ("7", "#### 7", 1),
    (r"3\frac{1}{2}", r"\boxed{3.5}", 1),
    (r"\frac{3}{4}", r"\boxed{0.75}", 1),
    ("0.333", r"\boxed{\frac13}", 0),
    ("10^{3}", r"\boxed{1000}", 1),
    ("2^{10}", r"\boxed{1024}", 1),
    ("1.50", r"\boxed{1.5}", 1),
    ("3:2", r"\boxed{3:2}", 1),
    ("2/3", r"\boxed{\frac{-2}{-3}}", 1),
    (r"\frac{1}{2}", r"\boxed{-\frac12}", 0),
    ("6e50", r"\boxed{6.0\times 10^{50}}", 1),
    ("6e50", r"\boxed{6.0\times 10^{51}}", 0),
    (r"2^3 \times 10^2", r"\boxed{800}", 1),
    ("12", "12 e", 1),
    ("42", r"\boxed{42}.", 1),
    ("42", r"$$\boxed{42}$$", 1),
    ("42", "**42**", 1),
    ("42", r"\boxed{\boxed{42}}", 1),
    ("42", r"\boxed{ 42 \, }", 1),
    (r"x \in [1,3]", r"\boxed{[1,3]}", 1),
    ("1e3", "1000", 1),
    ("16", r"\boxed{2^4}", 1),
    ("5!", r"\boxed{120}", 1),
    (r"\log 2", r"\boxed{\log(2)}", 1),
    ("True", r"\boxed{True}", 1),
    (r"3 \text{ or } 4", r"\boxed{3, 4}", 1),
    (r"\pm 2", r"\boxed{\pm 2}", 1),
    ("1{,}234{,}567", r"\boxed{1234567}", 1),
    ("x>3", r"\boxed{x > 3}", 1),
    ("x>3", r"\boxed{x < 3}", 0),
    ("x>3", r"\boxed{3 < x}", 1),
    ("11:30", r"\boxed{11:30}", 1),
    ("11:30", r"\boxed{11:45}", 0),
    ("(10,200)", r"\boxed{(10,\,200)}", 1),
    ("(10, 200)", r"\boxed{(10,\;200)}", 1),
    ("10200", r"\boxed{10,\,200}", 0),
    ("10200", r"\boxed{10,\!200}", 1),
    ("10 000", r"\boxed{10000}", 1),
    (r"3\times 10^{45}", r"\boxed{3 \times 10^45}", 1),
    ("2e - 1", r"\boxed{2e-1}", 1),
    ("2e-1", r"\boxed{2e - 1}", 1),
    ("18 dollars", r"\boxed{18}", 1),
    ("18", r"\boxed{18 miles per hour}", 1),
    ("18 dollars", r"\boxed{19 dollars}", 0),
    (r"\[18\]", r"\boxed{18}", 1),
    ("**18**", r"\boxed{18}", 1),
    (r"not \boxed{3} but \boxed{5}", r"\boxed{5}", 1),
    (r"not \boxed{3} but \boxed{5}", r"\boxed{3}", 0),
]
# fmt: on


def asked(*answers: str) -> Prompt:
    several = answers if len(answers) > 1 else ()
    return Prompt(id="rows:7", messages=(), tokens_T=(), answer=answers[0], answers=several)


@pytest.mark.parametrize(("reference", "response", "value"), MATH)
def test_math_as_a_person_would_grade(reference: str, response: str, value: float) -> None:
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    from r3.rewards.verify import equal

    assert equal(response, asked(reference)).value == value


def test_math_takes_any_of_several_answers() -> None:
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    from r3.rewards.verify import equal

    answers = asked("2", r"\frac{1}{2}")
    assert [equal(rf"\boxed{{{each}}}", answers).value for each in ("2", "0.5", "1")] == [
        1.0,
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("3+4=7\n#### 7", "steps\n#### 7", 1.0),
        ("####7", "#### 7", 1.0),
        ("#### 1,234.50", "#### 1234.5", 1.0),
        ("#### $18.00", "#### 18", 1.0),
        ("#### -$5", "#### -5", 1.0),
        ("#### $-5", "#### -5", 1.0),
        ("#### .5", "#### 0.50", 1.0),
        ("#### 7.", "#### 7", 1.0),
        ("#### 7%", "#### 7", 1.0),
        ("#### 3\nno: #### 7", "#### 7", 1.0),  # the last one counts
        ("#### 7\nno: #### 3", "#### 7", 0.0),
        ("#### 0.1", "#### 0.10000000000000001", 0.0),  # equal as floats, not as numbers
        ("the answer is 7", "#### 7", 0.0),
        ("", "#### 7", 0.0),
        ("#### 1/2", "#### 1", 0.0),
        ("#### 1e5", "#### 1", 0.0),
        ("#### 12abc", "#### 12", 0.0),
        ("#### 12.5x", "#### 12", 0.0),
        ("#### 1,234abc", "#### 1", 0.0),
        ("#### --5", "#### 5", 0.0),
        ("####\n7", "#### 7", 0.0),
        ("#### \u0667", "#### 7", 0.0),  # a digit of another script
        ("#### \u22123", "#### -3", 1.0),
        ("#### -3", "#### \u22123", 1.0),
        ("#### \u22123", "#### 3", 0.0),
        ("#### 1\u2009234", "#### 1234", 1.0),
        ("#### 1\u00a0234\u202f567", "#### 1,234,567", 1.0),
        (r"#### 1\,234", "#### 1234", 1.0),
        ("#### 1{,}234", "#### 1234", 1.0),
        ("#### 1e3", "#### 1000", 1.0),
        ("#### 1.5E-1", "#### 0.15", 1.0),
        ("#### 1e3x", "#### 1000", 0.0),
        ("#### 1e", "#### 1", 0.0),
        ("#### 1\u200923", "#### 123", 0.0),  # two digits are no group of three
    ],
)
def test_gsm8k_reads_numbers_as_models_write_them(response: str, answer: str, value: float) -> None:
    assert gsm8k(response, asked(answer)) == value


def test_gsm8k_and_exact_take_any_of_several_answers() -> None:
    assert [gsm8k(f"#### {n}", asked("#### 7", "#### 8")) for n in (7, 8, 9)] == [1.0, 1.0, 0.0]
    assert [exact(word, asked("seven", "7")) for word in ("seven", " 7\n", "8")] == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="no '#### number': 'eight'"):
        gsm8k("#### 7", asked("#### 7", "eight"))


def test_plain_leaves_other_texts_alone() -> None:
    for text in ("1, 234", "a-b", "x_1\u2009000", "1.5\u2009000", "12345\u2009678", "1 000"):
        assert plain(text) == text
    assert final_number("no number") is None


@pytest.mark.parametrize(
    ("written", "answers"),
    [
        ("20", ("20",)),
        (20, ("20",)),
        (20.0, ("20",)),
        (0.5, ("0.5",)),
        (0.1, ("0.1",)),
        (float(2**53), (str(2**53),)),
        (0.10000000149011612, ("0.1",)),  # a table's 0.1 in single precision
        (-1234.5677490234375, ("-1234.5677",)),
        (1 / 3, ("0.3333333333333333",)),
        (True, ("True",)),
        (False, ("False",)),
        (10**30, (str(10**30),)),
        (["7", 7, "seven"], ("7", "seven")),
        ([7.5, True], ("7.5", "True")),
    ],
)
def test_answers_become_texts(tmp_path: Path, written: Any, answers: tuple[str, ...]) -> None:
    path = write(tmp_path, json.dumps({"question": "?", "answer": written}))
    (row,), problems = read_rows(str(path), Columns())
    assert row.answers == answers and not problems


def test_prompts_have_all_answers(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    path = write(tmp_path, json.dumps({"question": "?", "answer": ["7", 8]}))
    (prompt,) = load_prompts(path, tokenizer, columns=Columns(), max_prompt_tokens=100).prompts
    assert (prompt.answer, prompt.answers, prompt.accepted) == ("7", ("7", "8"), ("7", "8"))
    assert replace(prompt, answers=()).accepted == ("7",)
