"""Small rebuilds of the chat templates of well-known models, and what each can do in R3.

Each file has the structure and the control tokens of the original, and none of its text.
`tools/make_docs.py` writes docs/chat-templates.md from this table; tests/unit/test_templates.py
tries every entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLUMNS = {
    "single": "single turn",
    "turns": "several turns",
    "schemas": "tools",
    "tools": "calls in a prompt",
    "sft": "SFT on several messages",
    "reasoning": "SFT on reasoning",
    "calls": "SFT on calls",
}
"""What is tried, and its heading."""

_BAR = "\uff5c"  # in DeepSeek's control tokens
_CONTROL = re.compile(
    rf"<[|{_BAR}][^<>\s]*[|{_BAR}]>|\[/?[A-Z_]+\]|</?(?:think|tool_call|tool_response)>"
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template.

    Attributes:
        title: the models that have such a template.
        end: the token that ends an assistant message.
        call_end: the token that ends a message with a call.
        is_ended_by_next: whether the token that ends a message opens the next one.
        call_id: an id of a call as the template takes it.
        arguments_as_text: whether it joins arguments as text.
        refused: what is refused of `COLUMNS`, with the words that say why.
    """

    title: str
    end: str = "<|im_end|>"
    call_end: str = ""
    is_ended_by_next: bool = False
    call_id: str = "add000001"
    arguments_as_text: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)


_MOVES = "moves or changes the model's message once another one follows"
_ASKS = "and does not write that before a message that is there"
_NO_REASONING = "the reasoning of message 1 (assistant): the chat template leaves it out"
_NO_TOOLS = "does not show the tool 'add'"
_NO_CALLS = "the call of 'add' of message 1 (assistant): the chat template leaves it out"
_PIECES = "the tokenizer gives pieces of a text other tokens than the whole"
_DEEPSEEK: dict[str, Any] = {"end": f"<{_BAR}end▁of▁sentence{_BAR}>", "arguments_as_text": True}

TEMPLATES: dict[str, Template] = {
    "qwen2_5": Template(title="Qwen2.5", refused={"reasoning": _NO_REASONING}),
    "qwen3": Template(title="Qwen3", refused={"turns": "removes reasoning (<think>)"}),
    "qwen3_5": Template(title="Qwen3.5", refused={"turns": _MOVES, "sft": _ASKS}),
    "llama3_1": Template(
        title="Llama 3.1",
        end="<|eot_id|>",
        call_end="<|eom_id|>",
        refused={"reasoning": _NO_REASONING},
    ),
    "mistral": Template(
        title="Mistral", end="</s>", refused={"turns": _MOVES, "reasoning": _NO_REASONING}
    ),
    "glm4": Template(
        title="GLM-4.5 to 4.7",
        end="<|user|>",
        call_end="<|observation|>",
        is_ended_by_next=True,
        refused={"turns": _MOVES},
    ),
    "gpt_oss": Template(
        title="gpt-oss (harmony)",
        end="<|return|>",
        call_end="<|call|>",
        refused={"turns": _MOVES, "sft": "ends message 1 differently once"},
    ),
    "deepseek_v3": Template(
        title="DeepSeek-V3", refused={"reasoning": _NO_REASONING, "schemas": _NO_TOOLS}, **_DEEPSEEK
    ),
    "deepseek_r1": Template(
        title="DeepSeek-R1",
        refused={
            "turns": _MOVES,
            "schemas": _NO_TOOLS,
            **dict.fromkeys(("sft", "reasoning", "calls"), _ASKS),
        },
        **_DEEPSEEK,
    ),
    "kimi_k2": Template(
        title="Kimi-K2", call_id="functions.add:0", refused={"reasoning": _NO_REASONING}
    ),
    "granite": Template(
        title="Granite 3", end="<|end_of_text|>", refused={"reasoning": _NO_REASONING}
    ),
    "ernie4_5": Template(
        title="ERNIE 4.5",
        end="<|end_of_sentence|>",
        refused={
            "schemas": _NO_TOOLS,
            "tools": 'concatenate str (not "NoneType")',
            **dict.fromkeys(("sft", "reasoning", "calls"), _PIECES),
        },
    ),
    "smollm2": Template(
        title="SmolLM2",
        refused={
            "reasoning": _NO_REASONING,
            "schemas": _NO_TOOLS,
            "tools": _NO_CALLS,
            "calls": _NO_CALLS,
        },
    ),
    "hermes": Template(
        title="Hermes 2 and 3",
        refused={
            "reasoning": _NO_REASONING,
            "calls": "what precedes message 3 differently once the conversation goes on",
        },
    ),
}


def source_of(name: str) -> str:
    """Return the jinja source of a template."""
    return (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_of(name: str) -> Any:
    """Return the embedded tokenizer with a template and its control tokens."""
    from transformers import AutoTokenizer

    from r3 import assets

    tokenizer: Any = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    source = source_of(name)
    control = sorted({"<s>", "</s>", *_CONTROL.findall(source)})
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.bos_token = "<s>"
    tokenizer.eos_token = TEMPLATES[name].end
    tokenizer.chat_template = source
    return tokenizer
