"""Environments: what is refused of a user's file, what the built-in ones say, and how their words
are put behind the model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from r3 import assets
from r3.cli.checks import problems
from r3.config import ConfigError, EnvConfig
from r3.envs import ENVIRONMENTS, Environment, checked_step, find
from r3.envs.calculator import Calculator, evaluate
from r3.envs.chat import Chat, ChatError
from r3.envs.guess_number import GUESSES, LARGEST, GuessNumber
from r3.envs.runner import Environments, Reply
from r3.envs.tool_calls import parse_tool_calls
from r3.rollout.conversation import readable_message
from r3.types import Prompt
from tests.tiny import tiny_config

pytestmark = pytest.mark.unit


def prompt(name: str = "rows.jsonl:1") -> Prompt:
    messages = ({"role": "user", "content": "1+1?"},)
    return Prompt(id=name, messages=messages, tokens_T=(1, 2), answer="#### 2")


def said(text: str, finish_reason: str = "stop") -> dict[str, str]:
    return {"role": "assistant", "content": text, "finish_reason": finish_reason}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(assets.TINY_MOE)


GOOD = """
class Mine:
    stop = ("###",)
    def reset(self, prompt):
        return prompt.messages
    def step(self, message):
        return [], 1.0, True
"""


@pytest.mark.parametrize(
    ("source", "name", "said_early", "said_late"),
    [
        (GOOD, "Other", "defines no class 'Other'", "has no attribute 'Other'"),
        ("def Mine(): pass", "Mine", "defines no class 'Mine'", "is not a class"),
        (GOOD.replace("def step", "def stop_"), "Mine", "has no method step", "has no method step"),
        (
            GOOD.replace("(self, prompt)", "(self)"),
            "Mine",
            "Mine.reset does not take",
            "Mine.reset cannot be",
        ),
        (
            GOOD.replace("(self, message)", "(self, message, turn)"),
            "Mine",
            "Mine.step does not take",
            "Mine.step cannot be",
        ),
        (
            GOOD + "    def __init__(self, what): pass\n",
            "Mine",
            "",
            "cannot be created",
        ),
        (GOOD.replace('("###",)', '"###"'), "Mine", "", "Mine.stop is '###', not a list"),
        (GOOD + "raise OSError('at import')\n", "Mine", "", "raised OSError: at import"),
        ("class Mine(:\n", "Mine", "is not valid Python", "raised SyntaxError"),
    ],
)
def test_a_users_file_is_refused_by_name(
    source: str, name: str, said_early: str, said_late: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    spec = f"{file}:{name}"
    found = [str(p) for p in problems(tiny_config(env={"path": spec}), 1) if p.field == "env.path"]
    assert bool(found) == bool(said_early)
    assert said_early in "".join(found)
    with pytest.raises(ConfigError, match=r"env\.path") as error:
        find(EnvConfig(path=spec))
    assert said_late in str(error.value)


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"path": "nowhere.py:Mine"}, "env.path", "cannot be read"),
        ({"path": "mine"}, "env.path", "file.py:Class"),
        ({"path": "mine.py:Mine", "name": "calculator"}, "env.name", "one environment"),
        ({"max_turns": 0}, "env.max_turns", "at least 1"),
        ({"max_turn_tokens": -1}, "env.max_turn_tokens", "at least 0"),
        (
            {"max_turn_tokens": 25},
            "env.max_turn_tokens",
            "exceeds rollout.max_response_tokens = 24",
        ),
        ({"timeout_s": 0.0}, "env.timeout_s", "above 0"),
        ({"workers": -1}, "env.workers", "at least 0"),
        ({"retries": -1}, "env.retries", "at least 0"),
        ({"stop": ("a", "")}, "env.stop", "empty string"),
    ],
)
def test_settings_of_the_environment_are_checked(
    fields: dict[str, Any], field: str, text: str
) -> None:
    found = [problem for problem in problems(tiny_config(env=fields), 1) if problem.field == field]
    assert found and text in str(found[0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "must return (messages, reward, done)"),
        (([], "high", True), "finite number or None"),
        (([], float("nan"), True), "finite number or None"),
        (("more", None, False), "must return a list of messages"),
        (([{"role": "user"}], None, False), "a message needs"),
        (([], None, False), "no message for the model"),
    ],
)
def test_what_step_returns_is_checked(value: Any, text: str) -> None:
    with pytest.raises(TypeError) as error:
        checked_step(value)
    assert text in str(error.value)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_built_in_environments_keep_the_contract(name: str) -> None:
    environment: Environment = ENVIRONMENTS[name]()
    opening: Any = environment.reset(prompt())
    assert opening and all(message["role"] and message["content"] for message in opening)
    for _ in range(20):
        value: Any = environment.step(said("I do not know what to say"))
        if checked_step(value).done:
            return
    pytest.fail(f"{name} goes on for ever")


@pytest.mark.parametrize(
    ("text", "replies"),
    [
        ("<tool_call>47+38</tool_call>", ["85"]),
        ("first <tool_call>2*(3-5)</tool_call> then <tool_call>1/4</tool_call>", ["-4", "0.25"]),
        ('<tool_call>{"name": "calc", "arguments": {"expression": "7 - 10"}}</tool_call>', ["-3"]),
        ("<tool_call>{bad json</tool_call>", ["error"]),
        ("<tool_call>1/0</tool_call>", ["error"]),
        ("<tool_call>9**9**9</tool_call>", ["error"]),
        ("<tool_call>__import__('os')</tool_call>", ["error"]),
        ("<tool_call>" + "9*" * 500 + "9</tool_call>", ["error"]),
        ("#### 85", []),
        ("<tool_call>47+38", []),
    ],
)
def test_calculator_replies_to_calls_and_ends_without_one(text: str, replies: list[str]) -> None:
    messages, reward, done = Calculator().step(said(text))
    assert [message["content"] for message in messages] == replies
    assert reward is None and done == (not replies)


def test_calculator_is_exact() -> None:
    assert evaluate("0.1+0.2") == "0.3"


def play(name: str) -> tuple[int, float]:
    """Guesses and reward of a perfect player."""
    game = GuessNumber()
    game.reset(prompt(name))
    low, high = 0, LARGEST
    for guesses in range(1, GUESSES + 1):
        guess = (low + high) // 2
        messages, reward, done = game.step(said(f"is it {guess}?"))
        if done:
            assert reward is not None
            return guesses, reward
        low, high = (guess + 1, high) if messages[0]["content"] == "higher" else (low, guess - 1)
    raise AssertionError("not found by halving")


def test_guess_number_can_always_be_won_and_pays_for_few_guesses() -> None:
    found = {f"row:{i}": play(f"row:{i}") for i in range(60)}
    assert len({guesses for guesses, _ in found.values()}) > 3, "numbers differ between prompts"
    assert all(reward == 1 - (guesses - 1) / GUESSES for guesses, reward in found.values())
    assert found == {name: play(name) for name in found}


def test_guess_number_lost_is_worth_nothing() -> None:
    game = GuessNumber()
    game.reset(prompt())
    replies = [game.step(said("no idea")) for _ in range(GUESSES)]
    assert [reply[2] for reply in replies] == [False] * (GUESSES - 1) + [True]
    assert replies[-1][1] == 0.0


# --- the template ---


def test_what_follows_is_what_the_template_renders(tokenizer: Any) -> None:
    chat = Chat(tokenizer, "tiny", Calculator.tools)
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
    assert first + sampled + [chat.end] + chat.following([reply], ended=True) == whole
    assert first + sampled + chat.following([reply], ended=False) == whole
    assert chat.end == tokenizer.eos_token_id


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
        "unchanged and exactly once",
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
        "one special token",
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
        Chat(tokenizer, "some/model")
    assert text in str(error.value)


def test_messages_that_the_template_refuses_fail_one_conversation(
    tokenizer: Any,
) -> None:
    picky: Any = AutoTokenizer.from_pretrained(assets.TINY_MOE)
    picky.chat_template = (
        "{%- if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{%- endif %}"
        + tokenizer.chat_template
    )
    chat = Chat(picky, "tiny")
    with pytest.raises(ChatError, match="no tools"):
        chat.following([{"role": "tool", "content": "85"}], ended=True)


# --- many at once ---

SEVERAL = """
import asyncio, time

class Plain:
    def __init__(self):
        self.heard = []
    def reset(self, prompt):
        return prompt.messages
    def step(self, message):
        self.heard.append(message["content"])
        if message["content"] == "bad":
            raise ValueError("bad word")
        return [{"role": "user", "content": " ".join(self.heard)}], None, False

class Async(Plain):
    inside = most = 0
    async def step(self, message):
        Async.inside += 1
        Async.most = max(Async.most, Async.inside)
        await asyncio.sleep(0.2)
        Async.inside -= 1
        return super().step(message)
"""


def collect(environments: Environments, count: int) -> dict[int, Reply]:
    replies: dict[int, Reply] = {}
    until = time.monotonic() + 60
    while len(replies) < count:
        assert time.monotonic() < until
        replies |= {reply.key: reply for reply in environments.poll(0.5)}
    return replies


@pytest.mark.parametrize(
    ("name", "workers"), [("Plain", 0), ("Plain", 2), ("Async", 0), ("Async", 2)]
)
def test_conversations_keep_their_own_environment_wherever_it_runs(
    name: str, workers: int, tmp_path: Path
) -> None:
    file = tmp_path / "several.py"
    file.write_text(SEVERAL)
    environments = Environments(EnvConfig(path=f"{file}:{name}", workers=workers))
    count = 40 if workers == 0 else 6
    for key in range(count):
        environments.open(key, prompt())
    assert all(reply.opened == prompt().messages for reply in collect(environments, count).values())
    for turn in range(2):
        for key in range(count):
            environments.send(key, said("bad" if key == 3 and turn == 1 else f"{key}.{turn}"))
        replies = collect(environments, count)
        if name == "Async" and not workers:
            most = environments._class.most  # type: ignore[attr-defined]
            assert most > 1, "waits overlap"
    failure = replies.pop(3).failure
    assert failure is not None and "bad word" in failure.text
    for key, reply in replies.items():
        assert reply.step is not None
        assert reply.step.messages[0]["content"] == f"{key}.0 {key}.1"
    assert environments.take_counts()["errors"] == 1
    environments.close()


WITH_ARGS = """
class Limited:
    def __init__(self, limit=1, name=""):
        self.limit, self.name = limit, name
    def reset(self, prompt):
        return [{"role": "user", "content": f"{self.name} {self.limit + 1}"}]
    def step(self, message):
        return [], 1.0, True
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_env_args_are_typed_keyword_arguments(workers: int, tmp_path: Path) -> None:
    file = tmp_path / "limited.py"
    file.write_text(WITH_ARGS)
    args = ("limit=3", "name=a=b")
    environments = Environments(EnvConfig(path=f"{file}:Limited", args=args, workers=workers))
    environments.open(0, prompt())
    opened = collect(environments, 1)[0].opened
    assert opened is not None and opened[0]["content"] == "a=b 4"
    environments.close()


def test_an_argument_that_an_environment_does_not_take_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "limited.py"
    file.write_text(WITH_ARGS)
    with pytest.raises(ConfigError, match=r"Limited\(depth=2\) cannot be created"):
        find(EnvConfig(path=f"{file}:Limited", args=("depth=2",)))
    with pytest.raises(ConfigError, match="calculator takes none"):
        find(EnvConfig(name="calculator", args=("depth=2",)))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        (
            'one <tool_call>{"name": "calc", "arguments": {"x": 1}}</tool_call>',
            [{"name": "calc", "arguments": {"x": 1}}],
        ),
        (
            '<tool_call>\n{"name": "a"}\n</tool_call><tool_call>{"name": "b"}</tool_call>',
            [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}],
        ),
        ("<tool_call>1+2</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', []),
        ('<tool_call>{"name": "a"}', []),
    ],
)
def test_tool_calls_are_parsed(text: str, calls: list[dict[str, Any]]) -> None:
    assert parse_tool_calls(text) == calls


# --- the end of an environment ---

CLOSING = """
import asyncio, os, time, uuid

LOG = {log!r}

def log(word, name):
    with open(LOG, "a") as file:
        file.write(f"{{word}} {{name}}\\n")

class Plain:
    def __init__(self):
        self.name = uuid.uuid4().hex
    def act(self, word):
        if word == "raise":
            raise ValueError("on purpose")
        if word == "hang":
            time.sleep(60)
        if word == "crash":
            os._exit(9)
    def reset(self, prompt):
        log("opened", self.name)
        self.act(prompt.answer)
        return prompt.messages
    def step(self, message):
        self.act(message["content"])
        return [{{"role": "user", "content": "go on"}}], None, False
    def close(self):
        log("closed", self.name)
        self.act("raise" if os.environ.get("R3_TEST_CLOSE_FAILS") else "")

class Async(Plain):
    async def reset(self, prompt):
        log("opened", self.name)
        if prompt.answer == "hang":
            await asyncio.sleep(60)
        self.act(prompt.answer)
        return prompt.messages
    async def step(self, message):
        if message["content"] == "hang":
            await asyncio.sleep(60)
        return super().step(message)
    async def close(self):
        await asyncio.sleep(0.01)
        super().close()
"""

PLACES = [("Plain", 0), ("Plain", 1), ("Async", 0), ("Async", 1)]
CRASHES = [("Plain", 1), ("Async", 1)]  # in a thread a crash would end the test itself


class Closing:
    """Conversations with environments that write down when they are opened and closed."""

    def __init__(self, folder: Path, name: str, workers: int) -> None:
        self.log = folder / "log"
        self.log.touch()
        file = folder / "closing.py"
        file.write_text(CLOSING.format(log=str(self.log)))
        settings = EnvConfig(path=f"{file}:{name}", workers=workers, timeout_s=1.5, retries=1)
        self.environments = Environments(settings)

    def open(self, answer: str = "") -> Reply:
        self.environments.open(0, replace(prompt(), answer=answer))
        return collect(self.environments, 1)[0]

    def send(self, word: str) -> Reply:
        self.environments.send(0, said(word))
        return collect(self.environments, 1)[0]

    def names(self, word: str) -> list[str]:
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [name for kind, name in lines if kind == word]

    def all_closed_once(self) -> None:
        self.environments.close()
        closed = self.names("closed")
        assert closed and len(set(closed)) == len(closed), f"closed twice: {closed}"
        assert set(closed) == set(self.names("opened"))


@pytest.mark.parametrize(("name", "workers"), PLACES)
def test_a_conversation_that_is_over_closes_its_environment_once(
    name: str, workers: int, tmp_path: Path
) -> None:
    closing = Closing(tmp_path, name, workers)
    assert closing.open().opened and closing.send("hello").step
    assert not closing.names("closed")
    closing.environments.forget(0)
    closing.environments.forget(0)
    closing.all_closed_once()


@pytest.mark.parametrize(
    ("name", "workers", "word"),
    [
        *((name, workers, "raise") for name, workers in PLACES),
        *((name, workers, "crash") for name, workers in CRASHES),
        ("Plain", 0, "hang"),
        ("Plain", 1, "hang"),
        ("Async", 0, "hang"),
    ],
)
@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_fails_is_closed_once(
    name: str, workers: int, word: str, method: str, tmp_path: Path
) -> None:
    closing = Closing(tmp_path, name, workers)
    if method == "reset":
        failure = closing.open(word).failure
    else:
        assert closing.open().opened
        failure = closing.send(word).failure
    kinds = {"raise": "error", "crash": "crash", "hang": "timeout"}
    assert failure is not None and failure.kind == kinds[word]
    closing.environments.forget(0)
    closing.all_closed_once()


@pytest.mark.parametrize(("name", "workers"), PLACES)
def test_the_end_of_a_run_closes_what_is_open_even_inside_a_call(
    name: str, workers: int, tmp_path: Path
) -> None:
    closing = Closing(tmp_path, name, workers)
    assert closing.open().opened
    closing.environments.send(0, said("hang"))
    began = time.monotonic()
    closing.all_closed_once()
    assert time.monotonic() - began < 30, "the call in flight was waited for"


@pytest.mark.parametrize(("name", "workers"), PLACES)
def test_a_suspended_environment_is_closed_when_it_is_dropped_or_over(
    name: str, workers: int, tmp_path: Path
) -> None:
    closing = Closing(tmp_path, name, workers)
    states = []
    for _ in range(2):
        assert closing.open().opened
        states.append(closing.environments.suspend(0))
    closing.environments.close_all()
    assert not closing.names("closed"), "suspended is not over"
    closing.environments.discard(states[0])
    closing.environments.resume(0, states[1])
    assert closing.send("hello").step
    closing.environments.forget(0)
    closing.all_closed_once()


def test_a_close_that_fails_is_a_warning_and_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R3_TEST_CLOSE_FAILS", "1")
    closing = Closing(tmp_path, "Plain", 0)
    assert closing.open().opened
    closing.environments.forget(0)
    with pytest.warns(UserWarning, match=r"(?s)Plain: close\(\) failed \(error\).*on purpose"):
        closing.environments.close_all()
    assert closing.environments.take_counts()["errors"] == 1
    closing.all_closed_once()


def test_default_environment_is_one_turn() -> None:
    environments = Environments(EnvConfig())
    assert environments.one_turn and not environments.stop
    assert Environments(replace(EnvConfig(), stop=("a",))).stop == ("a",)


def test_a_message_readable_message_is_plain_json() -> None:
    message = {
        "role": "tool",
        "content": "7",
        "name": "calc",
        "board": object(),
        "tool_calls": None,
    }
    assert readable_message(message) == {"role": "tool", "content": "7", "name": "calc"}
    odd = readable_message(
        {"role": "assistant", "content": "", "tool_calls": [{"arguments": {1: Path("a")}}]}
    )
    assert odd["tool_calls"] == [{"arguments": {"1": "a"}}]
