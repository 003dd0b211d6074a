"""Two parts of a reward: is the number right, and is the response short?"""

import re

FINAL = re.compile(r"####\s*(-?\d+)")


def right(response, prompt):
    """1 if the last `#### number` of the response is that of the reference answer, else 0."""
    found, expected = FINAL.findall(response), FINAL.findall(prompt.answer)
    if not expected:
        # A failure, not a silent 0: R3 then stops and names the prompt.
        raise ValueError(f"the reference answer has no '#### number': {prompt.answer!r}")
    return float(bool(found) and found[-1] == expected[-1])


def brief(response, prompt):
    """1 for an empty response, 0 from 100 characters on, linear between."""
    return max(0.0, 1.0 - len(response) / 100)
