"""The report of `--check` on conversations: control tokens in rows, loss tokens, tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from r3 import extras
from r3.data.conversation import is_learned, tool_name
from r3.data.rendering import TemplateFault
from r3.data.template import Renderer
from r3.rollout.conversation_setup import ConversationSetup
from r3.rollout.task import Task
from r3.types import Message, Prompt

_SHOWN = 160  # characters of a text
_ASKED: Message = {"role": "user", "content": "a"}
# Values for the parameters of a tool; others are left out.
_VALUES = {"string": "b", "integer": 3, "number": 1.5, "boolean": True}


def check_messages(task: Task) -> Iterator[str]:
    """Lines about the rows of training, and about tool calls in environments and workflows."""
    prompts = task.prompts.prompts
    yield from _control_tokens(task.conversation_setup.renderer, prompts)
    if prompts and prompts[0].spans:
        yield from _learned(task.tokenizer, prompts[0])
    setups = {id(setup): setup for setup in (task.conversation_setup, *_held_out(task))}
    for setup in setups.values():
        rows = [*prompts, *(prompt for heldout in task.heldout for prompt in heldout.prompts)]
        tools = next((row.tools for row in rows if row.tools), setup.environments.tools)
        if tools and not (prompts and prompts[0].spans):
            yield from call_lines(setup, tools)


def _held_out(task: Task) -> Iterator[ConversationSetup]:
    return (heldout.conversation_setup for heldout in task.heldout)


def _control_tokens(renderer: Renderer, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Rows that hold text of a chat template: often whole conversations, rendered already."""
    held = [row for row in prompts if renderer.marked(row.messages) != list(row.messages)]
    if held:
        yield (
            f"    note: {len(held)} of {len(prompts)} rows hold a control token of the chat "
            f"template, such as {held[0].id}. It is text, unless data.allow_control_tokens is "
            "true; give messages instead of rendered text"
        )


def _learned(tokenizer: Any, row: Prompt) -> Iterator[str]:
    """The first message that is learned, with what the template adds to it."""
    (first, end), *_ = row.spans
    text = tokenizer.decode(row.tokens_T[first:end])
    yield f"    learned first in {row.id}: {_short(text)}"
    message = next(filter(is_learned, row.messages), {"content": row.answer})
    before, content, _ = text.partition(message["content"] or text)
    if content and before.strip() and "reasoning" not in message:
        yield (
            f"    note: the chat template writes {_short(before)} before the message, and it is "
            "learned. data.template_kwargs may change it"
        )


def call_lines(setup: ConversationSetup, tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A note if the parser does not read a call as the chat template writes it."""
    properties = tools[0].get("function", tools[0]).get("parameters", {}).get("properties", {})
    kinds = {name: declared.get("type") for name, declared in properties.items()}
    values = {name: _VALUES[kind] for name, kind in kinds.items() if str(kind) in _VALUES}
    call = {"name": tool_name(tools[0]), "arguments": values}
    renderer = setup.renderer
    # Nine letters and digits, as Mistral's templates have them; those of Kimi-K2 show only this.
    for name in ("call00001", f"functions.{call['name']}:0"):
        calls = [{"id": name, "type": "function", "function": call}]
        reply = {"role": "assistant", "content": None, "tool_calls": calls}
        try:
            before = renderer.render([_ASKED], tools)
            text = renderer.render([_ASKED, reply], tools, opening=False)
        except TemplateFault as error:
            fault = str(error)
            continue
        start = len(before) if text.startswith(before) else 0
        tokens = renderer.tokens(text[start:])
        ends = [place for place, token in enumerate(tokens) if token in renderer.ends]
        tokens = tokens[: ends[-1] + 1] if ends else tokens
        written = renderer.message_text(tokens)
        # A run of one turn reads no calls.
        parser = setup.parser or extras.runner().message_reader(
            setup.environments.settings, setup.tokenizer, {}
        )
        read = parser(tools)(written, tokens).calls
        if read != [call]:
            yield (
                f"    note: the chat template writes the call {call} as {_short(written)}, and the "
                f"parser reads {read or 'no call'}: set env.tool_parser to that of the model"
            )
        return
    yield f"    note: the chat template cannot show a call of {call['name']!r}: {fault}"


def _short(text: str) -> str:
    shown = repr(text)
    half = _SHOWN // 2
    return shown if len(shown) <= _SHOWN else f"{shown[:half]} ... {shown[-half:]}"
