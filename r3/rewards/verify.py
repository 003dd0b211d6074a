"""Mathematical equality by `math-verify`: 1/2, 0.5 and \\frac{1}{2} are one answer. Runs in worker processes.

It hands terms of the model's making to sympy, which may compute for hours: only a process can be stopped then.
Its own time limits and catches are off: they would turn a hang or a fault into a wrong answer without a word.
"""

from __future__ import annotations

import logging

from r3.runtime.workers import CallError
from r3.types import Prompt

logging.getLogger("math_verify").setLevel(
    logging.ERROR
)  # warns at every call that its time limits are off


def equal(response: str, prompt: Prompt) -> float:
    """1 when the response's final answer (in \\boxed, in $...$, or the last number) equals the reference, else 0.

    The reference is what follows the last `####` of the row's answer, or all of it. A response without any expression is 0.

    Raises:
        CallError: no expression can be read in the reference.
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
