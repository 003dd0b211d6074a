"""Messages after a message of the model, as the chat template renders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3 import assets
from r3.config import ConfigError, EnvConfig
from r3.data.rendering import TemplateFault
from r3.data.template import Renderer
from r3.envs.calculator import Calculator
from r3.envs.chat import Chat
from r3.rollout.conversation import ConversationSetup

pytestmark = pytest.mark.unit


def test_what_follows_is_what_the_template_renders(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    chat, end = Chat(renderer, "tiny", Calculator.tools), tokenizer.eos_token_id
    question = {"role": "user", "content": "Tom has 3 books."}
    reply = {"role": "tool", "content": "85"}
    call = "<tool_call>47+38</tool_call>"
    whole = tokenizer.apply_chat_template(
        [question, {"role": "assistant", "content": call}, reply],
        tools=list(Calculator.tools),
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    sampled = tokenizer(call, add_special_tokens=False)["input_ids"]
    first = chat.first([question])
    assert first + sampled + [end] + chat.following([reply], end) == whole
    assert first + sampled + chat.following([reply], sampled[-1]) == whole
    assert renderer.ends == (end,)


TEMPLATES: dict[str, tuple[Callable[[str], str], str]] = {
    "counts turns": (
        lambda t: t.replace(
            "message.role ~ '\\n' ~ (", "message.role ~ ' ' ~ loop.index ~ '\\n' ~ ("
        ),
        "differently after a longer conversation",
    ),
    "forgets the model's message": (
        lambda t: t.replace(
            "(message.content or '')", "(message.content if message.role != 'assistant' else '')"
        ),
        "the content of message 1 (assistant): the chat template leaves it out",
    ),
    "rewrites the model's message": (
        lambda t: t.replace(
            "(message.content or '')",
            "('> ' if message.role == 'assistant' else '') ~ message.content",
        ),
        "moves or changes the model's message",
    ),
    "ends a turn in words": (
        lambda t: t.replace(
            "{{- '<|im_end|>\\n' }}\n    {%- endif %}", "{{- ' over\\n' }}\n    {%- endif %}"
        ),
        "with a special token",
    ),
    "refuses a second user": (
        lambda t: (
            t + "{%- if messages|length > 1 %}{{ raise_exception('only one message') }}{%- endif %}"
        ),
        "only one message",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_cannot_be_appended_to_are_refused(name: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    change, text = TEMPLATES[name]
    changed = change(tokenizer.chat_template)
    assert changed != tokenizer.chat_template
    tokenizer.chat_template = changed
    with pytest.raises(ConfigError, match=r"some/model.*its chat template") as error:
        Chat(Renderer(tokenizer), "some/model")
    assert text in str(error.value)


@pytest.mark.parametrize("name", ["single_turn", "calculator"])
def test_a_template_without_add_generation_prompt_is_refused(name: Any) -> None:
    """The prompt would end before the header of the model's message."""
    tokenizer: Any = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    template = tokenizer.chat_template
    opening = template[template.index("{%- if add_generation_prompt %}") :]
    tokenizer.chat_template = template.replace(opening, "")
    with pytest.raises(ConfigError, match=r"would end before '<\|im_start\|>assistant'"):
        ConversationSetup.of(EnvConfig(name=name), tokenizer, "some/model")
    # Templates that write the header anyway, or need none, are taken.
    tokenizer.chat_template = template.replace(opening, "<|im_start|>assistant\n")
    assert not Renderer(tokenizer).missing_header()
    tokenizer.chat_template = (
        "{%- for m in messages %}{{ ('[ASK]' ~ m.content ~ '[/ASK]') if m.role == 'user' "
        "else (' ' ~ m.content ~ eos_token) }}{%- endfor %}"
    )
    assert not Renderer(tokenizer).missing_header()


def test_messages_that_the_template_refuses_fail_one_conversation(
    tokenizer: Any,
) -> None:
    picky: Any = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    picky.chat_template = (
        "{%- if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{%- endif %}"
        + tokenizer.chat_template
    )
    chat = Chat(Renderer(picky), "tiny")
    with pytest.raises(TemplateFault, match="no tools"):
        chat.following([{"role": "tool", "content": "85"}], tokenizer.eos_token_id)
