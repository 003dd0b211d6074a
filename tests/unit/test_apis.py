"""One conversation in the languages of three APIs, by official clients and as coding agents write
it. Cases of other servers' users stand in tests/README.md."""

import json
from typing import Any

import pytest

from tests.agents import CALL, GENERATE, NUMBER, PROMPT, TOOLS, Played, address_of, chat, play, post
from tests.errors import Patch

anthropic = pytest.importorskip("anthropic")

RULES, QUESTION = "Be short.", str(PROMPT.messages[0]["content"])
THOUGHT = "<think>\nhm\n</think>\n\n"
APIS = ["chat", "messages", "responses"]
FUNCTION: dict[str, Any] = {"name": "calc", "parameters": NUMBER}


def claude(client: Any) -> Any:
    given = {"base_url": address_of(client), "api_key": client.api_key}
    return anthropic.AsyncAnthropic(**given, max_retries=0)


class Talk:
    """A conversation with a tool in one of the APIs; it sends back what it got."""

    def __init__(self, client: Any, api: str, stream: bool) -> None:
        self.client, self.api, self.stream = client, api, stream
        self.said: list[Any] = [{"role": "user", "content": QUESTION}]

    async def ask(self) -> tuple[str, str, list[tuple[str, Any]], str]:
        """Return reasoning, text, calls and ending."""
        return await getattr(self, f"_{self.api}")()

    def answer(self, text: str) -> None:
        """The result of the last message's call."""
        self.said.append({
            "chat": {"role": "tool", "tool_call_id": "call00001", "content": text},
            "responses": {"type": "function_call_output", "call_id": "call00001", "output": text},
            "messages": {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call00001", "content": text}]},
        }[self.api])  # fmt: skip

    async def _chat(self) -> Any:
        messages = [{"role": "system", "content": RULES}, *self.said]
        reply = await chat(self.client, messages, tools=TOOLS, stream=self.stream)
        if self.stream:
            parts = [part.choices[0] async for part in reply]
            message, ending = parts[0].delta, parts[1].finish_reason
        else:
            message, ending = reply.choices[0].message, reply.choices[0].finish_reason
        self.said.append(message.model_dump(exclude_none=True))
        calls = [(each.function.name, json.loads(each.function.arguments))
                 for each in message.tool_calls or []]  # fmt: skip
        return getattr(message, "reasoning", ""), message.content or "", calls, ending

    async def _messages(self) -> Any:
        given: dict[str, Any] = {"model": "policy", "system": RULES, "max_tokens": 300}
        given |= {"messages": self.said, "tools": [{"name": "calc", "input_schema": NUMBER}]}
        async with claude(self.client) as client:
            if self.stream:
                async with client.messages.stream(**given) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**given)
        blocks = [block.model_dump() for block in message.content]
        self.said.append({"role": "assistant", "content": blocks})
        thought = "".join(each["thinking"] for each in blocks if each["type"] == "thinking")
        text = "".join(each["text"] for each in blocks if each["type"] == "text")
        calls = [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"]
        return thought, text, calls, message.stop_reason

    async def _responses(self) -> Any:
        given: Any = {"model": "policy", "instructions": RULES, "input": self.said}
        given["tools"] = [{"type": "function", **FUNCTION, "strict": False}]
        if self.stream:
            async with self.client.responses.stream(**given) as events:
                reply = await events.get_final_response()
        else:
            reply = await self.client.responses.create(**given)
        items = [item.model_dump(exclude_none=True) for item in reply.output]
        thought = "".join(e["content"][0]["text"] for e in items if e["type"] == "reasoning")
        calls = [(each["name"], json.loads(each["arguments"]))
                 for each in items if each["type"] == "function_call"]  # fmt: skip
        for each in items:  # Codex leaves out what the model thought, but for the sealed text
            self.said.append({key: value for key, value in each.items()
                              if key != "content" or each["type"] != "reasoning"})  # fmt: skip
        return thought, reply.output_text, calls, reply.status


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_a_conversation_of_each_api_is_one_sequence(api: str, stream: bool) -> None:
    async def agent(client: Any) -> Any:
        talk = Talk(client, api, stream)
        first = await talk.ask()
        talk.answer("two")
        return first, await talk.ask()

    def says(asked: str) -> str:
        return THOUGHT + ("done" if "two" in asked else CALL)

    played = Played(agent, says, reasoning_parser="qwen3")
    assert played.texts == [f"{THOUGHT}{CALL}<|im_end|>{THOUGHT}done<|im_end|>"]
    first, second = played.value
    endings = {"chat": ("tool_calls", "stop"), "messages": ("tool_use", "end_turn")}
    endings["responses"] = ("completed", "completed")
    assert (first[0].strip(), *first[1:3]) == ("hm", "I add.", [("calc", {"x": 1})])
    assert (second[1].strip(), second[2]) == ("done", []) and (first[3], second[3]) == endings[api]


def test_the_model_sees_the_same_tokens_by_each_api() -> None:
    async def agent(client: Any) -> None:
        for api in APIS:
            await Talk(client, api, False).ask()

    asked = [turn.tokens_T for turn in play(agent).turns]
    assert asked[0] == asked[1] == asked[2]


def test_tokens_are_counted_without_a_call() -> None:
    async def agent(client: Any) -> Any:
        given: Any = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}]}
        async with claude(client) as other:
            count = await other.messages.count_tokens(**given)
            reply = await other.messages.create(**given, max_tokens=9)
        return count.input_tokens, reply.usage.input_tokens

    played = play(agent)
    count, used = played.value
    assert count == used == len(played.turns[0].tokens_T) and len(played.turns) == 1


@pytest.mark.parametrize(
    ("options", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"max_tokens": 99, "stop_sequences": ["21", "#"]}, "stop_sequence", "#"),
        ({"max_tokens": 99, "stop_sequences": ["22"]}, "end_turn", None),
    ],
)
def test_messages_say_why_they_ended(options: Any, reason: str, sequence: str | None) -> None:
    async def agent(client: Any) -> Any:
        messages = [{"role": "user", "content": QUESTION}]
        async with claude(client) as other:
            return await other.messages.create(model="policy", messages=messages, **options)

    message = play(agent, "It is #### 21").value
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_a_response_that_was_cut_is_incomplete() -> None:
    async def agent(client: Any) -> Any:
        given: Any = {"model": "policy", "input": QUESTION, "max_output_tokens": 2}
        return [event async for event in await client.responses.create(**given, stream=True)]

    last = play(agent).value[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in last.response.output] == ["incomplete"]
    assert last.response.usage.output_tokens == 2


def test_streams_have_every_event_in_order() -> None:
    async def agent(client: Any) -> Any:
        found = []
        asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 99}
        for path, rest in (("/v1/messages", asked), ("/v1/responses", {"input": QUESTION})):
            reply = await post(client, path, {"model": "policy", "stream": True, **rest})
            events = [each.splitlines() for each in reply.text.split("\n\n") if each]
            found.append([json.loads(data.removeprefix("data: ")) for _, data in events])
            assert [name for name, _ in events] == [f"event: {e['type']}" for e in found[-1]]
        return found

    messages, responses = play(agent, CALL).value
    block = [f"content_block_{part}" for part in ("start", "delta", "stop")]
    assert [each["type"] for each in messages] == [
        "message_start", *block, *block, "message_delta", "message_stop"
    ]  # fmt: skip
    assert [each.get("index") for each in messages[1:7]] == [0, 0, 0, 1, 1, 1]
    item = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    text = [item[0], "content_part.added", *item[1:3], "content_part.done", item[3]]
    expected = [
        *("created", "in_progress"),
        *(each.format("output_text") for each in text),
        *(each.format("function_call_arguments") for each in item),
        "completed",
    ]
    assert [each["type"] for each in responses] == [f"response.{each}" for each in expected]
    assert [each["sequence_number"] for each in responses] == [*range(len(expected))]
    call = responses[-2]["item"]
    assert responses[-1]["response"]["output"][1] == call
    assert json.loads(call["arguments"]) == json.loads(responses[-3]["arguments"]) == {"x": 1}


# What Claude Code writes otherwise in each request, or in another language's JSON.
def test_what_claude_code_writes_again_continues_its_sequence() -> None:
    said = '<tool_call>{"name": "calc", "arguments": {"y": 1.0, "x": -0.0, "9": [1e3]}}</tool_call>'

    async def agent(client: Any) -> Any:
        cached = {"cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]
        system.append({"type": "text", "text": RULES, **cached})
        notes = {"role": "system", "content": "Agents: none."}
        body: Any = {"model": "policy", "max_tokens": 99, "system": system, "stream": False}
        body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "go"}]}, notes]
        body |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
        first = (await post(client, "/v1/messages?beta=true", body)).json()
        (block,) = first["content"]
        block["input"] = {"9": [1000], "x": 0, "y": 1}
        result = {"type": "tool_result", "tool_use_id": block["id"], "is_error": False}
        body["messages"] += [
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [{**result, "content": [{"type": "text", "text": "two"}]}]},
            {"role": "user", "content": "and on"},
        ]
        system[0]["text"] = "x-anthropic-billing-header: cch=2;"
        return (await post(client, "/v1/messages?beta=true", body)).json()

    played = play(agent, said)
    assert played.texts == [f"{said}<|im_end|>" * 2]
    asked = [played.tokenizer.decode(turn.tokens_T) for turn in played.turns]
    assert "billing" not in asked[1] and "<system-reminder>\nAgents: none." in asked[0]
    assert asked[1].index("two") < asked[1].index("and on") and played.value["role"] == "assistant"


def test_arguments_that_are_no_object_come_back_as_they_were_sampled() -> None:
    said = '<tool_call>{"name": "calc", "arguments": [1.0]}</tool_call>'

    async def agent(client: Any) -> Any:
        talk = Talk(client, "messages", False)
        await talk.ask()
        talk.answer("2")
        await talk.ask()
        return talk.said[1]["content"][0]["input"]

    played = play(agent, said, tool_parser="hermes")
    assert played.value == {"not_json": [1.0]} and played.texts == [f"{said}<|im_end|>" * 2]


def test_what_codex_sends_is_served(capfd: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr("r3.envs.apis.handlers._SAID", set())
    tools = [
        {"type": "function", **FUNCTION, "strict": False},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", **FUNCTION}]},
        {"type": "web_search", "external_web_access": True},
    ]
    more = [{"type": "custom", "name": "exec"}, {"type": "function", "name": "wait"}]

    async def agent(client: Any) -> Any:
        texts = [("developer", "a"), ("developer", "b"), ("user", "<cwd>"), ("user", "go")]
        items = [{"type": "message", "id": "msg_9", "role": role,
                  "content": [{"type": "input_text", "text": text}]}
                 for role, text in texts]  # fmt: skip
        items.insert(0, {"type": "additional_tools", "role": "developer", "tools": more})
        rest = {"store": False, "include": ["reasoning.encrypted_content"], "client_metadata": {}}
        rest |= {"parallel_tool_calls": False, "reasoning": {"effort": "low", "summary": "auto"}}
        rest |= {"prompt_cache_key": "k", "text": {"verbosity": "low"}, "tool_choice": "auto"}
        body = {"model": "policy", "input": items, "tools": tools, "stream": True, **rest}
        return await post(client, "/v1/responses", body)

    played = play(agent)
    asked = played.tokenizer.decode(played.turns[0].tokens_T)
    assert played.value.status_code == 200 and "system\na\n\nb<|im_end|>" in asked
    assert "<tools>calc</tools><tools>wait</tools>" in asked
    said = capfd.readouterr().err
    assert "sets a tool of type namespace, a tool of type web_search, a tool of type custom" in said


USER = [{"role": "user", "content": "a"}]
MESSAGES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "claude"}, 404, "not_found_error", "no model 'claude'"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "at least one message"),
    ({"messages": [*USER, {"role": "assistant", "content": "b"}]}, 400, "invalid", "end with"),
    ({"messages": [{"role": "tool", "content": "b"}]}, 400, "invalid", "role 'tool'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid", "'image'"),
    ({"messages": [{"role": "assistant", "content": [{"type": "x"}]}]}, 400, "invalid", "'x'"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid", "content must be"),
    ({"system": [{"type": "text"}]}, 400, "invalid", "only text"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid", "tool_choice"),
    ({"tools": {"name": "x"}}, 400, "invalid", "tools"),
    ({"output_config": {"format": {}}}, 400, "invalid", "no grammar"),
    ({"mcp_servers": [{"type": "url"}]}, 400, "invalid", "mcp_servers"),
    ({"logprobs": True}, 400, "invalid", "logprobs is not supported"),
    ({"messages": [{"role": "user", "content": "1 " * 600}]}, 400, "invalid", "prompt is too long"),
]
RESPONSES: list[tuple[dict[str, Any], str | None]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA=x"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input"),
    ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"truncation": "auto"}, "truncation"),
    ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice"),
    ({"tools": ["a"]}, "tools"),
    ({"input": [{"type": "additional_tools", "tools": None}]}, "tools"),
]
TOKENS: list[tuple[dict[str, Any], str | None]] = [
    ({"sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
    ({"sampling_params": {"logprobs": 5}}, "logprobs"),
    ({"sampling_params": {"stop_token_ids": [-1]}}, None),
    ({"sampling_params": {"guided": 1}}, "guided"),
    ({"sampling_params": [1]}, "sampling_params"),
    ({"features": {"mm_hashes": {}}}, "features"),
    ({"token_ids": "3 4"}, "token_ids"),
    ({"token_ids": [10**6]}, None),
    ({"token_ids": []}, None),
    ({"stream": True}, "stream"),
]


def test_errors_have_the_shape_of_their_api() -> None:
    async def agent(client: Any) -> Any:
        await chat(client)
        for change, status, kind, text in MESSAGES:
            body = {"model": "policy", "max_tokens": 9, "messages": USER, **change}
            reply = await post(client, "/v1/messages", body)
            error = reply.json()["error"]
            assert (reply.status_code, reply.json()["type"]) == (status, "error")
            assert error["type"].startswith(kind) and text in error["message"]
        for path, whole, cases in (
            ("/v1/responses", {"input": "a"}, RESPONSES),
            (GENERATE, {"token_ids": [3]}, TOKENS),
        ):
            for change, param in cases:
                reply = await post(client, path, {"model": "policy", **whole, **change})
                error = reply.json()["error"]
                assert (reply.status_code, error["param"]) == (400, param), error
        with pytest.raises(anthropic.AuthenticationError):
            client.api_key = "wrong"
            async with claude(client) as other:
                await other.messages.create(model="policy", max_tokens=9, messages=USER)

    assert play(agent).texts == ["hello<|im_end|>"], "no refused request was sampled"


def test_clients_see_that_there_is_a_server_without_a_token() -> None:
    async def agent(client: Any) -> Any:
        await chat(client)
        for method, path in (("HEAD", "/"), ("GET", "/health")):
            reply = await client._client.request(method, address_of(client) + path)
            assert reply.status_code == 200

    play(agent)
