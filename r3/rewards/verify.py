"""Mathematical equality by `math-verify`: 1/2, 0.5 and \\frac{1}{2} are equal.

It runs in worker processes: math-verify gives terms that the model wrote to sympy, which may
compute for hours, and only a process can be stopped then. Its own time limits and catches are off:
they would turn a hang or a fault into a wrong answer without any message.
"""

from __future__ import annotations

import logging

from r3.runtime.workers import CallError
from r3.types import Prompt

# It warns at every call that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equal(response: str, prompt: Prompt) -> float:
    """Return 1 if the final answer of the response equals the reference, else 0.

    The final answer is in \\boxed, in $...$, or the last number; a response without any expression
    scores 0. The reference is the text after the last `####` of the row's answer, or all of it.

    Raises:
        CallError: the reference has no expression.
    """
    from math_verify import parse, verify

    text = prompt.answer.rpartition("####")[2].strip()
    # Bare LaTeX is only read between dollars, bare numbers anywhere.
    reference = parse(f"${text}$", parsing_timeout=None, raise_on_error=True) or parse(
        text, parsing_timeout=None, raise_on_error=True
    )
    if not reference:
        raise CallError(
            f"the reference answer has no expression: {prompt.answer[-200:]!r}", again=False
        )
    answer = parse(response, parsing_timeout=None, raise_on_error=True)
    return float(
        bool(answer) and verify(reference, answer, timeout_seconds=None, raise_on_error=True)
    )
