"""Convert messages and tools of rows, environments, workflows and clients to one format.

    {"role": "assistant", "content": None, "reasoning": "The sum is asked for.",
     "tool_calls": [{"id": "call00001", "type": "function",
                     "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]}

`r3.data.rendering` passes them to the chat template in the format that it reads.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from r3.config.arguments import kind_of
from r3.errors import Fault

if TYPE_CHECKING:  # it imports numpy
    from r3.types import Message

REASONING = ("reasoning", "reasoning_content", "thinking")
"""Names of what the model thought: vLLM's, those of most templates, and harmony's."""

_DEEPEST = 100  # levels of JSON; pickle, jinja and json itself fail at several hundred
# `from` of a message with `from` and `value`, as ShareGPT and its followers have them.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}
# By what the type of a part or the name of a column holds, such as image_url and input_audio.
_SENSES = {"image": "vision", "video": "video", "audio": "audio"}
_WEIGHTS = ("train", "loss", "weight")  # whether a message is learned; weight is OpenAI's


def read_messages(value: Any, *, filled: bool = False) -> tuple[Message, ...]:
    """Return the conversation of a row: a text is one message of the user.

    Args:
        value: a text, messages, or messages as JSON text, as tables without nesting have them.
        filled: whether missing keys may have been filled with None, as in tables.

    Raises:
        Fault: it is no conversation.
    """
    fix = 'write a string, or a list of {"role": ..., "content": ...}'
    if isinstance(value, str):
        decoded = _decoded(value)
        if decoded is None:
            if not value.strip():
                raise Fault("is empty", fix)
            return ({"role": "user", "content": value},)
        value = decoded
    elif filled:
        value = without_none(value)
    if not isinstance(value, list):
        raise Fault(f"is {kind_of(value)}, neither a text nor a list of messages", fix)
    if not value:
        raise Fault("is an empty list of messages", fix)
    messages = []
    for place, message in enumerate(value):
        try:
            messages.append(read_message(message))
        except Fault as fault:
            raise Fault(f"message {place} {fault.rule}", fault.fix) from None
    return tuple(messages)


def read_message(message: Any, *, of_model: bool = False) -> dict[str, Any]:
    """Return one message in the form above.

    Keys without a value are left out. `train` is False if the message is not to be learned, and
    not there otherwise. Keys that are not known here stay: a chat template may read them.

    Args:
        of_model: whether a model may have written the message: arguments that are no JSON object
            then stay as they are, and a message may be empty.

    Raises:
        Fault: it is no message.
    """
    fix = 'write {"role": ..., "content": ...}, both strings'
    if not isinstance(message, Mapping):
        raise Fault(f"is {kind_of(message)}, not an object", fix)
    result = {key: value for key, value in message.items() if value is not None}
    if "from" in result and "role" not in result:
        speaker, fix = result.pop("from"), f"write one of {', '.join(_SPEAKERS)}"
        if speaker == "function_call":
            fix = "write the call as tool_calls of a message with the role assistant"
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            raise Fault(f"is from {speaker!r}, which is not known", fix)
        result |= {"role": _SPEAKERS[speaker], "content": result.pop("value", None)}
    if not isinstance(result.get("role"), str):
        raise Fault("has no 'role' that is a string", fix)
    calls = result.pop("tool_calls", None) or []
    content = _text(result.pop("content", None), fix)
    if content is None and not calls and not of_model:
        raise Fault("has no 'content'", fix)
    # Beside calls, no text and an empty one are the same; templates take one of the two.
    result["content"] = content or (None if calls else "")
    thoughts = {name: result.pop(name) for name in REASONING if name in result}
    if len(set(map(repr, thoughts.values()))) > 1:
        raise Fault(f"has different texts in {' and '.join(thoughts)}", "keep one")
    if thought := next(iter(thoughts.values()), ""):
        if not isinstance(thought, str):
            raise Fault(f"has {next(iter(thoughts))!r} that is no string", "write a string")
        result["reasoning"] = thought
    if not _is_learned(result):
        result["train"] = False
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise Fault("has 'tool_calls' that are no list", _CALL_FIX)
        result["tool_calls"] = [_call(call, of_model=of_model) for call in calls]
    return result


def sense_of(columns: Mapping[str, Any]) -> tuple[str, str]:
    """The column of a row that holds more than text, and the rule that it breaks; "" for none."""
    for what, sense in _SENSES.items():
        several = columns.get(f"{what}s")
        one = columns.get(what)  # a text may be the name of something else, such as a container
        if not _is_nothing(several):
            return f"{what}s", f"is not empty, and {sense} is not supported"
        if one is not None and not isinstance(one, str | int | float):
            return what, f"holds the content of a file, and {sense} is not supported"
    return "", ""


def _is_nothing(value: Any) -> bool:
    """Whether a column is empty: tables that were joined have None or NaN, alone or in lists."""
    if isinstance(value, list | tuple):
        return all(map(_is_nothing, value))
    return value is None or value == "" or value != value


def replied(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """A conversation with a response, which continues a last message of the assistant."""
    if messages and messages[-1]["role"] == "assistant":
        return (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text})
    return (*messages, {"role": "assistant", "content": text})


def read_tools(value: Any, *, filled: bool = False) -> tuple[Mapping[str, Any], ...]:
    """Return the tool schemas of a row; none for None.

    Args:
        value: a list of JSON schemas, or its JSON text.
        filled: whether missing keys may have been filled with None, as in tables.

    Raises:
        Fault: it is no list of schemas with names.
    """
    fix = "write a list of JSON schemas, or leave the column out"
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError as error:
            raise Fault(f"is not JSON ({error})", fix) from None
    elif filled:
        value = without_none(value)
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise Fault("is not a list of tool schemas", fix)
    for place, tool in enumerate(value):
        if not isinstance(tool_name(tool), str):
            raise Fault(f"schema {place} has no function.name", fix)
    return tuple(value)


def tool_name(tool: Mapping[str, Any]) -> Any:
    """The name in a schema, `{"function": {"name": ...}}` or without the outer object."""
    inner = tool.get("function", tool)
    return inner.get("name") if isinstance(inner, Mapping) else None


def without_none(value: Any) -> Any:
    """Leave out every key whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list | tuple) else value


def is_learned(message: Message) -> bool:
    """Whether supervised training learns a message."""
    return message["role"] == "assistant" and message.get("train") is not False


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON.
        ValueError: it is nested deeper than 100 levels, no UTF-8, or has a number that Python does
            not read.
    """
    try:
        value = json.loads(text)
        is_deep = _depth(value) > _DEEPEST
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"JSON is nested deeper than {_DEEPEST} levels")
    return value


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0)


def half_character(text: str) -> str:
    """Return the first half of a character in a text, which no tokenizer takes; "" without any."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""


def arguments_of(value: Any) -> Any:
    """Return arguments of a call as chat templates take them: an object for its JSON text.

    Some models and parsers write JSON text inside of JSON text. A text that is no JSON stays.

    Raises:
        ValueError: the text is JSON that `read_json` does not read.
    """
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = read_json(value)
            except json.JSONDecodeError:
                break
    return value


def _decoded(text: str) -> Any:
    """The messages that a text holds as JSON; None if it is a text like others."""
    if not text.lstrip().startswith("[") or "role" not in text:
        return None
    try:
        return messages if _are_messages(messages := read_json(text)) else None
    except ValueError:
        pass
    try:
        is_python = _are_messages(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if is_python:
        rule = "is the text of a Python list of messages, which is no JSON"
        raise Fault(rule, "write the list itself, or json.dumps of it")
    return None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, Mapping) and "role" in each for each in value
    )


def _text(content: Any, fix: str) -> str | None:
    """The text of a content, which may come in parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Fault(f"has a 'content' that is {kind_of(content)}, not a text", fix)
    for part in content:
        if not isinstance(part, Mapping):
            raise Fault(f"has a part that is {kind_of(part)} in its content", _ONLY_TEXT)
        kind = part.get("type")
        if kind != "text" or not isinstance(part.get("text"), str):
            named = kind or " and ".join(part)
            senses = (sense for each, sense in _SENSES.items() if each in str(named))
            rule = f"has a part of type {named!r} in its content"
            if sense := next(senses, ""):
                rule += f", and {sense} is not supported"
            raise Fault(rule, _ONLY_TEXT)
    return "".join(part["text"] for part in content)


def _is_learned(message: dict[str, Any]) -> bool:
    """Take out the keys that say whether a message is learned."""
    said = {name: message.pop(name) for name in _WEIGHTS if name in message}
    for name, value in said.items():
        if value not in (0, 1):
            fix = "0 leaves the message out of the loss, 1 learns it"
            raise Fault(f"has {name} = {value!r}", fix)
    if len(set(map(bool, said.values()))) > 1:
        raise Fault(f"has {' and '.join(said)}, which contradict each other", "keep one")
    learned = all(said.values())
    if said and learned and message["role"] != "assistant":
        rule = f"has {next(iter(said))} = {next(iter(said.values()))!r} and role {message['role']}"
        raise Fault(rule, "only assistant messages are learned; leave the key out")
    return learned


_ONLY_TEXT = 'write parts as {"type": "text", "text": ...}, or leave the row out'
_CALL_FIX = 'write {"function": {"name": ..., "arguments": {...}}} for each call'


def _call(call: Any, *, of_model: bool) -> dict[str, Any]:
    """One tool call; `arguments` are an object where they can be."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Fault(f"has a tool call without a name: {_short(call)}", _CALL_FIX)
    text = function.get("arguments")
    try:
        arguments = arguments_of(text or {})
    except ValueError as error:
        raise Fault(f"has arguments of a call: {error}", _CALL_FIX) from None
    if arguments is None:  # the text null
        arguments = {}
    if not isinstance(arguments, dict) and not of_model:
        rule = f"calls {function['name']} with arguments that are no JSON object: {_short(text)}"
        raise Fault(rule, _CALL_FIX)
    name = {"id": call["id"]} if call.get("id") is not None else {}
    return {
        **name,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
