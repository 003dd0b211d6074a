"""The prompt of an LLM judge and the score in its reply, for a server or the policy as judge."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import regex

from r3.config import RewardConfig
from r3.envs.tool_calls import without_thoughts
from r3.rewards import checked
from r3.types import Message, Prompt
from r3.user_code.calls import CallError
from r3.user_code.loading import problem

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
_PATTERN_S = 1.0  # of the user's regular expression in one reply

_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
# The end of an object that is no JSON, mostly for a \ of LaTeX in another value.
_LAST_SCORE = re.compile(rf'(?<!\\)"score"\s*:\s*"?({_NUMBER})"?[\s}}`]*\Z', re.ASCII)


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
        raise problem("reward.prompt_file", path, rule, "a text file") from None


def filled(template: str, response: str, prompt: Prompt) -> str:
    """Fill in {question}, {answer} and {response}, all at once: none is replaced inside another.

    The question is the conversation before the response: the user's only message, or all messages
    with their roles and tool calls, after the tools.
    """
    if [each["role"] for each in prompt.messages] == ["user"] and not prompt.tools:
        question = str(prompt.messages[0]["content"])
    else:
        tools = [f"tools: {_json(prompt.tools)}"] if prompt.tools else []
        question = "\n\n".join([*tools, *map(_shown, prompt.messages)])
    values = {"question": question, "answer": " or ".join(prompt.accepted), "response": response}
    return _PLACES.sub(lambda found: values[found[1]], template)


def _shown(message: Message) -> str:
    calls = [_json(call.get("function", call)) for call in message.get("tool_calls") or ()]
    said = "\n".join(filter(None, [message.get("content"), *calls]))
    return f"{message['role']}: {said}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def parsed(text: str, pattern: str = "") -> float:
    """Return the score in a judge's reply.

    It is "score" of the last JSON object that has one, or the last match of the pattern's group, in
    the last 20,000 characters. What the judge thinks, in `<think>`, does not count.

    Raises:
        CallError: there is no score. The message quotes the reply.
    """
    quoted = repr(text[-SHOWN:] if isinstance(text, str) else text)
    if not isinstance(text, str):
        raise CallError(f"the judge's reply is not text: {quoted}")
    text = without_thoughts(text)[-_LOOKED_AT:]
    if pattern:
        try:
            found = regex.findall(pattern, text, timeout=_PATTERN_S)
        except TimeoutError:
            raise CallError(
                f"reward.pattern {pattern!r} takes longer than {_PATTERN_S:g} s on the judge's "
                f"reply: {quoted}",
                again=False,
            ) from None
        try:
            return checked(float(found[-1]))
        except (IndexError, ValueError):
            raise CallError(
                f"the judge's reply has no number that reward.pattern {pattern!r} matches: {quoted}"
            ) from None
    # strict: line breaks inside of a text, which judges write
    decoder, score, read, start = json.JSONDecoder(strict=False), None, 0, text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, start + 1
        if isinstance(value, dict) and (found := _number(value.get("score"))) is not None:
            score, read = found, end
        start = text.find("{", end)
    if last := _LAST_SCORE.search(text, read):
        score = float(last[1])
    if score is None:
        raise CallError(f'the judge\'s reply has no JSON object {{"score": number}}: {quoted}')
    return checked(score)


def _number(value: Any) -> float | None:
    """A score as judges write it: a number, or the text of one."""
    if isinstance(value, str) and re.fullmatch(_NUMBER, value.strip(), re.ASCII):
        return float(value)
    return value if type(value) in (int, float) else None
