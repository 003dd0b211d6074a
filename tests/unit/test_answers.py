"""Reference answers and responses with the value that a person would give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3 import assets, extras
from r3.config import RewardConfig
from r3.data import Columns, load_prompts, read_rows
from r3.rewards import CallError, Score, exact, gsm8k
from r3.types import Prompt
from tests.rows import write

pytestmark = pytest.mark.unit

# fmt: off
MATH = [
    ("42", r"\boxed{42}", 1), ("42", "The answer is 42.", 1),
    ("42", r"\boxed{41} no, \boxed{42}", 1), ("42", r"\boxed{42} no, \boxed{41}", 0),
    ("1000", r"\boxed{1\,000}", 1), ("1,000", r"\boxed{1000}", 1), (r"1\,000", r"\boxed{1000}", 1),
    ("1000", r"\boxed{1{,}000}", 1), ("1000", r"\boxed{1~000}", 1),
    (r"1\ 000", r"\boxed{1000}", 1), ("6.02e23", r"\boxed{6.02 \times 10^{23}}", 1),
    (r"6.02\times 10^{23}", r"\boxed{6.02e23}", 1), ("1e-3", r"\boxed{0.001}", 1),
    ("0.001", r"\boxed{1e-3}", 1), ("1e-3", r"\boxed{10^{-3}}", 1), ("1e-3", "0.002", 0),
    ("1E5", r"\boxed{100000}", 1), ("2e3", r"\boxed{2}", 0), ("-1.5e2", r"\boxed{-150}", 1),
    ("42", r"\boxed{42} or \boxed{4", 0), ("42", r"\boxed{42", 0), ("7", r"\boxed 7", 1),
    ("42", r"\fbox{42}", 1), ("42", r"\fbox{41}, so \boxed{42}", 1),
    ("42", r"we get 17 things: \fbox{42}", 1), ("1/2", r"\boxed{0.5}", 1),
    ("1/2", r"\boxed{\frac{1}{2}}", 1), ("1/2", r"\boxed{\dfrac12}", 1),
    (r"\frac{1}{2}", r"\boxed{1/2}", 1), ("0.5", r"\boxed{\tfrac{2}{4}}", 1),
    ("50%", r"\boxed{50\%}", 1), ("50", r"\boxed{50\%}", 1), ("0.5", r"\boxed{50\%}", 1),
    ("-3", '\\boxed{\u22123}', 1), ("-3", '\u22123', 1), ("3", '\\boxed{\u22123}', 0),
    ('\u22123', r"\boxed{-3}", 1), ("1000", '\\boxed{1\u2009000}', 1), ("1000", '1\u202f000', 1),
    ("12345", '\\boxed{12\xa0345}', 1), (r"\sqrt{2}", r"\boxed{\sqrt 2}", 1),
    (r"\sqrt{2}", r"\boxed{1.414}", 0), (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    (r"\pi", r"\boxed{\pi}", 1), (r"2\pi", r"\boxed{6.28}", 0), ("(1,2)", r"\boxed{(1, 2)}", 1),
    ("(1,2)", r"\boxed{(2, 1)}", 0), (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
    ("[0,1)", r"\boxed{[0,1)}", 1), ("[0,1)", r"\boxed{(0,1)}", 0), ("1,2", r"\boxed{1, 2}", 1),
    ("1,2", r"\boxed{2, 1}", 1), ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    ("x^2+1", r"\boxed{x^2-1}", 0), ("x=3", r"\boxed{3}", 1), ("3", r"\boxed{x = 3}", 1),
    ("x=3", r"\boxed{x=3}", 1), ("18", r"\boxed{\$18}", 1),
    ("18", r"\boxed{18 \text{ dollars}}", 1), ("18", r"\boxed{18\text{ cm}^2}", 1),
    ("90", r"\boxed{90^\circ}", 1), (r"90^\circ", r"\boxed{90}", 1), ("B", r"\boxed{B}", 1),
    ("B", r"\boxed{\text{B}}", 1), (r"\text{(B)}", r"\boxed{B}", 1), ("B", r"\boxed{C}", 0),
    ("Yes", r"\boxed{\text{Yes}}", 1), ("Evelyn", r"\boxed{\text{Evelyn}}", 1),
    ("Evelyn", r"\boxed{\text{Briana}}", 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", 0),
    (r"\infty", r"\boxed{\infty}", 1), ("-2", r"\boxed{-2}", 1), ("2", r"\boxed{-2}", 0),
    ("3+4i", r"\boxed{3+4i}", 1), ("0", r"\boxed{0}", 1), ("0", r"\boxed{1}", 0),
    ("007", r"\boxed{7}", 1), ("5", "Final answer: $5$", 1),
    ("5", r"\boxed{6} wait, the final answer is $5$", 0), ("5", "no idea", 0), ("5", "", 0),
    ("5", r"\boxed{}", 0), ("steps #### 7", r"\boxed{7}", 1), ("7", "#### 7", 1),
    (r"3\frac{1}{2}", r"\boxed{3.5}", 1), (r"\frac{3}{4}", r"\boxed{0.75}", 1),
    ("0.333", r"\boxed{\frac13}", 0), ("10^{3}", r"\boxed{1000}", 1),
    ("2^{10}", r"\boxed{1024}", 1), ("1.50", r"\boxed{1.5}", 1), ("3:2", r"\boxed{3:2}", 1),
    ("2/3", r"\boxed{\frac{-2}{-3}}", 1), (r"\frac{1}{2}", r"\boxed{-\frac12}", 0),
    ("6e50", r"\boxed{6.0\times 10^{50}}", 1), ("6e50", r"\boxed{6.0\times 10^{51}}", 0),
    (r"2^3 \times 10^2", r"\boxed{800}", 1), ("12", "12 e", 1), ("42", r"\boxed{42}.", 1),
    ("42", r"$$\boxed{42}$$", 1), ("42", "**42**", 1), ("42", r"\boxed{\boxed{42}}", 1),
    ("42", r"\boxed{ 42 \, }", 1), (r"x \in [1,3]", r"\boxed{[1,3]}", 1), ("1e3", "1000", 1),
    ("16", r"\boxed{2^4}", 1), ("5!", r"\boxed{120}", 1), (r"\log 2", r"\boxed{\log(2)}", 1),
    ("True", r"\boxed{True}", 1), (r"3 \text{ or } 4", r"\boxed{3, 4}", 1),
    (r"\pm 2", r"\boxed{\pm 2}", 1), ("1{,}234{,}567", r"\boxed{1234567}", 1),
    ("x>3", r"\boxed{x > 3}", 1), ("x>3", r"\boxed{x < 3}", 0), ("x>3", r"\boxed{3 < x}", 1),
    ("11:30", r"\boxed{11:30}", 1), ("11:30", r"\boxed{11:45}", 0),
    ("(10,200)", r"\boxed{(10,\,200)}", 1), ("(10, 200)", r"\boxed{(10,\;200)}", 1),
    ("10200", r"\boxed{10,\,200}", 0), ("10200", r"\boxed{10,\!200}", 1),
    ("10 000", r"\boxed{10000}", 1), (r"3\times 10^{45}", r"\boxed{3 \times 10^45}", 1),
    ("2e - 1", r"\boxed{2e-1}", 1), ("2e-1", r"\boxed{2e - 1}", 1),
    ("18 dollars", r"\boxed{18}", 1), ("18", r"\boxed{18 miles per hour}", 1),
    ("18 dollars", r"\boxed{19 dollars}", 0), (r"\[18\]", r"\boxed{18}", 1),
    ("**18**", r"\boxed{18}", 1), (r"not \boxed{3} but \boxed{5}", r"\boxed{5}", 1),
    (r"not \boxed{3} but \boxed{5}", r"\boxed{3}", 0),
]
# fmt: on

# What models really write, and what math-verify alone would take for it.
WRITTEN = [
    # Markdown and full stops
    ("73", r"\boxed{73.}", 1), ("73", r"\boxed{**73**}", 1), ("73", "answer: `73`", 1),
    ("73", "The answer is **73**.", 1), ("73", r"\boxed{`73`}", 1), ("73", "__73__", 1),
    ("73", "*73*", 1), ("73", r"\boxed{73;}", 1), ("73", r"\boxed{\textbf{73}}", 1),
    ("x+1", r"\boxed{x+1.}", 1), (r"\frac12", r"\boxed{**\frac{1}{2}**}", 1),
    ("7.3", r"\boxed{73.}", 0), ("73", r"\boxed{7.3.}", 0), ("6", r"\boxed{2*3}", 1),
    ("5", "2*3 is **5**", 1), ("24", r"\boxed{2*3*4}", 1), ("B", r"\boxed{\text{B.}}", 1),
    # full width, other currencies
    ("73", '\\boxed{\uff17\uff13}', 1), ("73", '\u7b54\u6848\uff1a\uff17\uff13', 1),
    ("73", '\u7b54\u6848\u662f73\u3002', 1), ("-3", '\\boxed{\uff0d3}', 1),
    ("3", '\\boxed{\uff0d3}', 0), ("(1,2)", '\\boxed{\uff081\uff0c2\uff09}', 1),
    ("73", '\\boxed{\u0667\u0663}', 0), ("18", '\\boxed{\u20ac18}', 1), ("73", "Answer:73", 1),
    ("18", "**Answer: \\$18 per day.**", 1),
    # a base is part of the answer
    ("1010_2", r"\boxed{1010_2}", 1), ("1010_2", r"\boxed{1010}", 0),
    ("1010_2", r"\boxed{1010_3}", 0), ("1010_{2}", r"\boxed{1010_{(2)}}", 1),
    (r"1010_{\text{two}}", r"\boxed{1010_2}", 1), ("1010_2", r"\boxed{10_{10}}", 0),
    ("1010", r"\boxed{1010_{10}}", 1), ("1010", r"\boxed{1010_2}", 0), ("1010_2", "$1010_2$", 1),
    ("1010_2", "The answer is 1010", 0), ("1010_2", r"\boxed{10 = 1010_2}", 1),
    ("2A_{16}", r"\boxed{2A_{16}}", 1), ("2A_{16}", r"\boxed{2B_{16}}", 0),
    ("x_1", r"\boxed{x_1}", 1), ("a_2", r"\boxed{a_3}", 0),
    # equations
    ("7", r"\boxed{8 = 7}", 0), ("7", r"\boxed{x = 8 = 7}", 0), ("7", r"\boxed{2+4=7}", 0),
    ("5", r"\boxed{\sqrt{16} = 5}", 0), ("7", r"\boxed{3+4 = 7}", 1),
    ("7", r"\boxed{x = 5 + 2 = 7}", 1), ("7", r"\boxed{f(2) = 7}", 1), ("7", r"\boxed{a+b = 7}", 1),
    ("120", r"\boxed{5! = 120}", 1), ("70", r"\boxed{\binom{8}{4} = 70}", 1),
    ("10^{400}", r"\boxed{10^{200} \cdot 10^{200} = 10^{400}}", 1),
    ("10^{400}", r"\boxed{10^{399} = 10^{400}}", 0),
    ("25", r"\boxed{\text{Area} = 25}", 1), ("0", r"\boxed{3x-y+13=0}", 0),
    ("3x-y+13=0", r"\boxed{y=3x+13}", 1), ("5", r"\boxed{x^2 + 2 = 5}", 0),
    ("0.667", r"\boxed{\frac23 = 0.667}", 1), ("0.667", r"\boxed{\frac13 = 0.667}", 0),
    ("120", r"\boxed{2 \text{ hours} = 120 \text{ minutes}}", 1),
    ("2", r"\boxed{2 \text{ hours} = 120 \text{ minutes}}", 0),
    # words are no products of letters
    ("no", r"\boxed{on}", 0), ("no", r"\boxed{\text{on}}", 0), (r"\text{no}", r"\boxed{on}", 0),
    ("no", r"\boxed{No}", 1), ("No", r"\boxed{\text{no.}}", 1), ("no", "no", 1),
    ("east", r"\boxed{\text{seat}}", 0), ("saw", r"\boxed{was}", 0), ("AB", r"\boxed{BA}", 0),
    ("xy", r"\boxed{yx}", 1), ("ab", r"\boxed{a \cdot b}", 1), ("mgh", r"\boxed{gmh}", 1),
    ("no solution", r"\boxed{\text{No solution}}", 1), ("no solution", r"\boxed{0}", 0),
    ("December 25", r"\boxed{\text{December 25}}", 1), ("25", r"\boxed{\text{December 25}}", 0),
    ("Monday", "The answer is Monday", 0), ("A or B", r"\boxed{A, B}", 1),
    # intervals and inequalities
    (r"x \le 5", r"\boxed{(-\infty, 5]}", 1), (r"x \le 5", r"\boxed{(-\infty, 5)}", 0),
    (r"(-\infty, 5]", r"\boxed{x \le 5}", 1), (r"(-\infty, 5]", r"\boxed{x < 5}", 0),
    ("[1,3]", r"\boxed{1 \le x \le 3}", 1), (r"1 \le x < 3", r"\boxed{[1,3]}", 0),
    (r"x \in (1,3)", r"\boxed{1 < x < 3}", 1), (r"(3,\infty)", r"\boxed{x < 3}", 0),
    (r"(-\infty,1)\cup(3,\infty)", r"\boxed{x<1 \text{ or } x>3}", 1),
    (r"x<1 \text{ or } x>3", r"\boxed{(-\infty,1)\cup(3,\infty)}", 1),
    (r"(-\infty,1)\cup(3,\infty)", r"\boxed{x<1 \text{ or } x>4}", 0),
    (r"(-\infty,2)\cup(2,\infty)", r"\boxed{x \ne 2}", 1), ("5", r"\boxed{x > 5}", 0),
    # numbers in words, mixed numbers, units
    ("5000000", r"\boxed{5\text{ million}}", 1), ("5", r"\boxed{5 million}", 0),
    ("2500000", "2.5 million people", 1), ("18", r"\boxed{18 thousand}", 0),
    ("1.5", r"\boxed{1 1/2}", 1), ("1 1/2", r"\boxed{1}", 0), ("11/2", r"\boxed{1 1/2}", 0),
    ("-3/2", r"\boxed{-1 1/2}", 1), ("6", r"\boxed{2(3) = 6}", 1), ("5", r"\boxed{(2)(3)}", 0),
    ("3", r"\boxed{\log_2(8)}", 1), ("18", r"\boxed{\text{18 dollars}}", 1),
    ("30", '\\boxed{30\u00b0}', 1), ("12:00", r"\boxed{12:00}", 1), ("12:00", r"\boxed{1:00}", 0),
    # small numbers, dots
    ("1e-7", r"\boxed{2e-7}", 0), ("1e-7", r"\boxed{0}", 0), ("0", r"\boxed{4e-7}", 0),
    (r"1.6\times 10^{-19}", r"\boxed{9.1\times 10^{-31}}", 0),
    (r"1.6\times 10^{-19}", r"\boxed{1.60\times 10^{-19}}", 1),
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", 0), ("e^{-50}", r"\boxed{e^{-51}}", 0),
    (r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}", 1), ("1/3", r"\boxed{0.333333}", 1),
    ("0", r"\boxed{(\sqrt2+1)(\sqrt2-1)-1}", 1), ("x=1e-7", r"\boxed{2e-7}", 0),
    (r"1, 2, \ldots, n", r"\boxed{1, 3, 5, \ldots, 2n-1}", 0),
    (r"1, 2, \ldots, n", r"\boxed{1,2,\dots,n}", 1), ("5", "Hmm... it is 5", 1),
    ("4", "$18... so she pays $4", 1),
]  # fmt: skip
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


@pytest.mark.parametrize(("reference", "response", "value"), [*MATH, *WRITTEN])
def test_math_as_a_person_would_grade(
    equal: Any, reference: str, response: str, value: float
) -> None:
    assert equal(response, asked(reference)).value == value


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


# By the answer: what is equal to it, and what is not.
GSM8K: dict[str, tuple[list[str], list[str]]] = {
    "7": (
        [
            "3+4=7\n#### 7", "####7", "#### 7.", "#### 7%", "#### 3\nno: #### 7", "**#### 7**",
            # Markdown, LaTeX and full width
            *map("#### {}".format, (
                "**7**", "`7`", "*7*", "__7__", "**7**.", " **7 apples**", "**7** apples", "**7",
                "(7)", r"\$7", "**$7**", r"$\boxed{7}$", r"\boxed{7}", r"\(7\)", "\u20ac7",
                "\uff17", "7,", "7 (3 + 4)", "7 - done",
            )),
            "#### 7\n" + "The steps above confirm that 3 and 4 are right. " * 9,
            "Example: #### 5\nMine: #### 7",
        ],
        [
            "#### 7\nno: #### 3", "the answer is 7", "", "####\n7",
            "#### \u0667",  # a digit of another script
            # what goes on is no number
            *map("#### {}".format, (
                "7 * 6 = 42", "7*6", "7**2", "7^2", "7 + 1", "7-1", "7:30", "7 or 8", "7 = 8",
                "7 1/2", "7,5", "7 million", "7\u00d76", "**7** * 6", r"7 \times 6",
            )),
        ],
    ),
    "1234.5": (["#### 1,234.50"], []),
    "1234": (["#### 1\u2009234", r"#### 1\,234", "#### 1{,}234"], ["#### 1, 234", "#### 1 2 34"]),
    "1,234,567": (["#### 1\u00a0234\u202f567", "#### 12,34,567"], ["#### 12345\u2009678"]),
    "18": (["#### $18.00"], []),
    "-5": (["#### -$5", "#### $-5"], []),
    "5": ([], ["#### --5"]),
    "-3": (["#### \u22123"], []),
    "\u22123": (["#### -3"], ["#### 3"]),
    "-7": (["#### **-7**"], []),
    "73": (["####\u3000\uff17\uff13"], []),
    "7000": (["#### 7 000"], []),
    "7000000": (["#### 7 million"], []),
    "1000": (["#### 1e3"], ["#### 1e3x"]),
    "0.50": (["#### .5"], []),
    "0.15": (["#### 1.5E-1"], []),
    "0.10000000000000001": ([], ["#### 0.1"]),  # equal as floats, not as numbers
    "1": ([], ["#### 1/2", "#### 1e5", "#### 1,234abc", "#### 1e"]),
    "12": ([], ["#### 12abc", "#### 12.5x"]),
    "123": ([], ["#### 1\u200923"]),  # two digits are no group of three
    "42": ([], ["#### 7 * 6 = 42"]),
    "75": ([], ["#### 7,5"]),
}  # fmt: skip


@pytest.mark.parametrize("answer", GSM8K)
def test_gsm8k_reads_numbers_as_models_write_them(answer: str) -> None:
    for value, responses in zip((1.0, 0.0), GSM8K[answer], strict=True):
        found = {each: gsm8k(each, asked(f"steps\n#### {answer}")) for each in responses}
        assert found == dict.fromkeys(responses, value)


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


def test_prompts_have_all_answers(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    path = write(tmp_path, json.dumps({"question": "?", "answer": ["7", 8]}))
    (prompt,) = load_prompts(path, tokenizer, columns=Columns(), max_prompt_tokens=100).prompts
    assert (prompt.answer, prompt.answers, prompt.accepted) == ("7", ("7", "8"), ("7", "8"))
    assert replace(prompt, answers=()).accepted == ("7",)
