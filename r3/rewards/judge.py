"""The prompt of an LLM judge and the score in its reply, be it a server or the policy itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

from r3.config import RewardConfig
from r3.rewards import checked, problem
from r3.runtime.workers import CallError
from r3.types import Prompt

TEMPLATE = """You are a strict grader. Compare the response with the reference answer.

Question:
{question}

Reference answer:
{answer}

Response:
{response}

Reply with a JSON object {"score": s} and nothing else: \
s is 1 when the response's final answer is right, 0 when it is wrong."""

_PLACES = re.compile(r"\{(question|answer|response)\}")
SHOWN = 400
"""Characters of a judge's reply in messages."""

# Characters at the end of a judge's reply in which the score is looked for: enough for any JSON
# object with a score, and few enough that no text keeps the event loop busy.
_LOOKED_AT = 20_000


def template_of(settings: RewardConfig) -> str:
    """Return the judge's prompt: `reward.prompt_file`, or the built-in one.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not (path := settings.prompt_file):
        return TEMPLATE
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read: {error}"
        raise problem(path, rule, "a text file", "reward.prompt_file") from None


def filled(template: str, response: str, prompt: Prompt) -> str:
    """Fill in {question}, {answer} and {response}, all at once: none is replaced inside another.

    The question is the conversation before the response: the user's only message, or all messages
    with their roles.
    """
    messages = [message for message in prompt.messages if message["role"] != "system"]
    if len(messages) == 1:
        question = str(messages[0]["content"])
    else:
        question = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    values = {"question": question, "answer": prompt.answer, "response": response}
    return _PLACES.sub(lambda found: values[found[1]], template)


def parsed(text: str, pattern: str = "") -> float:
    """Return the score in a judge's reply.

    It is "score" of the last JSON object that has one, or the last match of the pattern's group, in
    the last 20,000 characters.

    Raises:
        CallError: there is no score. The message quotes the reply.
    """
    quoted = repr(text[-SHOWN:] if isinstance(text, str) else text)
    if not isinstance(text, str):
        raise CallError(f"the judge's reply is not text: {quoted}")
    text = text[-_LOOKED_AT:]
    if pattern:
        found = re.findall(pattern, text)
        try:
            return checked(float(found[-1]))
        except (IndexError, ValueError):
            raise CallError(
                f"the judge's reply has no number that reward.pattern {pattern!r} matches: {quoted}"
            ) from None
    decoder, scores, start = json.JSONDecoder(), [], text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, start + 1
        if isinstance(value, dict) and type(value.get("score")) in (int, float):
            scores.append(value["score"])
        start = text.find("{", end)
    if not scores:
        raise CallError(f'the judge\'s reply has no JSON object {{"score": number}}: {quoted}')
    return checked(scores[-1])
