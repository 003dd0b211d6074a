"""Messages and tools of any form: all of it reaches the model once, unchanged, or is refused."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from r3.config import ConfigError, EnvConfig, parse_value, with_values
from r3.data import Columns, DataError, Renderer, load_prompts
from r3.extras import check
from r3.rollout import ConversationSetup, Task, read_task
from tests.rows import parquet, write
from tests.templates import tokenizer_of
from tests.tiny import tiny_config

ASKED = {"role": "user", "content": "Tom has 3 books."}
ANSWER = {"role": "assistant", "content": "#### 3"}
RESULT = {"role": "tool", "content": "sun"}
ROW = Columns(prompt="messages", answer="", tools="tools")
LEARNED = Columns(prompt="messages", answer="", tools="tools", supervised=True)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
DAY = {"type": "object", "properties": {"day": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
    for name, parameters in (("weather", CITY), ("date", DAY))
]

tokenizers = lru_cache(tokenizer_of)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", **more, "tool_calls": [{"id": "call00001", "function": function}]}


def shown(name: str, path: Path | str, columns: Columns = ROW) -> list[str]:
    """The rows of a file as the model sees them."""
    tokenizer = tokenizers(name)
    prompts = load_prompts(path, tokenizer, columns=columns, max_prompt_tokens=4000).prompts
    return [tokenizer.decode(each.tokens_T) for each in prompts]


def learned(name: str, folder: Path, messages: Any, **options: Any) -> tuple[str, list[str]]:
    """The text of a row, and the parts of it that are learned."""
    path, tokenizer = write(folder, json.dumps({"messages": messages})), tokenizers(name)
    options = {"columns": LEARNED, "max_prompt_tokens": 4000, **options}
    (row,) = load_prompts(path, tokenizer, **options).prompts
    parts = [row.tokens_T[first:end] for first, end in row.spans]
    return tokenizer.decode(row.tokens_T), [tokenizer.decode(part) for part in parts]


def refusal(name: str, folder: Path, messages: Any, columns: Columns = ROW, **row: Any) -> str:
    path = write(folder, json.dumps({"messages": [ASKED], **row} | {"messages": messages}))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: messages: ") as caught:
        shown(name, path, columns)
    return str(caught.value)


def test_rows_of_a_table_are_those_of_json_lines(tmp_path: Path) -> None:
    """Tables fill keys that other rows have with None."""
    rows = [
        {"messages": [ASKED, call({"city": "Rome"}, content="I look."), RESULT], "tools": TOOLS},
        {"messages": [ASKED | {"name": "Tom"}], "tools": TOOLS[:1]},
    ]
    expected = shown("qwen2_5", write(tmp_path, *map(json.dumps, rows)))
    assert shown("qwen2_5", parquet(tmp_path, rows)) == expected
    assert not any("null" in text or "None" in text for text in expected)


def test_json_text_of_messages_and_arguments_is_decoded(tmp_path: Path) -> None:
    """OpenAI's form of arguments, and tables without nesting."""
    messages = [ASKED, call({"city": "Rome"}, content=None), RESULT]
    as_text = [ASKED, call('{"city": "Rome"}', content=None), RESULT]
    rows = [{"messages": each} for each in (messages, as_text, json.dumps(as_text))]
    rows.append({"messages": messages, "tools": "null"})
    first, *others = shown("qwen2_5", write(tmp_path, *map(json.dumps, rows)))
    assert others == [first] * 3 and '"arguments": {"city": "Rome"}' in first
    assert "is the text of a Python list" in refusal("qwen2_5", tmp_path, str(messages))
    (text,) = shown("qwen2_5", write(tmp_path, json.dumps({"messages": '[1, "role"]'})))
    assert 'user\n[1, "role"]<' in text, "it is no text of messages"


@pytest.mark.parametrize("off", [{"weight": 0}, {"train": False}, {"loss": False}])
def test_a_message_that_is_not_to_be_learned_is_not_in_the_mask(
    off: dict[str, Any], tmp_path: Path
) -> None:
    messages = [ASKED, ANSWER | off, ASKED, {"role": "assistant", "content": "#### 2"}]
    text, parts = learned("llama3_1", tmp_path, messages)
    assert parts == ["#### 2<|eot_id|>"] and "#### 3" in text
    nothing = [ASKED, ANSWER | off]
    assert "no assistant message to learn" in refusal("llama3_1", tmp_path, nothing, LEARNED)


CALLED = [ASKED, call({"city": "Rome"}, content="a"), ASKED]


@pytest.mark.parametrize(
    ("name", "messages", "cause"),
    [
        ("qwen2_5", [{"role": "human", "content": "a"}], "role 'human'"),
        ("qwen2_5", [{"role": "User", "content": "a"}], "Fix: write user"),
        ("glm4", [{"role": "critic", "content": "a"}], "does not know"),
        ("qwen2_5", [ASKED | {"mood": "good"}], "has 'mood', which the chat template does not"),
        ("qwen2_5", [ASKED, ANSWER | {"reasoning": "Hm."}, ASKED], "the reasoning of message 1"),
        ("smollm2", CALLED, "the call of 'weather'"),
        ("deepseek_v3", CALLED, "the call of 'weather'"),
        ("kimi_k2", [ASKED, call({"city": "Rome"}, content=None), ASKED], "the call of 'weather'"),
        ("qwen2_5", [ASKED, call("Rome", content=None)], "arguments that are no JSON object"),
        ("qwen2_5", [ASKED, ANSWER | {"weight": 0.5}], "weight = 0.5"),
        ("qwen2_5", [ASKED | {"train": True}], "only assistant messages are learned"),
        ("qwen2_5", [ASKED, ANSWER | {"weight": 0, "train": True}], "contradict"),
        ("qwen3", [ASKED, ANSWER | {"reasoning": "Hm."}, ASKED], "the reasoning of message 1"),
    ],
)
def test_what_would_not_reach_the_model_is_refused(
    name: str, messages: Any, cause: str, tmp_path: Path
) -> None:
    assert cause in refusal(name, tmp_path, messages)


def test_a_system_prompt_that_a_template_drops_is_refused() -> None:
    system = {"role": "system", "content": "Be brief."}
    tokenizer = tokenizer_of("smollm2")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- '<|im_start|>' ~ message.role", "{%- if message.role != 'system' %}{{- message.role"
    ).replace("'<|im_end|>\\n' }}\n{%- endfor", "'<|im_end|>\\n' }}{%- endif %}\n{%- endfor")
    with pytest.raises(ValueError, match=r"the content of message 0 \(system\).*leaves it out"):
        Renderer(tokenizer).render([system, ASKED])
    assert "Tom" in Renderer(tokenizer).render([ASKED])


def test_developer_is_system_where_a_template_does_not_know_it(tmp_path: Path) -> None:
    brief = {"role": "developer", "content": "Be brief."}
    path = write(tmp_path, json.dumps({"messages": [brief, ASKED]}))
    assert "<|im_start|>system\nBe brief.<|im_end|>" in shown("qwen2_5", path)[0]
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in shown("gpt_oss", path)[0]


@pytest.mark.parametrize("content", ["    return 7", "7 \n", " "])
def test_an_answer_that_the_template_trims_is_refused(content: str, tmp_path: Path) -> None:
    messages = [ASKED, {"role": "assistant", "content": content}]
    assert "changes the content of message 1" in refusal("llama3_1", tmp_path, messages, LEARNED)
    text, _ = learned("qwen2_5", tmp_path, messages)
    assert f"<|im_start|>assistant\n{content}<|im_end|>" in text
    # White space at the ends of a question may go, as at a server.
    path = write(tmp_path, json.dumps({"messages": [ASKED | {"content": " Tom? \n"}]}))
    assert "\n\nTom?<|eot_id|>" in shown("llama3_1", path)[0]


def test_a_learned_message_says_something(tmp_path: Path) -> None:
    first = [ANSWER, ASKED]
    assert "nothing comes before it" in refusal("qwen2_5", tmp_path, first, LEARNED)
    empty = [ASKED, {"role": "assistant", "content": ""}]
    assert "says nothing that could be learned" in refusal("qwen2_5", tmp_path, empty, LEARNED)


def test_a_template_that_writes_the_day_may_run_past_midnight() -> None:
    """What the template writes between parts is kept; the new day must not look like a change."""
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = "{{- day }}" + tokenizer.chat_template
    days = {"day": "Mon"}
    template = Renderer(tokenizer, days).template
    assert template.render([ASKED]).text.startswith("Mon")
    template._variables["day"] = "Tuesday"
    assert template.render([ASKED]).text.startswith("Tuesday")


NO_OBJECT = (("not JSON", '"not JSON"'), ("[1]", "[1]"), ("null", "{}"), ("", "{}"))


def test_arguments_that_are_no_object_stay_where_a_model_wrote_them() -> None:
    renderer = Renderer(tokenizers("qwen2_5"))
    for arguments, written in NO_OBJECT:
        text = renderer.render([ASKED, call(arguments, content="")])
        assert f'"arguments": {written}' in text
    with pytest.raises(ValueError, match="nested deeper than"):
        renderer.render([ASKED, call("[" * 3000 + "]" * 3000)])


def test_a_variable_that_the_template_does_not_read_is_refused() -> None:
    for name in ("qwen3", "gpt_oss"):
        template = Renderer(tokenizers(name), {"enable_thinkin": False}).template
        assert template.unread() == ["enable_thinkin"]
    assert Renderer(tokenizers("qwen3"), {"enable_thinking": False}).template.unread() == []
    values = {"data.template_kwargs": parse_value("data.template_kwargs", ["toolz=1"])}
    with pytest.raises(ConfigError, match="did you mean tools"):
        read_task(with_values(tiny_config(), values))


def checked(task: Task) -> list[str]:
    return list(check().check_task(task, tiny_config().algo))


def test_check_says_what_rows_hold_and_what_is_learned(tmp_path: Path) -> None:
    asked = ("<|im_start|>user\na", "#### 1"), ("b", "2")
    rows = [{"question": question, "answer": answer} for question, answer in asked]
    data = {"data.path": (str(write(tmp_path, *map(json.dumps, rows))),), "eval.path": ()}
    config = with_values(tiny_config(), data | {"train.objective": "sft"})
    said = "\n".join(checked(read_task(config)))
    assert "1 of 2 rows hold a control token of the chat template, such as rows.jsonl:1" in said
    assert "learned first in rows.jsonl:1: '#### 1<|im_end|>'" in said and "writes" not in said


@pytest.mark.parametrize(
    ("name", "parser", "note"),
    [
        *(("qwen2_5", "", ""), ("qwen3", "hermes", ""), ("qwen3_5", "qwen3_coder", "")),
        ("qwen3_5", "", "the parser reads no call: set env.tool_parser"),
        ("llama3_1", "", "the parser reads no call"),
        *(("glm4", "glm45", ""), ("smollm2", "", "cannot show a call of 'weather'")),
    ],
)
def test_check_says_if_the_parser_does_not_read_calls(name: str, parser: str, note: str) -> None:
    settings = EnvConfig(name="single_turn", tool_parser=parser)
    task = read_task(tiny_config(eval={"path": ()}))
    row = replace(task.prompts.prompts[0], tools=tuple(TOOLS))
    setup = ConversationSetup.of(settings, tokenizers(name), name)
    own = replace(task, conversation_setup=setup, prompts=replace(task.prompts, prompts=(row,)))
    said = "\n".join(line for line in checked(own) if "note: the chat template" in line)
    assert note in said and bool(note) == bool(said), said


def test_results_of_several_calls_are_one_turn_as_in_the_whole_rendering(tmp_path: Path) -> None:
    """Rendered one by one, each would begin a turn of its own."""
    both = call({"city": "Rome"}, content="")
    both["tool_calls"] += call({"city": "Oslo"})["tool_calls"]
    results = [{"role": "tool", "content": text} for text in ("warm", "cold")]
    messages = [ASKED, both, *results, ANSWER]
    text, parts = learned("qwen3", tmp_path, messages)
    assert tokenizers("qwen3").apply_chat_template(messages, tokenize=False).startswith(text)
    assert text.count("<|im_start|>user") == 2 and len(parts) == 2


def test_thoughts_in_a_content_are_learned_as_they_are_or_refused(tmp_path: Path) -> None:
    """Qwen3's template takes them apart, and writes line ends around them."""
    content = "<think>\nHm.\n</think>\n\n#### 3"
    whole = [ASKED, ANSWER | {"content": content}]
    text, _ = learned("qwen3", tmp_path, whole)
    assert text.endswith(f"<|im_start|>assistant\n{content}<|im_end|>")
    for messages in (
        [ASKED, ANSWER | {"content": "<think>Hm.</think>#### 3"}],
        [ASKED, ANSWER | {"content": "<think>\nHm.\n</think>#### 3"}],
        [*whole, ASKED, ANSWER],
    ):
        assert "changes the content of message 1" in refusal("qwen3", tmp_path, messages, LEARNED)


def test_what_the_generation_prompt_holds_is_not_learned(tmp_path: Path) -> None:
    for variables, expected in (
        ({}, "<think>\n\n</think>\n\n#### 3<|im_end|>"),
        ({"enable_thinking": False}, "#### 3<|im_end|>"),
    ):
        _, parts = learned("qwen3", tmp_path, [ASKED, ANSWER], template_kwargs=variables)
        assert parts == [expected]


def test_a_template_may_mark_what_transformers_counts_as_the_models() -> None:
    tokenizer = tokenizer_of("smollm2")
    tokenizer.chat_template = (
        "{%- for m in messages %}{% generation %}{{ m.role ~ m.content }}{% endgeneration %}"
        "{%- if m.content == 'stop' %}{% break %}{% endif %}{%- endfor %}{{ mood }}"
    )
    template = Renderer(tokenizer, {"mood": "good", "moot": 1}).template
    assert template.render([ASKED]).text == "userTom has 3 books.good"
    assert template.unread() == ["moot"]
