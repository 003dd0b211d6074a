"""Translate OpenAI's chat and completion API: requests to model arguments, messages to replies.

A message of the model with tool calls or reasoning is shown to the client as the API has it, these
beside the text. When it comes back unchanged, after the same messages, it is what was sampled
again: else the chat template would render it otherwise, and the conversation would begin a new
token sequence.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from r3.data.conversation import read_message
from r3.envs.workflow import Completion, Model, ModelMessage
from r3.errors import Fault

MODEL = "policy"
"""Name of the model."""

_REPLACEMENT = "\ufffd"  # stands for bytes that are no character
_SPACE = "\u2581"  # stands for a space in vocabularies of SentencePiece

_SAMPLING = {"temperature": float, "top_p": float, "top_k": int}
_TAKEN = {
    *("model", "max_tokens", "stop", "stream", "stream_options", "train", "logprobs"),
    "return_token_ids",
    *_SAMPLING,
}
_CHAT = {"messages", "tools", "tool_choice", "max_completion_tokens"}
# Labels of the API, without influence on what is sampled. A call's seed is derived from the run's.
_IGNORED = {
    *("metadata", "prompt_cache_key", "safety_identifier", "seed", "service_tier", "store", "user"),
}
# What may only have the value that it has by default.
_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "suffix": "",
    "top_logprobs": 0,
}


_LONGEST_ERROR = 500  # characters; what is refused may be an image


class ApiError(Exception):
    """An error of the API: HTTP status, text, and the API's own code and parameter."""

    def __init__(
        self, status: int, text: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        text = f"{text[:_LONGEST_ERROR]} ..." if len(text) > _LONGEST_ERROR else text
        super().__init__(status, text)  # what unpickling gives to __init__
        self.status, self.code, self.param = status, code, param

    def __str__(self) -> str:
        return str(self.args[1])

    @property
    def body(self) -> dict[str, Any]:
        """The API's JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(kw_only=True, slots=True)
class Memory:
    """What an episode's replies had.

    Attributes:
        said: messages that the client saw otherwise than they were sampled, by their place (see
            `_place`) and by what it saw. Other conversations may have the same words.
        num_replies: replies so far.
        num_calls: tool calls so far.
    """

    said: dict[tuple[int, str], str] = field(default_factory=dict)
    num_replies: int = 0
    num_calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request, checked.

    Attributes:
        arguments: keyword arguments of `Model.chat` or `Model.complete`.
        unused: sampling settings that it has and that a call to be trained on cannot have.
        logprobs: whether the reply has log-probabilities.
        stream: whether the reply is a stream of events.
        usage: whether the stream ends with token counts.
        token_ids: whether the reply has the ids of the tokens, as vLLM's has.
    """

    arguments: dict[str, Any]
    unused: tuple[str, ...]
    logprobs: bool
    stream: bool
    usage: bool
    token_ids: bool


def chat_request(body: Mapping[str, Any], memory: Memory) -> Request:
    """Read the body of `/v1/chat/completions`.

    Raises:
        ApiError: it cannot be served.
    """
    _check_fields(body, _TAKEN | _CHAT)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    if (choice := body.get("tool_choice") or "auto") not in ("auto", "none"):
        text = f"tool_choice {choice!r}: only 'auto' and 'none' are supported"
        raise ApiError(400, text, param="tool_choice")
    tools = _typed(body, "tools", list) or []
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise ApiError(400, "tools must be a list of objects", param="tools")
    request = _request(body, logprobs=bool(_typed(body, "logprobs", bool)))
    most = _typed(body, "max_completion_tokens", int)
    plain: list[dict[str, Any]] = []
    place = _NOWHERE
    for message in messages:
        plain.append(_plain(message, place, memory))
        place = _place(place, plain[-1])
    request.arguments.update(
        messages=plain,
        tools=tools if choice == "auto" else [],
        max_tokens=request.arguments["max_tokens"] if most is None else most,
    )
    return request


def completion_request(body: Mapping[str, Any]) -> Request:
    """Read the body of `/v1/completions`.

    Raises:
        ApiError: it cannot be served.
    """
    _check_fields(body, _TAKEN | {"prompt"})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if not isinstance(prompt, str | list) or (
        isinstance(prompt, list) and not all(type(each) is int for each in prompt)
    ):
        raise ApiError(400, "prompt must be one text or one list of token ids", param="prompt")
    if _typed(body, "logprobs", int):
        text = "logprobs: only 0, the log-probabilities of the sampled tokens, is supported"
        raise ApiError(400, text, param="logprobs")
    request = _request(body, logprobs=body.get("logprobs") is not None)
    request.arguments["prompt"] = prompt
    return request


def chat_reply(message: ModelMessage, request: Request, memory: Memory, model: Model) -> list[Any]:
    """The reply to a chat request: one body, or the events of a stream."""
    completion = message.completion
    shown, calls = _shown(message, memory, request)
    logprobs = _logprobs(completion, model) if request.logprobs else None
    # A message that was cut may have lost its last call: "length", as OpenAI says.
    is_whole = completion.finish_reason == "stop"
    reason = "tool_calls" if calls and is_whole else completion.finish_reason
    if not request.stream:
        shown |= {"refusal": None} | ({"tool_calls": calls} if calls else {})
        choice = {"index": 0, "message": shown, "logprobs": logprobs, "finish_reason": reason}
        return _bodies("chat.completion", memory, [choice], request, completion)
    if calls:
        shown["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    choices = [
        {"index": 0, "delta": shown, "logprobs": logprobs, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason},
    ]
    return _bodies("chat.completion.chunk", memory, choices, request, completion)


def _logprobs(completion: Completion, model: Model) -> dict[str, Any]:
    """Return the log-probabilities of the sampled tokens as chat replies have them."""
    tokens = zip(completion.tokens, completion.logprobs, strict=True)
    listed = [
        {
            "token": model.token_bytes(token).decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(model.token_bytes(token)),
            "top_logprobs": [],
        }
        for token, logprob in tokens
    ]
    return {"content": listed, "refusal": None}


def completion_reply(
    completion: Completion, request: Request, memory: Memory, model: Model
) -> list[Any]:
    """The reply to a completion request: one body, or the events of a stream."""
    logprobs: Any = None
    if request.logprobs:
        pieces = [model.token_bytes(each).decode(errors="replace") for each in completion.tokens]
        logprobs = {"tokens": pieces, "token_logprobs": list(completion.logprobs)}
        logprobs |= {"top_logprobs": None, "text_offset": None}
    choice = {"index": 0, "text": _before_stop(completion.text, request), "logprobs": logprobs}
    choice["finish_reason"] = completion.finish_reason
    return _bodies("text_completion", memory, [choice], request, completion)


# What the sampling parameters of a request for tokens may only be: anything else would sample from
# another distribution than the policy's log-probabilities are taken of.
_PARAMETERS: dict[str, Any] = {
    "n": 1,
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "ignore_eos": False,
    "logit_bias": {},
    "bad_words": [],
}
_PARAMETERS_IGNORED = {
    *("seed", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
    *("include_stop_str_in_output", "routed_experts_prompt_start", "extra_args"),
}
_TOKENS_IGNORED = {"request_id", "cache_salt", "priority", "return_token_ids"}


def tokens_request(body: Mapping[str, Any]) -> Request:
    """Read the body of `/inference/v1/generate`, vLLM's request with token ids in and out.

    Raises:
        ApiError: it cannot be served.
    """
    parameters = _typed(body, "sampling_params", dict) or {}
    _check_fields(body, {"model", "token_ids", "sampling_params", "train"} | _TOKENS_IGNORED)
    known = {"max_tokens", "stop", "stop_token_ids", "logprobs", *_SAMPLING}
    _check_values(parameters, known | _PARAMETERS_IGNORED, _PARAMETERS)
    if (count := _typed(parameters, "logprobs", int)) not in (None, 0, 1):
        text = f"logprobs = {count}: only the sampled token's is returned, which 0 and 1 ask for"
        raise ApiError(400, text, param="logprobs")
    if not isinstance(body.get("token_ids"), list):
        raise ApiError(400, "token_ids must be a list of token ids", param="token_ids")
    request = _request(parameters | {"train": body.get("train")}, logprobs=count is not None)
    request.arguments["prompt"] = body["token_ids"]
    request.arguments["stop_tokens"] = _typed(parameters, "stop_token_ids", list) or []
    return request


def tokens_reply(
    completion: Completion, request: Request, memory: Memory, model: Model
) -> list[Any]:
    """Return the reply to a request for tokens, as the only item of a list."""
    choice = {
        "index": 0,
        "token_ids": list(completion.tokens),
        "logprobs": _logprobs(completion, model) if request.logprobs else None,
        "finish_reason": completion.finish_reason,
    }
    (body,) = _bodies("tokens", memory, [choice], request, completion)
    ids = {"request_id": body["id"], "prompt_token_ids": list(completion.prompt)}
    return [{**ids, "choices": body["choices"], "usage": body["usage"]}]


MODEL_ENTRY = {"id": MODEL, "object": "model", "created": 0, "owned_by": "r3"}
"""The only entry of `/v1/models`."""


def check_model(name: Any) -> None:
    """Raises `ApiError` for a model that is not there."""
    if name != MODEL:
        text = f"there is no model {name!r}; the policy is {MODEL!r} (OPENAI_MODEL)"
        raise ApiError(404, text, code="model_not_found", param="model")


def _check_fields(body: Mapping[str, Any], taken: set[str]) -> None:
    check_model(body.get("model"))
    _check_values(body, taken | _IGNORED, _DEFAULTS)


def _check_values(
    body: Mapping[str, Any], taken: Collection[str], defaults: Mapping[str, Any]
) -> None:
    for name, value in body.items():
        if value is None or name in taken:
            continue
        if name not in defaults:
            raise ApiError(400, f"{name} is not supported: leave it out", param=name)
        if value != defaults[name]:
            text = f"{name} = {value!r}: only {defaults[name]!r} is supported"
            raise ApiError(400, text, param=name)


def _typed(body: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a field; None if it is null or not there."""
    value = body.get(name)
    accepted = (int, float) if kind is float else kind
    if value is None or (isinstance(value, accepted) and (kind is bool) == isinstance(value, bool)):
        return value
    raise ApiError(400, f"{name} must be of type {kind.__name__}, and is {value!r}", param=name)


def _request(body: Mapping[str, Any], *, logprobs: bool) -> Request:
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) for each in stop):
        raise ApiError(400, "stop must be a text or a list of texts", param="stop")
    train = _typed(body, "train", bool) is not False
    given = {name: _typed(body, name, kind) for name, kind in _SAMPLING.items()}
    given = {name: value for name, value in given.items() if value is not None}
    options = _typed(body, "stream_options", dict) or {}
    return Request(
        arguments={
            "train": train,
            "stop": stop,
            "max_tokens": _typed(body, "max_tokens", int),
            **({} if train else given),
        },
        unused=tuple(given) if train else (),
        logprobs=logprobs,
        stream=bool(_typed(body, "stream", bool)),
        usage=bool(options.get("include_usage")),
        token_ids=bool(_typed(body, "return_token_ids", bool)),
    )


_NOWHERE = 0


def _place(before: int, message: Mapping[str, Any]) -> int:
    """The place in a conversation after a message; white space at its ends does not matter."""
    return hash((before, repr({**message, "content": (message.get("content") or "").strip()})))


def _plain(message: Any, place: int, memory: Memory) -> dict[str, Any]:
    """A message of a client in the form of `r3.data.conversation`."""
    try:
        plain = read_message(message, of_model=True)
    except Fault as fault:
        raise ApiError(400, f"a message {fault}", param="messages") from None
    calls = plain.get("tool_calls", [])
    if not all("id" in call for call in calls):
        raise ApiError(400, "tool_calls need an id each", param="messages")
    ids = [str(call["id"]) for call in calls]
    parsed = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    seen = _seen(plain["content"] or "", plain.get("reasoning"), ids, parsed)
    said = memory.said.get((place, seen))
    if said is not None and plain["role"] == "assistant":
        return {"role": "assistant", "content": said}
    return plain


def _seen(content: str, reasoning: Any, ids: Sequence[str], calls: Sequence[Any]) -> str:
    """What a client sees of a message, in one form; white space at the ends does not matter."""
    return repr((content.strip(), str(reasoning or "").strip(), tuple(ids), list(calls)))


def _before_stop(text: str, request: Request) -> str:
    """A text up to the string at which the request stopped it; the tokens of that stay sampled."""
    places = [text.find(each) for each in request.arguments["stop"] if each in text]
    return text[: min(places)] if places else text


def _shown(
    message: ModelMessage, memory: Memory, request: Request
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message and the tool calls that a client sees; reasoning has the name that vLLM uses."""
    said, text = message.parsed, message["content"]
    content = _before_stop(said.content, request)
    reasoning = said.reasoning and _before_stop(said.reasoning, request)
    calls = []
    for call in said.calls:
        memory.num_calls += 1
        # A text is what was no JSON.
        arguments = call["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": call["name"], "arguments": arguments}
        # Nine letters and digits, the same in every run: some templates show them, some check that.
        calls.append(
            {"id": f"call{memory.num_calls:05d}", "type": "function", "function": function}
        )
    ids = [str(call["id"]) for call in calls]
    parsed = [(call["name"], call["arguments"]) for call in said.calls]
    seen = _seen(content, reasoning, ids, parsed)
    place = functools.reduce(_place, request.arguments["messages"], _NOWHERE)
    if calls or reasoning or content != text or (place, seen) in memory.said:
        memory.said[place, seen] = text
    shown = {"role": "assistant", "content": None if calls and not content else content}
    return shown | ({"reasoning": reasoning} if reasoning else {}), calls


def _bodies(
    kind: str, memory: Memory, choices: list[Any], request: Request, completion: Completion
) -> list[Any]:
    """One body with token counts, or an event per choice and, if asked for, one with the counts."""
    head = {"id": f"reply-{memory.num_replies}", "object": kind, "created": int(time.time())}
    head["model"] = MODEL
    count = len(completion.tokens)
    usage = {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": count,
        "total_tokens": completion.prompt_tokens + count,
    }
    if request.token_ids:
        head |= {"prompt_token_ids": list(completion.prompt)}
        choices[0]["token_ids"] = list(completion.tokens)
    if not request.stream:
        return [head | {"choices": choices, "usage": usage}]
    events = [head | {"choices": [choice]} for choice in choices]
    return [*events, head | {"choices": [], "usage": usage}] if request.usage else events


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the UTF-8 bytes of a token, which may be part of a character."""
    text: str = tokenizer.decode([token])
    piece: str = tokenizer.convert_ids_to_tokens(token) or ""
    if _REPLACEMENT not in text:
        # SentencePiece leaves out a space at the beginning of what it decodes.
        spaces = len(piece) - len(piece.lstrip(_SPACE))
        return b" " * (spaces - len(text) + len(text.lstrip(" "))) + text.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # of SentencePiece
        return bytes.fromhex(byte[1])
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # Letters in the vocabularies of byte-level BPE, which have no control characters.
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    try:
        return bytes(byte_of[letter] for letter in piece)
    except KeyError:
        return text.encode()
