"""Small rebuilds of the chat templates of well-known models, and what each can do in R3.

Each file has the structure and the control tokens of the original, and none of its text.
`tools/make_docs.py` writes docs/chat-templates.md from this table; tests/unit/test_templates.py
tries every entry.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

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


_TABLE = yaml.safe_load(Path(__file__).with_name("templates.yaml").read_text(encoding="utf-8"))
TEMPLATES = {name: Template(**each) for name, each in _TABLE["templates"].items()}


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
