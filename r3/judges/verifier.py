"""Answers that others' code compares: `math` by math-verify, `gym` by the task of reasoning-gym.

To math-verify, 1/2, 0.5 and \\frac{1}{2} are equal. It runs in worker processes: terms that the
model wrote go to sympy, which may compute for hours. A response that sympy cannot read, or not in
5 s, is wrong and is counted. The limits and catches of math-verify are off: they would turn a fault
into a wrong answer uncounted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from r3.data.numbers import plain
from r3.rewards import Score, checked
from r3.runtime.terminal import say
from r3.types import Prompt
from r3.user_code.calls import CallError, own_copy
from r3.user_code.loading import time_limit

# It warns at every call that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{}]))")
_POWER = re.compile(
    r"""(?<![\w.}^])
        ([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))
        (?: [eE]([-+]?[0-9]{1,3})(?![\w.])
        | \s*(?:\\times|\\cdot|[\u00d7*])\s*10\s*\^\s*
          (?:\{\s*([-+]?[0-9]{1,3})\s*\}|([0-9])(?![0-9])) )""",
    re.VERBOSE,
)
# With a sum that has Euler's number: 2e-1.
_EULER = re.compile(r"(?<![\w.}^])([0-9]+)e([-+][0-9]+)(?![\w.])")
# A number and its unit in words, which LaTeX would take for a product of letters.
_UNIT = re.compile(r"([-+]?[0-9][0-9.,]*)\s+([A-Za-z]{3,}(?:\s+[A-Za-z]{2,})*)\.?")
_SPACED = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+")  # 10 000, which would be a product
_MIXED = re.compile(r"(?<![\w.^}])([0-9]+)(?:\\?[ ]|~)+([0-9]+/[0-9]+)(?![\w/])")  # 1 1/2
# A product, which math-verify would read as a mixed number: (2)(3) as 5.
_PRODUCT = re.compile(r"(?<![\w.}^])([0-9.]+|\([0-9.]+\))[ ]*\((-?[0-9.]+)\)")
_LONGEST_NUMBER = 40  # digits that 6e23 may become; a larger power is written as one
# A number that no space parts from what is before it, which math-verify would not see.
_ATTACHED = re.compile(r"(?<=[^\W\d_]:)(?=[-+]?[0-9])|(?<=[^\W\d_A-Za-z])(?=[-+]?[0-9])")

_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox)\s*\{([^{}]*)\}")
_DOTS = re.compile(r"\\[lc]?dots|\u2026|\.\.\.")
# Words with a vowel, which LaTeX would take for products of letters: `no` is one, `xy` is none.
_WORD = r"(?:(?!(?:or|and)\b)[^\W\d_]{2,})"
_WORDS = re.compile(rf"(?=.*[aeiou]){_WORD}(?:[ ,-]+(?:{_WORD}|[0-9]+))*", re.IGNORECASE)
_BASED = re.compile(
    r"([0-9.]{1,99}|(?=[A-F]*[0-9])[0-9A-F.]{1,99}(?=_16))_(?:base)?([0-9]+|[a-z]+)"
)
_BASES = {"two": "2", "three": "3", "five": "5", "seven": "7", "eight": "8", "ten": "10"}
_CLOCK = re.compile(r"[0-9]{1,2}:00")  # a division by zero to math-verify

_MEMBER = re.compile(r"\s*[A-Za-z]\s*\\in\b")  # x \in [1,3]
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_ARITHMETIC = re.compile(r"(?=.*[0-9])(?:[-+*/^().!\s{}0-9]|\\(?:[dt]?frac|sqrt|cdot|times|div))+")
_DECIMALS = re.compile(r"\s*[-+]?[0-9]*\.([0-9]+)\s*")
_CLOSE = 2e-6  # relative, of 1/3 and 0.333333


UNREAD = {name: f"reward/{name}_unread" for name in ("math", "gym")}
"""Metrics by the function: 1 for a response that could not be compared."""
_LIMIT_S = 5.0  # of one response, which takes milliseconds
_SAID: dict[str, str] = {}  # of this process: the first response that could not be compared


# No <answer> inside of another one: else the search to the end restarts at each.
_FINAL_ANSWER = re.compile(
    r"####[ \t]*([^\n]+)|<answer>((?:(?!<answer>).)+?)</answer>|\\boxed\{((?:[^{}]|\{[^{}]*\})+)\}",
    re.DOTALL,
)


def compared(name: str, value: Callable[[], float], response: str) -> Score:
    """Return what others' code makes of a response, or 0 if it fails or takes more than 5 s.

    Args:
        name: built-in function that asks, a key of `UNREAD`.
        value: compares the response.
        response: for the message.
    """
    try:
        return Score(checked(time_limit(value, _LIMIT_S, TimeoutError)), {UNREAD[name]: 0.0})
    except Exception as error:  # it raises anything for text that a model may write
        if name not in _SAID:
            _SAID[name] = f"{type(error).__name__}: {str(error)[:200]}"
            say(
                f"warning: {name} could not compare a response ({_SAID[name]}), which counts as "
                f"wrong; {UNREAD[name]} is the share of such responses. It ends with "
                f"{response[-200:]!r}",
                error=True,
            )
        return Score(0.0, {UNREAD[name]: 1.0})


def gym(response: str, prompt: Prompt) -> Score:
    """Return the score of the final answer by the scorer of the reasoning-gym task.

    Its scorers expect a bare answer: the text after the last `####`, or inside the last `<answer>`
    or `\\boxed`, else the whole response. Partial credit is the task's. A response for which the
    scorer fails or takes more than 5 s scores 0, which the metric `reward/gym_unread` counts.
    """
    from reasoning_gym.factory import get_score_answer_fn

    answers = _FINAL_ANSWER.findall(response)
    answer = next(filter(None, answers[-1])) if answers else response
    entry = own_copy(prompt.metadata["entry"])  # the scorers are others' code
    scorer = get_score_answer_fn(prompt.metadata["gym"])
    return compared("gym", lambda: float(scorer(answer.strip(), entry)), response)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """A final answer.

    Attributes:
        exact: its text if it is compared as text: with a base, dots, or a full hour; else "".
        words: its words, lower case; "" if it is something else.
        parsed: what math-verify makes of its readings.
    """

    exact: str
    words: str
    parsed: list[Any]


def equal(response: str, prompt: Prompt) -> Score:
    """Return 1 if the final answer of the response equals a reference, else 0.

    The final answer is in the last \\boxed or \\fbox, else in $...$, or the last number; a
    response without any expression scores 0, and so does one that cannot be compared, which the
    metric `reward/math_unread` counts. The reference is the text after the last `####` of the
    row's answer, or all of it; of a solution with a box, the last box. `1\\,000` is 1000, and
    `1e-3` is 0.001, or e - 3 if that is equal.

    Strict is better than lenient: words are compared as words (`on` is not `no`), a number with a
    base needs the same base, and an equation whose numbers differ (`8 = 7`) is no answer. Units and
    Markdown do not count.

    Raises:
        CallError: a reference has no expression.
    """
    references = []
    for answer in prompt.accepted:
        said = answer.rpartition("####")[2].strip()
        # Bare LaTeX is only read between dollars, bare numbers anywhere.
        parsed = [_parsed(f"${reading}$") for reading in _readings(said)]
        if all(isinstance(part, str) for part in parsed[0]):  # no expression, but perhaps a text
            parsed = [_parsed(_readings(said)[0]) or parsed[0]]
        if not parsed[0]:
            raise CallError(
                f"the reference answer has no expression: {answer[-200:]!r}", again=False
            )
        references.append(_answer(said, parsed, delimited=True))

    def value() -> float:
        readings = _readings(response)
        # Without a box, `2e - 1` is a sum and its last number.
        read = readings if _BOX.search(response) else readings[:1]
        answered = _answer(response, [_parsed(reading) for reading in read])
        return float(any(_same(reference, answered) for reference in references))

    return compared("math", value, response)


def _answer(text: str, parsed: list[Any], *, delimited: bool = False) -> _Answer:
    inside = _inside(text)
    if dollars := re.findall(r"\$([^$]+)\$", inside):
        inside = dollars[-1]
    delimited = delimited or bool(_BOX.search(text))  # dots of prose are not the answer's
    inside = _trimmed(_TEXT.sub(r" \1 ", plain(inside)))
    words = " ".join(inside.casefold().split()) if _WORDS.fullmatch(inside) else ""
    tight, exact = re.sub(r"[{}()\s]", "", inside), ""
    if match := _BASED.fullmatch(tight.rpartition("=")[2]):
        base = _BASES.get(match[2], match[2])
        exact = f"{match[1]}_{base}" if base != "10" else ""
    elif _CLOCK.fullmatch(tight) or (delimited and _DOTS.search(inside)):
        exact = _DOTS.sub("...", tight)
    return _Answer(
        exact=exact, words=words, parsed=[each for reading in parsed for each in reading]
    )


def _same(reference: _Answer, answer: _Answer) -> bool:
    from math_verify import verify

    if reference.exact or answer.exact:
        return reference.exact == answer.exact
    if reference.words and answer.words:
        return reference.words == answer.words
    limits = {"timeout_seconds": None, "raise_on_error": True}
    return any(
        verify(expected, each, allow_set_relation_comp=True, **limits)
        and not _is_chance(expected, each)
        for expected in reference.parsed
        for each in answer.parsed
    )


def _is_chance(expected: Any, answered: Any) -> bool:
    """Whether math-verify takes two for equal that are not.

    Its tolerance is absolute, so any two numbers below 1e-15 are equal to it; of an equation it
    takes the right side, which is 0 where an equation of unknowns is no answer.
    """
    from math_verify.grader import is_equation, take_first_relation, unwrap_eq
    from sympy import PrecisionExhausted

    if is_equation(answered) and not is_equation(expected):
        left = take_first_relation(answered).lhs.doit()
        if getattr(left, "is_Add", False) and left.free_symbols and left.as_coeff_Add()[0]:
            return True
    one, other = unwrap_eq(expected), unwrap_eq(answered)
    if not (getattr(one, "is_comparable", False) and getattr(other, "is_comparable", False)):
        return False
    size = max(abs(one.evalf(8)), abs(other.evalf(8)))
    try:
        return bool(size < 1 and abs((one - other).evalf(8, strict=True)) > _CLOSE * size)
    except PrecisionExhausted:  # of what is 0
        return False


def _parsed(text: str) -> list[Any]:
    from math_verify import parse
    from sympy import FiniteSet, Union
    from sympy.core.relational import Equality, Relational

    values: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True) if text else []
    for place, value in enumerate(values):  # x < 1 or x > 3
        if isinstance(value, FiniteSet) and re.search(r"\bor\b", text):
            parts = value.args
            if all(isinstance(x, Relational) and not isinstance(x, Equality) for x in parts):
                values[place] = Union(*(part.as_set() for part in parts))
    return values


def _readings(text: str) -> list[str]:
    """Return the final answer in a text, and what it is if e is Euler's number."""
    box = r"\boxed{%s}" if _BOX.search(text) else "%s"
    inside = _inside(text)
    read = [_readable(inside), _readable(inside, euler=True)]
    return list(dict.fromkeys(box % reading if reading else "" for reading in read))


def _inside(text: str) -> str:
    """Return the last box of a text, all of it without a box, nothing if the last is cut."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return text
    last = boxes[-1]
    if not last[0].endswith("{"):  # \boxed 7
        return text[last.end()]
    depth, end = 1, last.end()
    while depth and end < len(text):
        depth += {"{": 1, "}": -1}.get(text[end], 0) * (text[end - 1] != "\\")
        end += 1
    return text[last.end() : end - 1] if not depth else ""


def _trimmed(text: str) -> str:
    """A text without what ends a sentence or a line."""
    return re.sub(r"(?:\s|[,;:]|(?<!\.)\.|\\\\|\\[,;: ])+\Z", "", text.strip())


def _readable(text: str, *, euler: bool = False) -> str:
    """Write an answer as math-verify reads it exactly: numbers without gaps and powers of ten."""
    text = _EULER.sub(r"\1 e \2", text) if euler else text
    text = _PRODUCT.sub(r"\1*(\2)", _MEMBER.sub("", plain(text)))
    text = _last_side(_trimmed(text))
    if whole := _TEXT.fullmatch(text):
        text = rf"\text{{{_trimmed(whole[1])}}}"
    if unit := _UNIT.fullmatch(_TEXT.sub(r" \1 ", text).strip()):
        text = rf"{unit[1]} \text{{ {unit[2]}}}"
    elif _SPACED.fullmatch(text.strip()):
        text = text.replace(" ", "")
    text = _MIXED.sub(r"(\1+\2)", text).replace("\u00b0", r"^\circ")
    return _ATTACHED.sub(" ", _POWER.sub(_without_power, text))


def _last_side(text: str) -> str:
    """Return what an equation of numbers ends with; nothing if its numbers differ.

    An equation with names stays. Numbers with units are not compared: 2 hours are 120 minutes.
    """
    if len(sides := _EQUALS.split(text)) < 2:
        return text
    numbers = [side for side in sides if _ARITHMETIC.fullmatch(side)]
    values = [value for side in numbers for value in _parsed(f"${side}$")[:1]]
    rounding = [10.0 ** -len(match[1]) for match in map(_DECIMALS.fullmatch, numbers) if match]
    if len(numbers) > 1 and all(getattr(value, "is_comparable", False) for value in values):
        allowed = max([1e-9 * abs(values[-1].evalf(15)), *rounding])
        if any(abs((value - values[-1]).evalf(15)) > allowed for value in values):
            return ""
    known = all(_ARITHMETIC.fullmatch(_TEXT.sub("", side)) for side in sides)
    return sides[-1] if known else text


def _without_power(match: re.Match[str]) -> str:
    number = Decimal(match[1]).scaleb(int(match[2] or match[3] or match[4]))
    if abs(number.adjusted()) < _LONGEST_NUMBER:
        return f"{number:f}"
    exponent = number.adjusted()
    return rf"{number.scaleb(-exponent):f} \times 10^{{{exponent}}}"
