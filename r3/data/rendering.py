"""Run a chat template, and check that it shows each part of a conversation once and unchanged.

A template may drop what it does not know: a role, a call, the reasoning of an earlier turn. So each
conversation is rendered twice: as it is, and with a marker in place of every part. The markers show
which parts the template renders and what it writes between them. With that the parts are found in
the real text, character for character.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from jinja2 import Environment, TemplateError, meta, nodes

from r3.data.conversation import REASONING, tool_name
from r3.errors import Fault
from r3.types import Message
from r3.user_code.loading import time_limit

Rule = Literal["learned", "shown", "history"]
"""What must appear. learned: all of it, character for character. shown: white space at both ends of
a text may go. history: as shown, but a template may shorten what the model wrote in earlier turns,
and keys that it does not read are ignored."""

_ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning")
_MARKER = re.compile(r"R3part\d+x")  # no template changes letters and digits
_GENERATION = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")
_MAX_KEPT = 4096  # skeletons; conversations of one data set have few forms
_LIMIT_S = 20.0  # of one rendering, which takes milliseconds
# Templates are programs that may fail in any way.
_FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(NotImplementedError, RecursionError, TypeError, ValueError),
)

# A call whose pieces no template has by itself.
_PIECES = ("R3name", "R3key", "R3value", "7531")
_CALL = {"name": "R3name", "arguments": {"R3key": "R3value", "R3number": 7531}}
_CALLED: list[list[Message]] = [
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": name, "type": "function", "function": _CALL}],
        },
        {"role": "tool", "name": "R3name", "tool_call_id": name, "content": "b"},
    ]
    # Nine letters and digits, as Mistral's; Kimi-K2 shows no name but this.
    for name in ("call00001", "functions.R3name:0")
]
_TOOL = {"description": "c", "parameters": {"type": "object", "properties": {}}}


class TemplateFault(Fault):
    """A chat template does not render a conversation; with a fix, not a part of it as it is."""

    def __str__(self) -> str:
        return self.rule


class EndlessTemplate(TemplateFault):
    """A chat template that takes far too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A piece of a conversation that is not the template's own.

    Attributes:
        message: index of its message.
        kind: "content", "reasoning", "call" (the name) or "argument" (a text in the arguments).
        value: the text as it was given.
        start: index of its first character in the rendering.
        end: index after its last one.
    """

    message: int
    kind: str
    value: str
    start: int = -1
    end: int = -1


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: what the chat template made of it.
        parts: where the conversation's own texts are in it, in this order.
        glue: what the template writes before, between and after such parts.
    """

    text: str
    parts: tuple[Part, ...]
    glue: tuple[str, ...]

    def end_of(self, message: int) -> int:
        """Index after the last part of a message; -1 if the message has none."""
        return max((part.end for part in self.parts if part.message == message), default=-1)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a template takes messages with calls.

    Attributes:
        content: beside calls, in place of an empty text.
        as_text: whether arguments are the text of their JSON.
    """

    content: str | None
    as_text: bool


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
    *,
    limit_s: float = _LIMIT_S,
    **options: Any,
) -> Any:
    """Return what `tokenizer.apply_chat_template` returns for these messages and options.

    Args:
        messages: a conversation, or several, each a list.
        limit_s: seconds for all of them.

    Raises:
        TemplateFault: the template refuses the messages or fails.
        EndlessTemplate: it takes longer than `limit_s`.
    """
    late = EndlessTemplate(f"it was not rendered after {limit_s:g} s")
    try:
        return time_limit(
            lambda: tokenizer.apply_chat_template(list(messages), **options), limit_s, lambda: late
        )
    except TemplateFault:
        raise
    except TemplateError as error:  # the template's own words
        raise TemplateFault(f"{error}") from error
    except _FAULTS as error:
        raise TemplateFault(f"{type(error).__name__}: {str(error)[:200]}") from error


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Take a tokenizer that has a chat template.

        Args:
            variables: further variables of the template.
        """
        self._tokenizer, self._variables = tokenizer, dict(variables)
        self._forms: dict[bool, _Form] = {}
        self._skeletons: dict[str, tuple[list[str], list[int]]] = {}

    @cached_property
    def _trees(self) -> list[nodes.Template]:
        """The syntax trees of the template, or of all that the tokenizer has by name."""
        template = self._tokenizer.chat_template
        sources = list(template.values()) if isinstance(template, Mapping) else [template or ""]
        reader = Environment(extensions=["jinja2.ext.loopcontrols"])
        try:  # transformers adds the block `generation` to jinja
            return [reader.parse(_GENERATION.sub("", source)) for source in sources]
        except TemplateError:
            return []  # rendering says why

    @cached_property
    def names(self) -> frozenset[str]:
        """Every attribute and constant text in the template: the roles and keys that it knows."""
        constants = (node.value for tree in self._trees for node in tree.find_all(nodes.Const))
        attributes = (node.attr for tree in self._trees for node in tree.find_all(nodes.Getattr))
        return frozenset([*attributes, *(text for text in constants if isinstance(text, str))])

    @cached_property
    def variables(self) -> frozenset[str]:
        """Every variable that the template reads."""
        trees = (meta.find_undeclared_variables(tree) for tree in self._trees)
        return frozenset(name for names in trees for name in names)

    def unread(self) -> list[str]:
        """Names of further variables that the template does not read."""
        if not self._trees or not self._tokenizer.chat_template:
            return []  # it cannot be rendered, which is said elsewhere
        return [name for name in self._variables if name not in self.variables]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        opening: bool = True,
        rule: Rule = "shown",
    ) -> Rendered:
        """Render a conversation in which everything that was given appears.

        Args:
            messages: as `r3.data.conversation` reads them.
            tools: JSON schemas.
            opening: whether the text ends with the header of the model's next message.
            rule: what must appear.

        Raises:
            TemplateFault: a part of the conversation does not appear once and unchanged.
            TemplateFault: the template refuses the messages.
        """
        self._check_names(messages, rule)
        text = self._apply(self._in_form(messages, self._form(tools)), tools, opening)
        parts: list[Part] = []
        marked = [_with_markers(message, place, parts) for place, message in enumerate(messages)]
        key = repr((marked, tools, opening))
        if key in self._skeletons:
            try:
                return self._located(text, self._skeletons[key], messages, parts, rule)
            except TemplateFault:
                pass  # a template may write the day
        if len(self._skeletons) >= _MAX_KEPT:
            self._skeletons.clear()
        self._skeletons[key] = self._skeleton(marked, tools, opening)
        return self._located(text, self._skeletons[key], messages, parts, rule)

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any], opening: bool) -> str:
        texts: list[str] = apply_template(
            self._tokenizer,
            [list(messages)],  # by itself, a conversation without messages would raise IndexError
            tools=list(tools) or None,
            add_generation_prompt=opening,
            tokenize=False,
            **self._variables,
        )
        return texts[0]

    def _check_names(self, messages: Sequence[Message], rule: Rule) -> None:
        """Refuse roles and keys that mean nothing to the template."""
        for place, message in enumerate(messages):
            role = message["role"]
            if role not in (*_ROLES, "developer") and role not in self.names:
                meant = {"human": "user", "gpt": "assistant", "function": "tool"}.get(role.lower())
                meant = meant or (role.lower() if role.lower() in _ROLES else "")
                fix = f"write {meant}" if meant else f"use one of {', '.join(_ROLES)}"
                text = f"message {place} has role {role!r}, which the chat template does not know"
                raise TemplateFault(text, fix)
            unknown = [key for key in message if key not in (*_KEYS, "train")]
            if rule != "history" and (unread := [key for key in unknown if key not in self.names]):
                text = f"message {place} has {unread[0]!r}, which the chat template does not read"
                raise TemplateFault(text, "leave the key out")

    def _in_form(self, messages: Sequence[Message], form: _Form) -> list[dict[str, Any]]:
        """Messages as this template takes them."""
        shown_messages = []
        for message in messages:
            shown = {key: value for key, value in message.items() if key != "train"}
            if shown["role"] == "developer" and "developer" not in self.names:
                shown["role"] = "system"
            if thought := shown.pop("reasoning", None):
                shown |= {name: thought for name in REASONING if name in self.names}
            if calls := shown.get("tool_calls"):
                shown["content"] = shown["content"] or form.content
                if form.as_text:
                    shown["tool_calls"] = [
                        _with_arguments(call, _as_text(call["function"]["arguments"]))
                        for call in calls
                    ]
            shown_messages.append(shown)
        return shown_messages

    def _form(self, tools: Sequence[Any]) -> _Form:
        """The form in which the template shows a call completely, found by trying."""
        if (kept := self._forms.get(bool(tools))) is not None:
            return kept
        tools = [_renamed({"type": "function", "function": _TOOL}, "R3tool")] if tools else []
        forms = [_Form(content, as_text) for as_text in (False, True) for content in (None, "")]
        fitting = (
            form
            for messages in (*_CALLED, *(called[:2] for called in _CALLED))
            for form in forms
            if self._shows_calls(messages, tools, form)
        )
        return self._forms.setdefault(bool(tools), next(fitting, forms[0]))

    def _shows_calls(self, messages: Sequence[Message], tools: Sequence[Any], form: _Form) -> bool:
        """Whether a call appears with all of its arguments as JSON, or as texts of their own."""
        try:
            before, text = (
                self._apply(self._in_form(part, form), tools, False)
                for part in (messages[:1], messages)
            )
        except TemplateFault:
            return False
        is_changed = any(text.count(sign) > before.count(sign) for sign in ('\\"', "None", "{'"))
        return not is_changed and all(piece in text for piece in _PIECES)

    def _skeleton(
        self, marked: Sequence[Message], tools: Sequence[Any], opening: bool
    ) -> tuple[list[str], list[int]]:
        """What the template writes between markers, and the numbers of the markers in order."""
        names = [str(tool_name(tool)) for tool in tools]
        named = [_renamed(tool, f"R3tool{number}x") for number, tool in enumerate(tools)]
        text = self._apply(self._in_form(marked, self._form(tools)), named, opening)
        for number, name in enumerate(names):
            if (marker := f"R3tool{number}x") not in text:
                rule = f"the chat template does not show the tool {name!r}"
                raise TemplateFault(rule, "use a template that shows tools, or leave them out")
            text = text.replace(marker, name)
        return _MARKER.split(text), [int(mark[6:-1]) for mark in _MARKER.findall(text)]

    def _located(
        self,
        text: str,
        skeleton: tuple[list[str], list[int]],
        messages: Sequence[Message],
        parts: Sequence[Part],
        rule: Rule,
    ) -> Rendered:
        """Find every part of a conversation in its rendering, in the order of the text."""
        glue, order = skeleton
        counts = Counter(order)
        for number, part in enumerate(parts):
            message, count = messages[part.message], counts[number]
            may_go = rule == "history" and message["role"] == "assistant"
            # The result of a call may name it once more.
            if count != 1 and not (count and part.kind == "call"):
                if not (may_go and part.kind == "reasoning"):
                    raise _not_shown(part, message, count)
        placed: dict[int, Part] = {}
        at, done, differs = len(glue[0]), 0, -1
        is_searched = False  # the template looked into a text, and writes something else around
        for number, after in zip(order, glue[1:], strict=True):
            part, message = parts[number], messages[parts[number].message]
            forms = _forms_of(part, message, rule)
            ends = (at + len(form) for form in forms if text.startswith(form + after, at))
            start, end = at, next(ends, -1)
            if end < 0:
                differs = at if differs < 0 else differs
                places = [
                    (place, place + len(form))
                    for form in forms
                    if (place := at if text.startswith(form, at) else text.find(form, done)) >= 0
                ]
                may_go = rule == "history" and message["role"] == "assistant"
                is_searched = is_searched or may_go or any(map(self._looks_into, parts))
                if not (may_go or (places and is_searched)):
                    raise _changed(part, message, text[differs : differs + 40])
                start, end = min(places, default=(done, done))
            placed.setdefault(number, replace(part, start=start, end=end))
            at, done = end + len(after), end
        located = sorted(placed.values(), key=lambda part: part.start)
        return Rendered(text, tuple(located), tuple(glue))

    def _looks_into(self, part: Part) -> bool:
        """Whether a text holds something that the template may look for, such as </think>."""
        marks = (name.strip() for name in self.names)
        return any(
            len(mark) > 2 and not mark.isidentifier() and mark in part.value for mark in marks
        )


def _forms_of(part: Part, message: Message, rule: Rule) -> list[str]:
    """The texts that a part may have in the rendering."""
    value, stripped = part.value, part.value.strip()
    if part.kind == "argument":  # inside JSON
        return [value, *(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True))]
    if part.kind == "reasoning":
        return [value, stripped]
    if message["role"] == "tool":  # some templates write results as JSON
        escaped = (json.dumps(form, ensure_ascii=False)[1:-1] for form in (stripped, value))
        return [value, stripped, *escaped]
    if rule == "learned" and message["role"] == "assistant":
        return [value]
    return [value, stripped, value.rstrip(), value.lstrip()]


def _with_markers(message: Message, place: int, parts: list[Part]) -> dict[str, Any]:
    """A message with a marker for every part, which is added to `parts`."""

    def marker(kind: str, value: str) -> str:
        parts.append(Part(message=place, kind=kind, value=value))
        return f"R3part{len(parts) - 1}x"

    def arguments(value: Any) -> Any:
        if isinstance(value, str):
            return marker("argument", value) if value else value
        if isinstance(value, Mapping):
            return {key: arguments(entry) for key, entry in value.items()}
        return [arguments(entry) for entry in value] if isinstance(value, list) else value

    def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        name = marker("call", function["name"])
        shown = {**call, "function": {"name": name}}
        if (inside := f".{function['name']}:") in str(call.get("id", "")):
            shown["id"] = str(call["id"]).replace(inside, f".{name}:")
        return _with_arguments(shown, arguments(function["arguments"]))

    marked = dict(message)
    for kind in ("reasoning", "content"):
        if message.get(kind):
            marked[kind] = marker(kind, message[kind])
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [call_of(call) for call in calls]
    return marked


def _with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _renamed(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": {**tool["function"], "name": name}}
    return {**tool, "name": name}


def _named(part: Part, message: Message) -> str:
    """A part in words."""
    kinds = {"call": f"call of {part.value!r}", "argument": f"argument {part.value[:40]!r}"}
    return f"{kinds.get(part.kind, part.kind)} of message {part.message} ({message['role']})"


def _changed(part: Part, message: Message, written: str) -> TemplateFault:
    rule = f"the chat template changes the {_named(part, message)}: it writes {written!r}"
    more = ", or write a row per assistant message" if message["role"] == "assistant" else ""
    return TemplateFault(rule, f"leave out what it changes{more}")


def _not_shown(part: Part, message: Message, count: int) -> TemplateFault:
    times = f"shows it {count} times" if count else "leaves it out"
    fixes = {
        "reasoning": "leave it out, or write a row per assistant message",
        "call": "use a chat template that shows calls, or write the call into the content",
        "argument": "use a chat template that shows calls, or write the call into the content",
    }
    fix = fixes.get(part.kind, "use roles that the template shows, in an order that it takes")
    if message["role"] in ("system", "developer"):
        fix = "put it into the first message of the user"
    return TemplateFault(f"the {_named(part, message)}: the chat template {times}", fix)
