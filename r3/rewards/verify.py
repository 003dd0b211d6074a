"""Compare mathematical answers with `math-verify`: 1/2, 0.5 and \\frac{1}{2} are equal.

It runs in worker processes: math-verify gives terms that the model wrote to sympy, which may
compute for hours. A response that sympy cannot read, or not in 5 s, is wrong and is counted. The
limits and catches of math-verify are off: they would turn a fault into a wrong answer uncounted.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from r3.data.numbers import plain
from r3.rewards import Score, compared
from r3.types import Prompt
from r3.user_code.calls import CallError

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
_LONGEST_NUMBER = 40  # digits that 6e23 may become; a larger power is written as one


def equal(response: str, prompt: Prompt) -> Score:
    """Return 1 if the final answer of the response equals a reference, else 0.

    The final answer is in the last \\boxed or \\fbox, else in $...$, or the last number; a
    response without any expression scores 0, and so does one that cannot be compared, which the
    metric `reward/math_unread` counts. The reference is the text after the last `####` of the
    row's answer, or all of it; of a solution with a box, the last box. `1\\,000` is 1000, and
    `1e-3` is 0.001, or e - 3 if that is equal.

    Raises:
        CallError: a reference has no expression.
    """
    from math_verify import parse, verify

    references = []
    for answer in prompt.accepted:
        said = answer.rpartition("####")[2].strip()
        # Bare LaTeX is only read between dollars, bare numbers anywhere.
        found = [_parsed(parse, f"${each}$") for each in _readings(said)]
        if all(isinstance(each, str) for each in found[0]):  # no expression, but perhaps a text
            found = [_parsed(parse, _final(said)) or found[0]]
        if not found[0]:
            raise CallError(
                f"the reference answer has no expression: {answer[-200:]!r}", again=False
            )
        references += found

    def value() -> float:
        readings = _readings(response) if _BOX.search(response) else [_final(response)]
        return float(
            any(
                verify(reference, found, timeout_seconds=None, raise_on_error=True)
                for found in filter(None, [_parsed(parse, each) for each in readings])
                for reference in references
            )
        )

    return compared("math", value, response)


def _parsed(parse: Any, text: str) -> Any:
    return parse(text, parsing_timeout=None, raise_on_error=True)


def _readings(text: str) -> list[str]:
    """Return the final answer in a text, and what it is if e is Euler's number."""
    return list(dict.fromkeys((_final(text), _final(text, euler=True))))


def _final(text: str, *, euler: bool = False) -> str:
    """Return the last box of a text, all of it without a box, nothing if the last is cut."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return _readable(text, euler=euler)
    last = boxes[-1]
    if not last[0].endswith("{"):  # \boxed 7
        return rf"\boxed{{{_readable(text[last.end()])}}}"
    depth, end = 1, last.end()
    while depth and end < len(text):
        depth += {"{": 1, "}": -1}.get(text[end], 0) * (text[end - 1] != "\\")
        end += 1
    inside = _readable(text[last.end() : end - 1], euler=euler)
    return rf"\boxed{{{inside}}}" if not depth else ""


def _readable(text: str, *, euler: bool = False) -> str:
    """Write numbers as math-verify reads them exactly: without gaps and powers of ten."""
    text = _EULER.sub(r"\1 e \2", text) if euler else text
    if found := _UNIT.fullmatch(text.strip()):
        text = rf"{found[1]} \text{{ {found[2]}}}"
    elif _SPACED.fullmatch(text.strip()):
        text = text.replace(" ", "")
    return _POWER.sub(_without_power, plain(text))


def _without_power(found: re.Match[str]) -> str:
    number = Decimal(found[1]).scaleb(int(found[2] or found[3] or found[4]))
    if abs(number.adjusted()) < _LONGEST_NUMBER:
        return f"{number:f}"
    exponent = number.adjusted()
    return rf"{number.scaleb(-exponent):f} \times 10^{{{exponent}}}"
