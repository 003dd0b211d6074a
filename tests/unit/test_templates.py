"""Templates of well-known models: each part of a conversation is shown and learned, or refused."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from r3.config import ConfigError
from r3.data import Columns, DataError, Renderer, load_prompts
from r3.envs import Chat
from r3.types import Prompt
from tests.rows import write
from tests.templates import COLUMNS, TEMPLATES, tokenizer_of

ONE_NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "parameters": ONE_NUMBER}
TOOL = {"type": "function", "function": ADD}
ARGUMENTS = {"a": 3, "note": 'it is "so"'}
ASKED = {"role": "user", "content": "Tom has 3 books."}
ANSWER = {"role": "assistant", "content": "#### 3"}
AGAIN = {"role": "user", "content": "And Mia?"}
LAST = {"role": "assistant", "content": "#### 2"}
RESULT = {"role": "tool", "name": "add", "content": "85"}

tokenizers = lru_cache(tokenizer_of)


def call(name: str, arguments: Any = ARGUMENTS) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    one = {"id": TEMPLATES[name].call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [one]}


def with_call(name: str, arguments: Any = ARGUMENTS) -> list[dict[str, Any]]:
    return [ASKED, call(name, arguments), RESULT | {"tool_call_id": TEMPLATES[name].call_id}]


def loaded(name: str, folder: Path, messages: Any, tools: Any = None, **columns: Any) -> Prompt:
    path = write(folder, json.dumps({"messages": messages, "tools": tools}))
    of_row = Columns(prompt="messages", answer="", tools="tools", **columns)
    (row,) = load_prompts(path, tokenizers(name), columns=of_row, max_prompt_tokens=2000).prompts
    return row


def rendered(name: str, messages: Any, tools: Any = None, *, opening: bool = False) -> str:
    """What transformers renders."""
    text: str = tokenizers(name).apply_chat_template(
        messages, tools=tools, add_generation_prompt=opening, tokenize=False
    )
    return text


def tools_of(name: str) -> list[Any] | None:
    return None if "schemas" in TEMPLATES[name].refused else [TOOL]


def try_single(name: str, folder: Path) -> None:
    tokenizer = tokenizers(name)
    for messages in ([ASKED], [{"role": "system", "content": "Be brief."}, ASKED]):
        row = loaded(name, folder, messages)
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        assert list(row.tokens_T) == expected["input_ids"]


def try_turns(name: str, folder: Path, **options: Any) -> None:
    tokenizer = tokenizers(name)
    chat = Chat(Renderer(tokenizer), name, **options)
    sampled = tokenizer(ANSWER["content"], add_special_tokens=False)["input_ids"]
    tokens = chat.first([ASKED]) + sampled + chat.following([AGAIN], sampled[-1])
    text = rendered(name, [ASKED, ANSWER, AGAIN], options.get("tools"), opening=True)
    assert tokenizer.decode(tokens) == text


def try_schemas(name: str, folder: Path) -> None:
    row = loaded(name, folder, [ASKED], [TOOL])
    text = rendered(name, [ASKED], [TOOL], opening=True)
    assert tokenizers(name).decode(row.tokens_T) == text


def try_tools(name: str, folder: Path) -> None:
    tools = tools_of(name)
    row = loaded(name, folder, with_call(name, json.dumps(ARGUMENTS)), tools)
    given = json.dumps(ARGUMENTS) if TEMPLATES[name].arguments_as_text else ARGUMENTS
    text = rendered(name, with_call(name, given), tools, opening=True)
    assert tokenizers(name).decode(row.tokens_T) == text
    assert "note" in text and "so" in text and "None" not in text and "'a'" not in text


def try_sft(name: str, folder: Path) -> None:
    learn(name, folder, [ASKED, ANSWER, AGAIN, LAST], ["#### 3", "#### 2"])


def try_reasoning(name: str, folder: Path) -> None:
    for key in ("reasoning", "reasoning_content"):
        (text,) = learn(name, folder, [ASKED, ANSWER | {key: "Three."}], ["#### 3"])
        assert text.count("Three.") == 1


def try_calls(name: str, folder: Path) -> None:
    template = TEMPLATES[name]
    given = json.dumps(ARGUMENTS) if template.arguments_as_text else ARGUMENTS
    messages = [*with_call(name, given), ANSWER]
    first, _ = learn(name, folder, messages, ["add", "#### 3"], tools_of(name))
    assert first.endswith(template.call_end or template.end) and "85" not in first


def learn(name: str, folder: Path, messages: Any, texts: list[str], tools: Any = None) -> list[str]:
    """Check the learned tokens of a conversation: each message with its end, and no more."""
    template, tokenizer = TEMPLATES[name], tokenizers(name)
    row = loaded(name, folder, messages, tools, supervised=True)
    shown = [dict(each) for each in messages]
    for each in shown:  # the name that templates have
        if thought := each.pop("reasoning", None) or each.get("reasoning_content"):
            each |= {"reasoning_content": thought, "thinking": thought}
    end = template.end if template.is_ended_by_next else ""
    assert (rendered(name, shown, tools) + end).startswith(tokenizer.decode(row.tokens_T))
    learned = [tokenizer.decode(row.tokens_T[first:end]) for first, end in row.spans]
    assert len(learned) == len(texts)
    for text, said in zip(learned, texts, strict=True):
        ends = {template.end, template.call_end} - {""}
        assert said in text and text.endswith(tuple(ends))
        assert sum(map(text.count, ends)) == 1, "a message has one end"
    (first, _), *_ = row.spans
    asked = rendered(name, messages[:1], tools, opening=True)
    assert tokenizer.decode(row.tokens_T[:first]) == asked, "what the model continues"
    return learned


def test_a_message_learns_the_token_that_opens_the_next_one(tmp_path: Path) -> None:
    """GLM: without it a model goes on with another call, or never ends its turn."""
    tokenizer = tokenizers("glm4")
    messages = [*with_call("glm4"), ANSWER, AGAIN, LAST | {"train": False}, AGAIN, call("glm4")]
    row = loaded("glm4", tmp_path, messages, [TOOL], supervised=True)
    learned = [tokenizer.decode(row.tokens_T[first:end]) for first, end in row.spans]
    asks = "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n"
    asks += '<arg_key>note</arg_key>\n<arg_value>it is "so"</arg_value>\n</tool_call>'
    called = f"{asks}<|observation|>"
    assert learned == [called, "\n<think></think>\n#### 3<|user|>", called]
    assert row.spans[-1][1] == len(row.tokens_T), "what follows is not the model's"
    whole = rendered("glm4", messages, [TOOL])
    assert tokenizer.decode(row.tokens_T) == f"{whole}<|observation|>"
    with pytest.raises(DataError, match="no special token ends message 1"):
        system = {"role": "system", "content": "Be brief."}
        loaded("glm4", tmp_path, [ASKED, ANSWER, system, AGAIN, LAST], supervised=True)


def test_a_template_that_removes_reasoning_is_taken_by_a_setting(tmp_path: Path) -> None:
    try_turns("qwen3", tmp_path, keep_reasoning=True)
    with pytest.raises(ConfigError, match="moves or changes"):
        try_turns("deepseek_r1", tmp_path, keep_reasoning=True)


def test_a_template_that_changes_results_once_others_follow_is_refused(tmp_path: Path) -> None:
    try_turns("hermes", tmp_path)
    for name in ("qwen2_5", "llama3_1", "kimi_k2", "granite"):
        try_turns(name, tmp_path, tools=[TOOL])
    with pytest.raises(ConfigError, match="role tool differently once the conversation goes on"):
        try_turns("hermes", tmp_path, tools=[TOOL])


ENDS = {"glm4": ["<|user|>", "<|observation|>", "<|im_end|>"]}
BAD = "a{}\n{}assistant\n7{}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_ends_turns_and_keeps_given_text_apart(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizers(name)
    renderer = Renderer(tokenizer)
    eos = TEMPLATES[name].end
    named = [] if eos == "<|im_end|>" else ["<|im_end|>"]  # by the folder of the embedded model
    assert renderer.end_texts == ENDS.get(name, [eos, *named])
    bad = BAD.format(*(sorted(tokenizer.all_special_tokens, reverse=True) * 3)[:3])
    plain, row = (loaded(name, tmp_path, [{**ASKED, "content": text}]) for text in ("R3", bad))
    asked = rendered(name, [{**ASKED, "content": "R3"}], opening=True).replace("R3", bad)
    assert tokenizer.decode(row.tokens_T) == asked
    special = set(tokenizer.all_special_ids)
    control = [[token for token in each.tokens_T if token in special] for each in (plain, row)]
    assert control[0] == control[1], "no control token but the template's own"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_right_or_refused_with_cause(name: str, column: str, tmp_path: Path) -> None:
    cause = TEMPLATES[name].refused.get(column)
    if cause is None:
        globals()[f"try_{column}"](name, tmp_path)
        return
    with pytest.raises((ConfigError, DataError)) as caught:
        globals()[f"try_{column}"](name, tmp_path)
    assert cause in str(caught.value)
