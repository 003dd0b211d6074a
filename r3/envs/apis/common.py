"""What the APIs share: errors, and how the fields of a request are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "policy"
"""Name of the model."""

SAMPLING = {"temperature": float, "top_p": float, "top_k": int}
"""What only a call that is not trained on may choose."""

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
        """The JSON of OpenAI's APIs."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request, checked.

    Attributes:
        body: what it is read from.
        arguments: keyword arguments of `Model.chat`, or with `prompt` of `Model.complete`.
        unused: what it has and a call to be trained on cannot have, or the endpoint does not run.
        logprobs: whether the reply has log-probabilities.
        stream: whether the reply is a stream of events.
        usage: whether the stream ends with token counts.
        token_ids: whether the reply has the ids of the tokens, as vLLM's has.
        name: the client's own name for it; empty if it has none.
        routes_from: first token whose routes a reply with token ids has.
    """

    body: Mapping[str, Any]
    arguments: dict[str, Any]
    unused: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    token_ids: bool = False
    name: str = ""
    routes_from: int = 0


def check_model(name: Any) -> None:
    """Raises `ApiError` for a model that is not there."""
    if name != MODEL:
        text = f"there is no model {name!r}; the policy is {MODEL!r} (OPENAI_MODEL)"
        raise ApiError(404, text, code="model_not_found", param="model")


def check_fields(
    body: Mapping[str, Any], taken: Collection[str], defaults: Mapping[str, Any] = {}
) -> None:
    """Check that every field is known.

    Args:
        taken: fields that may have any value here.
        defaults: fields that may have only one value.

    Raises:
        ApiError: a field is unknown, or has another value.
    """
    for name, value in body.items():
        if value is None or name in taken:
            continue
        if name not in defaults:
            raise ApiError(400, f"{name} is not supported: leave it out", param=name)
        if value != defaults[name]:
            text = f"{name} = {value!r}: only {defaults[name]!r} is supported"
            raise ApiError(400, text, param=name)


def check_body(
    body: Mapping[str, Any], taken: Collection[str], defaults: Mapping[str, Any]
) -> None:
    """Check the model of a chat or completion, and its fields; see `check_fields`."""
    check_model(body.get("model"))
    check_fields(body, {"model", "train", *SAMPLING, *taken}, defaults)


def typed(body: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a field; None if it is null or not there.

    Raises:
        ApiError: it is of another type.
    """
    value = body.get(name)
    accepted = (int, float) if kind is float else kind
    if value is None or (isinstance(value, accepted) and (kind is bool) == isinstance(value, bool)):
        return value
    raise ApiError(400, f"{name} must be of type {kind.__name__}, and is {value!r}", param=name)


def most_tokens(body: Mapping[str, Any], name: str) -> int | None:
    """The value of a field that limits a reply; None if it is null or not there.

    Raises:
        ApiError: it is no integer of at least 1.
    """
    most: int | None = typed(body, name, int)
    if most is not None and most < 1:
        raise ApiError(400, f"{name} must be at least 1, and is {most}", param=name)
    return most


def objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    """A list of JSON objects.

    Raises:
        ApiError: it is something else.
    """
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise ApiError(400, f"{name} must be a list of objects", param=name)
    return value


def functions(
    tools: Iterable[Mapping[str, Any]], kinds: Collection[Any], schema: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Tools as the chat API has them, and the others, which a provider would run itself.

    Args:
        kinds: types of those that the client runs.
        schema: the field with the schema of arguments.
    """
    names = {"name": "name", "description": "description", schema: "parameters"}
    shown, others = [], []
    for tool in tools:
        if tool.get("type") in kinds:
            function = {new: tool[name] for name, new in names.items() if tool.get(name)}
            shown.append({"type": "function", "function": function})
        else:
            others.append(f"a tool of type {tool.get('type')}")
    return shown, others


def text_of(content: Any, kinds: Collection[str], name: str) -> str:
    """The text of a content, which may come in parts of these types; one line per part.

    Raises:
        ApiError: a part is something else than text, such as an image.
    """
    if isinstance(content, str):
        return content
    for part in objects(content or [], name):
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            text = f"a part of type {part.get('type')!r}: only text is supported here"
            raise ApiError(400, text, param=name)
    return "\n".join(part["text"] for part in content or [])


def sampled_request(
    body: Mapping[str, Any],
    *,
    stop: str = "stop",
    max_tokens: str = "max_tokens",
    logprobs: bool = False,
    unused: Iterable[str] = (),
    routes_from: int = 0,
) -> Request:
    """Read the fields that every API has, without those of its prompt.

    Args:
        stop, max_tokens: names of the fields in this API.
        unused: what else it has that is not used.
        logprobs, routes_from: of the request.

    Raises:
        ApiError: a value cannot be used.
    """
    ends = body.get(stop) or []
    ends = [ends] if isinstance(ends, str) else ends
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        raise ApiError(400, f"{stop} must be a text or a list of texts", param=stop)
    train = typed(body, "train", bool) is not False
    sampling = {name: typed(body, name, kind) for name, kind in SAMPLING.items()}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    options = typed(body, "stream_options", dict) or {}
    return Request(
        body=body,
        arguments={
            "train": train,
            "stop": ends,
            "max_tokens": most_tokens(body, max_tokens),
            **({} if train else sampling),
        },
        unused=(*(sampling if train else ()), *dict.fromkeys(unused)),
        logprobs=logprobs,
        stream=bool(typed(body, "stream", bool)),
        usage=bool(options.get("include_usage")),
        token_ids=bool(typed(body, "return_token_ids", bool)),
        name=typed(body, "request_id", str) or "",
        routes_from=routes_from,
    )
