"""An LLM as judge: its prompt, the score in its reply, and a server that replies.

A server is any with OpenAI's chat completions. All requests share one event loop, at most
`reward.max_connections` in flight. Status 408, 409, 429 and 5xx, failed connections and time-outs
are retried `reward.retries` times, after `reward.backoff_s`, twice as long each time, or as long as
Retry-After asks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import regex

from r3.config import HIDDEN, RewardConfig
from r3.config.arguments import keyword_arguments
from r3.errors import ConfigError
from r3.rewards import checked
from r3.types import Message, Prompt
from r3.user_code.calls import CallError

TEMPLATE = """You are a strict grader. Compare the response with the reference answer.

Question:
{question}

Reference answer:
{answer}

Response:
{response}

Reply with a JSON object {"score": s} and nothing else: \
s is 1 when the response's final answer is right, 0 when it is wrong."""

_THOUGHT_MARKS = re.compile("</?think>")
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


_LONGEST_WAIT_S = 300.0  # of Retry-After; a server that asks for more is tried again after that
_OPEN_QUERY = ("api-version", "api_version")  # what may follow an address: Azure's version
_LARGEST_BODY = 4 << 20  # bytes; a long completion has some ten thousand


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
        raise ConfigError.of("reward.prompt_file", path, rule, "a text file") from None


def filled(template: str, response: str, prompt: Prompt) -> str:
    """Fill in {question}, {answer} and {response}, all at once: none is replaced inside another.

    The question is the conversation before the response: the user's only message, or all messages
    with their roles and tool calls, after the tools.
    """
    if [message["role"] for message in prompt.messages] == ["user"] and not prompt.tools:
        question = str(prompt.messages[0]["content"])
    else:
        tools = [f"tools: {_json(prompt.tools)}"] if prompt.tools else []
        question = "\n\n".join([*tools, *map(_shown, prompt.messages)])
    values = {"question": question, "answer": " or ".join(prompt.accepted), "response": response}
    return _PLACES.sub(lambda match: values[match[1]], template)


def _shown(message: Message) -> str:
    calls = [_json(call.get("function", call)) for call in message.get("tool_calls") or ()]
    said = "\n".join(filter(None, [message.get("content"), *calls]))
    return f"{message['role']}: {said}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def without_thoughts(text: str) -> str:
    """Return a text without what is in `<think>`; a thought ends at `</think>` or with
    the text, and begins the text before a `</think>` whose beginning was in the prompt."""
    said: list[str] = []
    thinks, start = False, 0
    for mark in _THOUGHT_MARKS.finditer(text):
        if mark[0] == "</think>":
            said, thinks, start = said if thinks else [], False, mark.end()
        elif not thinks:
            said.append(text[start : mark.start()])
            thinks = True
    return "".join([*said, "" if thinks else text[start:]])


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
            numbers = regex.findall(pattern, text, timeout=_PATTERN_S)
        except TimeoutError:
            raise CallError(
                f"reward.pattern {pattern!r} takes longer than {_PATTERN_S:g} s on the judge's "
                f"reply: {quoted}",
                again=False,
            ) from None
        try:
            return checked(float(numbers[-1]))
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
        if isinstance(value, dict) and (number := _number(value.get("score"))) is not None:
            score, read = number, end
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


class ChatJudge:
    """Asks the server at `reward.url` to score responses."""

    def __init__(self, settings: RewardConfig) -> None:
        """Read the judge's prompt and the key.

        Raises:
            ConfigError: `reward.prompt_file` or the environment variable of the key is missing.
        """
        self._settings = settings
        self._template = template_of(settings)
        self._headers = {}
        self._key = ""
        if name := settings.api_key_env:
            self._key = _key(name)
            self._headers = {"Authorization": f"Bearer {self._key}"}
        path, mark, query = _checked_url(settings.url).partition("?")
        if query and self._key:
            self._headers = {"api-key": self._key}  # Azure, where Bearer is another kind of token
        self._url = f"{path.rstrip('/')}/chat/completions{mark}{query}"
        # A proxy could not reach the loopback of this machine.
        self._mounts = {f"all://{_host(path)}": None} if _is_loopback(_host(path)) else {}
        # a client belongs to the loop it was made in
        self._clients: dict[asyncio.AbstractEventLoop, Any] = {}

    async def score(self, response: str, prompt: Prompt) -> float:
        """Return the server's score of a response.

        Raises:
            CallError: the server refused, or its reply holds no score. The message quotes it.
        """
        import httpx

        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # The pool of calls limits connections and time.
            limits = httpx.Limits(
                max_connections=None, max_keepalive_connections=self._settings.max_connections
            )
            self._clients[loop] = httpx.AsyncClient(
                headers=self._headers, limits=limits, timeout=None, mounts=self._mounts
            )
        fields = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": filled(self._template, response, prompt)}],
            "temperature": 0.0,
            "max_tokens": self._settings.max_tokens,
            **keyword_arguments(self._settings.request),
        }
        body = {name: value for name, value in fields.items() if value is not None}
        try:
            async with self._clients[loop].stream("POST", self._url, json=body) as answer:
                content = await self._body(answer)
        except httpx.HTTPError as error:
            raise CallError(f"{self._url}: {type(error).__name__}: {error}") from error
        shown = self._shown(content.decode(errors="replace"))
        if answer.status_code != 200:
            passes = answer.status_code in (408, 409, 429) or answer.status_code >= 500
            raise CallError(
                f"{self._url} answered {answer.status_code}: {shown}",
                again=passes,
                wait_s=retry_after(answer.headers.get("retry-after", "")),
            )
        try:
            choice = json.loads(content)["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CallError(f"{self._url} sent no chat completion: {shown}") from error
        if reason in ("length", "content_filter"):  # a number in it may be cut, or not the score
            raise CallError(
                f"the judge's reply is not whole (finish_reason {reason!r}); reward.max_tokens = "
                f"{self._settings.max_tokens}: {shown}",
                again=False,
            )
        return parsed(text, self._settings.pattern)

    async def _body(self, answer: Any) -> bytes:
        """Read a server's answer, however slowly it comes; the pool of calls limits the time."""
        content = bytearray()
        async for part in answer.aiter_bytes():
            content += part
            if len(content) > _LARGEST_BODY:
                raise CallError(f"{self._url} sent more than {_LARGEST_BODY} bytes")
        return bytes(content)

    def _shown(self, text: str) -> str:
        """The start of a server's answer for a message; some servers repeat the key they got."""
        return (text.replace(self._key, HIDDEN) if self._key else text)[:SHOWN]


def _key(name: str) -> str:
    """The key in an environment variable; its value is in no message.

    Raises:
        ConfigError: the variable is not set, or its value cannot be sent.
    """
    key = os.environ.get(name, "")
    if not key:
        rule = "is not set in the environment"
        raise ConfigError.of("reward.api_key_env", name, rule, f"export {name}=...")
    bad = next((i for i, letter in enumerate(key) if not "!" <= letter <= "~"), None)
    if bad is not None:
        rule = f"character {bad + 1} of its {len(key)} cannot stand in an HTTP header"
        fix = "look for a space, a line end or a letter that is not ASCII in the variable"
        raise ConfigError.of("reward.api_key_env", name, rule, fix)
    return key


def _checked_url(url: str) -> str:
    """An address without secrets that can be called.

    Raises:
        ConfigError: it cannot be called, or holds a user name, a password or a query that may be
            secret.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        query = parse_qsl(parts.query, keep_blank_values=True) if parts.query else []
        has_secret = "@" in parts.netloc or not all(name in _OPEN_QUERY for name, _ in query)
    except ValueError as error:
        # What stands before an @ may be a password.
        rule = f"is no address ({error})"
        shown = url.rpartition("@")[2]
        raise ConfigError.of("reward.url", shown, rule, "http://HOST:PORT/v1") from None
    if has_secret:
        shown = f"{parts.scheme}://{parts.hostname}{f':{port}' if port else ''}{parts.path}"
        rule = (
            "has a user name, a password or a query other than api-version, which R3 would write "
            "into config.yaml"
        )
        fix = "put the key into an environment variable and name that in reward.api_key_env"
        raise ConfigError.of("reward.url", shown, rule, fix)
    return url


def _host(url: str) -> str:
    """The host of an address as httpx's mounts name it."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def retry_after(header: str) -> float:
    """Return Retry-After in seconds; 0 if it is a date, which the back-off replaces."""
    return min(float(header), _LONGEST_WAIT_S) if re.fullmatch(r"\d{1,9}", header) else 0.0
