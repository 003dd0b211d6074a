"""vLLM's parsers of tool calls and of reasoning: `env.tool_parser`, `env.reasoning_parser`.

They read a message after it was sampled. What is sampled and trained on does not depend on them.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from r3.config import ConfigError, EnvConfig, Problem
from r3.engine.build import kept_process_state
from r3.envs.tool_calls import MessageReader, Parse, Parsed, Parser, call_of, parsed_calls
from r3.runtime.device import prepare_environment

if TYPE_CHECKING:
    from vllm.parser.abstract_parser import Parser as VllmParser

# Of parsers that need a package, a tokenizer or a server of their own.
_FAULTS = (
    *(ImportError, NotImplementedError, RuntimeError, ValueError, LookupError, TypeError),
    *(AttributeError, AssertionError),
)
_LOGGERS = ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser")
_TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)


def message_parser(
    settings: EnvConfig, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> MessageReader:
    """Return what reads messages of the model, by one parser of vLLM or both.

    Args:
        template_kwargs: further variables of the chat template; some parsers depend on them.

    Raises:
        ConfigError: vLLM has no such parser, or it cannot be used with the tokenizer.
    """
    names = (settings.tool_parser, settings.reasoning_parser)
    prepare_environment()
    with kept_process_state():
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

    known = (ToolParserManager.list_registered(), ReasoningParserManager.list_registered())
    fields = ("env.tool_parser", "env.reasoning_parser")
    unknown = [
        _unknown(field, name, registered)
        for field, name, registered in zip(fields, names, known, strict=True)
        if name and name not in registered
    ]
    if unknown:
        raise ConfigError(unknown)
    cached = get_cached_tokenizer(tokenizer)  # parsers ask for the vocabulary, which takes long
    logged = _Logged()

    def parser(tool_parser: str, reasoning_parser: str) -> Parser:
        cls = ParserManager.get_parser(
            tool_parser_name=tool_parser or None,
            reasoning_parser_name=reasoning_parser or None,
            enable_auto_tools=True,
        )
        assert cls is not None, "one of the two has a name"

        def of_tools(tools: Sequence[Mapping[str, Any]]) -> Parse:
            request = ChatCompletionRequest(
                messages=[], tools=[dict(tool) for tool in tools] or None
            )

            def made() -> VllmParser:
                return cls(cached, request.tools, chat_template_kwargs=dict(template_kwargs))

            made()  # tools that it cannot use are refused before anything is sampled

            def parse(text: str, tokens: Sequence[int]) -> Parsed:
                read = logged.told(lambda: _parsed(made(), request, text, tokens))
                if tool_parser:
                    return read
                return replace(parsed_calls(read.content), reasoning=read.reasoning)

            return parse

        return of_tools

    problems = [
        Problem(field, name, f"cannot be used with this model: {fault}", _fix(known[place]))
        for place, (field, name) in enumerate(zip(fields, names, strict=True))
        if name and (fault := _fault(partial(parser, *((name, "") if place == 0 else ("", name)))))
    ]
    if problems:
        raise ConfigError(problems)
    return MessageReader(parser(*names))


def _unknown(field: str, name: str, known: Sequence[str]) -> Problem:
    near = difflib.get_close_matches(name, known, n=2)
    fix = f"did you mean {' or '.join(near)}?" if near else _fix(known)
    return Problem(field, name, "vLLM has no such parser", fix)


def _fix(known: Sequence[str]) -> str:
    return f"leave it out, or use the one of the model's family: {', '.join(known)}"


def _fault(make: Callable[[], Parser]) -> str:
    """Why a parser cannot be used; "" if it can."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs what it raises
    try:
        make()(_TOOLS)("a", (1,))
    except _FAULTS as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Logged(logging.Handler):
    """Keeps what parsers log where they fail, which would be a traceback per message."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last error."""
        error = record.exc_info[1] if record.exc_info else None
        self._text = f"{type(error).__name__}: {error}" if error else record.getMessage()

    def told(self, parse: Callable[[], Parsed]) -> Parsed:
        """Return what a parser reads, with what it logged if it has read no call."""
        for logger in map(logging.getLogger, _LOGGERS):
            if self not in logger.handlers:  # an engine that is built resets them
                logger.addHandler(self)
                logger.setLevel(logging.ERROR)
                logger.propagate = False
        self._text = ""
        read = parse()
        return read if read.calls else replace(read, fault=self._text)


def _parsed(own: VllmParser, request: Any, text: str, tokens: Sequence[int]) -> Parsed:
    reasoning, content, calls = own.parse(
        text, request, enable_auto_tools=True, model_output_token_ids=list(tokens)
    )
    read_calls = [call_of(call.name, call.arguments) for call in calls or ()]
    return Parsed(content=content or "", calls=read_calls, reasoning=reasoning)
