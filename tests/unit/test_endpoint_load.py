"""Many clients of the endpoint at once, slow and dying ones among them, and odd requests: each
request gets a reply or an error of its API, and each episode a reward or a named failure."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from r3.config import EnvConfig
from r3.envs import Model, Workflows, serve
from r3.rollout import EnvironmentFailed
from r3.types import Prompt
from tests.agents import ASK, Played, address_of, chat, play, post
from tests.errors import Caplog, Capsys, Patch
from tests.rounds import numbered, play_round
from tests.talkers import values

anthropic, openai = (pytest.importorskip(name) for name in ("anthropic", "openai"))

USER = [{"role": "user", "content": "a"}]
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": USER},
    "/inference/v1/generate": {"token_ids": [3]},
}
FORM = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\npolicy\r\n--x--\r\n'
BODIES: list[bytes] = [
    *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'"a"', b"[" * 100_000, b" " * (2 << 20), FORM),
    *(b"model=policy&messages=a", b'{"model": "policy", "model": "gpt"}', b'{"model": 1e999}'),
]
CHANGES: list[dict[str, Any]] = [
    {"model": None},
    {"n": 2},
    {"stream": "yes"},
    {"train": 1},
    {"temperature": []},
    *({name: odd} for name in ("messages", "prompt", "input", "token_ids") for odd in ({}, [{}])),
]
ELSEWHERE = [
    *(("POST", path) for path in ("/", "/v1", "/v1/embeddings", "/v1/messages/batches", "//")),
    *((method, path) for method in ("GET", "PUT", "DELETE", "PATCH") for path in WHOLE),
    *(("GET", path) for path in ("/v1/responses/resp_1", "/v1/models/gpt", "/v1/%00", "/docs")),
]  # fmt: skip


def has_shape(path: str, error: Any) -> bool:
    """Whether a body is an error of the API that the path belongs to."""
    inner = error["error"]
    if path.startswith("/v1/messages"):
        return bool(error["type"] == "error" and inner["type"] and inner["message"])
    return bool(inner["message"]) and {"type", "param", "code"} <= inner.keys()


def test_every_odd_request_is_refused_in_the_form_of_its_api(
    capfd: Capsys, caplog: Caplog, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("r3.envs.apis.handlers._SAID", set())
    odd: list[tuple[str, str, bytes]] = [("POST", path, body) for path in WHOLE for body in BODIES]
    for path, whole in WHOLE.items():
        for change in CHANGES:
            if change.keys() <= {*whole, "model", "n", "stream", "train", "temperature"}:
                body = {"model": "policy", **whole, **change}
                odd.append(("POST", path, json.dumps(body).encode()))
    odd += [(*each, b"") for each in ELSEWHERE]

    async def agent(client: Any) -> Any:
        await chat(client)
        url, head = address_of(client), {"x-api-key": client.api_key}
        found = []
        for method, path, body in odd:
            reply = await client._client.request(method, url + path, content=body, headers=head)
            found.append((reply.status_code, has_shape(path, reply.json())))
        for token in ({}, {"Authorization": "Basic eA=="}, {"x-api-key": b"\xe9"}):
            reply = await client._client.post(f"{url}/v1/messages", content=b"{}", headers=token)
            assert (reply.status_code, has_shape("/v1/messages", reply.json())) == (401, True)
        await chat(client)
        return found

    played = play(agent)
    wrong = [(odd[i], each) for i, each in enumerate(played.value)
             if not (400 <= each[0] < 500 and each[1])]  # fmt: skip
    assert not wrong and len(odd) >= 72
    assert played.texts == ["hello<|im_end|>"] * 2, "no refused request was sampled"
    assert played.rollouts[-1].metrics == {"env/refused_invalid": float(len(odd))}
    said = capfd.readouterr().err
    assert said.count("warning: the endpoint refused") == 2 and "Traceback" not in said
    assert not caplog.records


async def sent(access: Any, body: Any, pieces: int = 1) -> tuple[Any, asyncio.StreamWriter]:
    """Send a chat in pieces; return what the reply is read from."""
    host, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({"model": "policy", **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: r3\r\nContent-Length: {len(content)}\r\n"
    whole = f"{head}Authorization: Bearer {access.api_key}\r\n\r\n".encode() + content
    for piece in range(pieces):
        writer.write(whole[piece * len(whole) // pieces : (piece + 1) * len(whole) // pieces])
        await writer.drain()
        await asyncio.sleep(0)
    return reader, writer


async def asked(access: Any, messages: Any, pieces: int = 1) -> Any:
    """The message that a chat gets; it is read one byte at a time if it is sent in pieces."""
    reader, writer = await sent(access, {"messages": messages}, pieces)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    content = bytearray()
    while len(content) < int(head.partition("content-length: ")[2].split()[0]):
        content += await reader.read(1 if pieces > 1 else 1 << 16)
    writer.close()
    assert head.startswith("http/1.1 200"), (head, content)
    return json.loads(content)["choices"][0]["message"]


class Crowd:
    """200 clients beside 100 slow ones and 50 that die: in mid-body, or while they are awaited."""

    async def run(self, task: Prompt, model: Model) -> Any:
        number = int(task.answer)
        async with serve(model) as access:
            messages = [*task.messages]
            for _ in range(2):
                message = await asked(access, messages, 40 if 200 <= number < 300 else 1)
                messages += [message, {"role": "user", "content": "go"}]
            if number < 300:
                return 1.0
            if number % 2:
                _, writer = await sent(access, {"messages": messages})
            else:
                _, writer = await sent(access, {"messages": messages[:1] * 1000}, 2)
            writer.transport.abort()
            raise ConnectionError(f"client {number} died")


def test_nothing_is_lost_among_slow_and_dying_clients(tokenizer: Any, caplog: Caplog) -> None:
    workflows = Workflows(EnvConfig(on_error="drop"), Crowd)
    prompts = {number: numbered(number) for number in range(350)}
    collected, _ = play_round(workflows, tokenizer, prompts)
    metrics = values(collected.metrics)
    assert Counter(each.group for each in collected.rollouts) == Counter(range(300))
    assert {each.loss_mask_T.sum() for each in collected.rollouts} == {
        2 * len(tokenizer("hello<|im_end|>")["input_ids"])
    }
    counts = ("calls", "errors", "dropped", "timeouts", "crashes")
    assert [metrics[f"env/{name}"] for name in counts] == [350, 50, 50, 0, 0]
    assert not caplog.records, "the server has nothing to say of those that died"


ABORT = "/abort_requests"


@pytest.mark.parametrize("names", [None, ["first"]], ids=["all", "named"])
def test_aborted_requests_end_and_others_go_on(names: Any) -> None:
    begun, over = threading.Event(), threading.Event()

    async def agent(client: Any) -> Any:
        late = [{"role": "user", "content": "late"}]
        both = [asyncio.create_task(chat(client, late, extra_body={"request_id": name}))
                for name in ("first", "second")]  # fmt: skip
        await asyncio.to_thread(begun.wait)
        reply = await post(client, ABORT, {} if names is None else {"request_ids": names})
        over.set()
        ends = await asyncio.gather(*both, return_exceptions=True)
        await chat(client, ASK)
        return reply.json(), [getattr(each, "code", "answered") for each in ends]

    def says(asked: str) -> str:
        if "late" in asked:
            begun.set()
            over.wait(60)
        return "hello"

    played = Played(agent, says)
    count = 2 if names is None else 1
    codes = ["request_aborted", "request_aborted" if names is None else "answered"]
    assert played.value == ({"aborted": count}, codes)
    assert played.texts == ["hello<|im_end|>"] * (3 - count)
    assert played.metrics["env/refused_aborted"] == count


@pytest.mark.parametrize("case", ["goes on", "ends", "has nothing"])
def test_an_episode_whose_last_call_was_aborted_says_so(case: str) -> None:
    over = threading.Event()

    async def agent(client: Any) -> Any:
        messages = [*ASK]
        if case != "has nothing":
            messages.append((await chat(client)).choices[0].message.model_dump())
        messages.append({"role": "user", "content": "late"})
        late = asyncio.create_task(chat(client, messages))
        while not (await post(client, ABORT, {})).json()["aborted"]:
            pass
        over.set()
        with pytest.raises(openai.BadRequestError, match="aborted"):
            await late
        if case == "goes on":
            await chat(client, messages)

    says = lambda asked: str("late" in asked and over.wait(60)) and "hello"  # noqa: E731
    if case == "has nothing":
        with pytest.raises(EnvironmentFailed, match=r"nothing to train on \(requests aborted: 1\)"):
            Played(agent, says)
        return
    (rollout,) = (played := Played(agent, says)).rollouts
    assert rollout.metrics == {"env/refused_aborted": 1.0}
    assert rollout.finish_reason == {"goes on": "stop", "ends": "aborted"}[case]
    assert played.texts == ["hello<|im_end|>" * (1 + (case == "goes on"))]


STREAMS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
SIGN = {each: ": waiting for the engine\n\n" for each in STREAMS}
SIGN["/v1/messages"] = 'event: ping\ndata: {"type": "ping"}\n\n'


async def streamed(client: Any, path: str, seen: Callable[[str], object] = str) -> str:
    """What a streamed request gets; `seen` is called with all that came so far."""
    url, head = address_of(client) + path, {"x-api-key": client.api_key}
    body, text = {"model": "policy", "stream": True, **WHOLE[path]}, ""
    async with client._client.stream("POST", url, json=body, headers=head) as reply:
        async for part in reply.aiter_text():
            text += part
            if seen(text) is False:
                break
    return text


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_for_the_engine_shows_signs_of_life(
    path: str, monkeypatch: Patch
) -> None:
    """Without them clients and proxies give up. The engine waits until three have come."""
    monkeypatch.setattr("r3.envs.apis.handlers._SILENT_S", 0.05)
    over = threading.Event()

    async def agent(client: Any) -> Any:
        text = await streamed(
            client, path, lambda said: over.set() if said.count(SIGN[path]) > 2 else None
        )
        monkeypatch.setattr("r3.envs.apis.handlers._SILENT_S", 60.0)
        return text, await streamed(client, path)

    played = Played(agent, lambda asked: str(over.wait(60) and "hello"))
    slow, quick = played.value
    assert slow.startswith(SIGN[path] * 3) and SIGN[path] not in quick and "hello" in quick
    same, told = ([line.partition("{")[0] for line in text.replace(SIGN[path], "").split("\n")]
                  for text in (slow, quick))  # fmt: skip
    assert same == told and len(told) > 4, "the events of both have other times only"
    assert set(played.texts) == {"hello<|im_end|>"} and len(played.turns) == 2


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_is_aborted_late_ends_with_an_error(
    path: str, caplog: Caplog, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("r3.envs.apis.handlers._SILENT_S", 0.05)
    over, tasks = threading.Event(), []

    async def agent(client: Any) -> Any:
        def aborts(said: str) -> None:
            if said == SIGN[path]:
                tasks.append(asyncio.create_task(post(client, ABORT, {})))

        text = await streamed(client, path, aborts)
        await streamed(client, path, lambda said: False)  # it hangs up
        while not client.refused["hung_up"]:
            await asyncio.sleep(0.01)
        over.set()
        await chat(client, ASK)
        return text

    played = Played(agent, lambda asked: str(over.wait(60) and "hello"))
    last = played.value.replace(SIGN[path], "").removesuffix("data: [DONE]\n\n")
    event, _, data = last.partition("data: ")
    assert event == ("event: error\n" if path in ("/v1/messages", "/v1/responses") else "")
    assert has_shape(path, json.loads(data)) and "the request was aborted" in data
    assert played.texts == ["hello<|im_end|>"] and not caplog.records
    assert played.metrics["env/refused_aborted"] == played.metrics["env/refused_hung_up"] == 1


def test_official_clients_read_past_signs_of_life(monkeypatch: Patch) -> None:
    monkeypatch.setattr("r3.envs.apis.handlers._SILENT_S", 0.05)

    async def agent(client: Any) -> Any:
        parts = [part async for part in await chat(client, stream=True)]
        given: Any = {"model": "policy", "input": "a", "stream": True}
        events = [each async for each in await client.responses.create(**given)]
        options = {"base_url": address_of(client), "auth_token": client.api_key}
        async with anthropic.AsyncAnthropic(**options) as claude:
            given = {"model": "policy", "messages": USER, "max_tokens": 9}
            async with claude.messages.stream(**given) as stream:
                message = await stream.get_final_message()
        return [parts[0].choices[0].delta.content, events[-1].response.output_text,
                message.content[0].text]  # fmt: skip

    assert Played(agent, lambda asked: str(time.sleep(0.5) or "hello")).value == ["hello"] * 3


@pytest.mark.parametrize("listen", ["127.0.0.1", "[::1]", "0.0.0.0"])
def test_other_forms_of_http_are_served(listen: str, capfd: Capsys, caplog: Caplog) -> None:
    """Chunks, HTTP/1.0, three requests at once and a body of 10 MB, beside one that never comes."""

    async def agent(client: Any) -> Any:
        url, chat_path = client.base_url, "/v1/chat/completions"
        body = json.dumps({"model": "policy", **WHOLE[chat_path]}).encode()
        key = f"Host: r3\r\nAuthorization: Bearer {client.api_key}\r\n"

        async def told(*requests: bytes) -> tuple[int, int]:
            reader, writer = await asyncio.open_connection(url.host.strip("[]"), url.port)
            writer.write(b"".join(requests))
            head = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"
            writer.write(b"" if b"HTTP/1.0" in requests[0] else head)  # the end, without a token
            text = await reader.read()
            writer.close()
            return text.count(b" 200 OK\r\n"), text.count(b" 401 Unauthorized\r\n")

        def asked(body: bytes, size: str = "", version: str = "1.1", head: str = key) -> bytes:
            size = size or f"Content-Length: {len(body)}"
            return f"POST {chat_path} HTTP/{version}\r\n{head}{size}\r\n\r\n".encode() + body

        _, silent = await asyncio.open_connection(url.host.strip("[]"), url.port)
        silent.write(asked(b"", "Content-Length: 9"))
        chunks = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
        other = key.replace(client.api_key, "r3-other")
        found = [
            await told(asked(body)),
            await told(asked(chunks, "Transfer-Encoding: chunked")),
            await told(asked(body, version="1.0")),
            await told(asked(body), asked(body, head=other), asked(body)),
            await told(asked(b"[" + b" " * 10_000_000)),
        ]
        silent.close()
        while not client.refused["hung_up"]:
            await asyncio.sleep(0.01)
        return found

    played = play(agent, listen=listen, advertise="127.0.0.1" if listen == "0.0.0.0" else "")
    assert played.value == [(1, 1), (1, 1), (1, 0), (2, 2), (0, 1)]
    assert played.texts == ["hello<|im_end|>"] * 5
    assert played.rollouts[-1].metrics == {"env/refused_hung_up": 1, "env/refused_invalid": 1}
    # One that vanishes is counted, and nothing more is said than of what was refused.
    assert all("refused" in line for line in capfd.readouterr().err.splitlines())
    assert not caplog.records
