"""Environments: what is refused of a user's file, what the built-in ones say, and how their words
are put behind the model's.
"""

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3 import assets
from r3.config import ConfigError, EnvConfig
from r3.envs import (
    ENVIRONMENTS,
    GUESSES,
    LARGEST,
    Calculator,
    Environment,
    Environments,
    GuessNumber,
    checked_step,
    parsed_calls,
)
from r3.rollout import OneTurn, read_task, readable_message
from tests.environments import answered, collect, opened, prompt, said
from tests.errors import message_of
from tests.rows import write
from tests.runs import soon
from tests.settings import found_in_files
from tests.tiny import tiny_config


def of_file(folder: Path, source: str, name: str = "Mine", **settings: Any) -> Environments:
    """Environments of a class in a user's file."""
    file = write(folder, source, name="mine.py")
    return Environments(EnvConfig(path=f"{file}:{name}", **settings))


GOOD = """
class Mine:
    stop = ("###",)
    def reset(self, prompt):
        return prompt.messages
    def step(self, message):
        return [], 1.0, True
"""


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        (GOOD, "Other", "defines no 'Other'"),
        ("def Mine(): pass", "Mine", "is not a class"),
        (GOOD.replace("def step", "def stop_"), "Mine", "has no method step"),
        (GOOD.replace("(self, prompt)", "(self)"), "Mine", "Mine.reset cannot be"),
        (GOOD.replace("(self, message)", "(self, message, turn)"), "Mine", "Mine.step cannot be"),
        (GOOD + "    def __init__(self, what): pass\n", "Mine", "parameters of __init__ defaults"),
        (GOOD + "raise OSError('at import')\n", "Mine", "mine.py:8 raised OSError: at import"),
        ("class Mine(:\n", "Mine", "raised SyntaxError"),
    ],
)
@pytest.mark.parametrize("field", ["env.path", "eval.env"])
def test_a_users_file_is_refused_by_name(
    source: str, name: str, said: str, field: str, tmp_path: Path
) -> None:
    file = write(tmp_path, source, name="mine.py")
    message = found_in_files({field: f"{file}:{name}", "eval.path": str(assets.WORD_PROBLEMS_EVAL)})
    assert said in message[field] and "Fix: " in message[field]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "must return (messages, reward, done)"),
        (([], "high", True), "finite number or None"),
        (([], float("nan"), True), "finite number or None"),
        (("more", None, False), "must return a list of messages"),
        (([{"role": "user"}], None, False), "a message needs"),
        (([], None, False), "no message for the model"),
        (([], 1.0, True, {}, {}), "(messages, reward, done, metrics)"),
    ],
)
def test_what_step_returns_is_checked(value: Any, text: str) -> None:
    assert text in message_of(lambda: checked_step(value), TypeError)


def test_step_may_return_metrics() -> None:
    assert checked_step(([], 1.0, True)).metrics == {}
    step = checked_step(([], 1.0, True, {"tools": np.int64(3), "found": True}))
    assert step.metrics == {"env/tools": 3.0, "env/found": 1.0}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (3, "must be a dict of numbers by name, returned 3"),
        ({f"n{i}": i for i in range(33)}, "33 metrics, and 32 are the maximum"),
        ({"a b": 1}, "metric 'a b': a name has letters"),
        ({2: 1}, "metric 2: a name has letters"),
        ({"n" * 65: 1}, "at most 64 characters"),
        ({"tools": "3"}, "metric 'tools' is '3', not a number"),
        ({"tools": float("nan")}, "metric 'tools' is nan, not a finite number"),
        ({"turns_mean": 1}, "env/turns_mean is a metric of R3. Use another name"),
    ],
)
def test_metrics_of_an_environment_are_checked(metrics: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        checked_step(([], 1.0, True, metrics))


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
        ("<tool_call>0.1+0.2</tool_call>", ["0.3"]),  # exact
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["Plain", "Async"])
def test_conversations_keep_their_own_environment_wherever_it_runs(
    name: str, workers: int, tmp_path: Path
) -> None:
    environments = of_file(tmp_path, SEVERAL, name, workers=workers)
    count = 40 if workers == 0 else 6
    for key in range(count):
        environments.open(key, prompt())
    assert all(reply.value == prompt().messages for reply in collect(environments, count).values())
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
        assert reply.value.messages[0]["content"] == f"{key}.0 {key}.1"
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
    args = ("limit=3", "name=a=b")
    environments = of_file(tmp_path, WITH_ARGS, "Limited", args=args, workers=workers)
    assert opened(environments).value[0]["content"] == "a=b 4"
    environments.close()


SHOWS = """
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}

class Talk:
    stop = ("of the class",)
    def __init__(self, where="init", name="look_up", fails=False):
        assert not fails
        self.where, self.name = where, name
        self.show("init")
    def show(self, where):
        if where == self.where:
            self.tools = [{"type": "function", "function": {**TOOL["function"], "name": self.name}}]
            self.stop = ["from " + where]
    def reset(self, prompt):
        self.show("reset")
        return prompt.messages
    def step(self, message):
        self.show("step")
        return [], 1.0, True

class Slowly(Talk):
    async def step(self, message):
        return super().step(message)
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["Talk", "Slowly"])
def test_an_environment_shows_what_its_instances_have(
    name: str, workers: int, tmp_path: Path
) -> None:
    file = write(tmp_path, SHOWS, name="mine.py")
    env = {"path": f"{file}:{name}", "args": ("name=find_it",), "workers": workers}
    model = {"path": str(assets.TINY_MOE_TOOLS)}
    task = read_task(tiny_config(model=model, eval={"path": ()}, env=env))
    environments = task.conversation_setup.environments
    first = task.prompts.prompts[0]
    assert "find_it" in task.tokenizer.decode(first.tokens_T)
    assert environments.stop == ("from init",)
    assert first.tools[0]["function"]["name"] == "find_it"
    assert opened(environments, first).value == first.messages
    assert answered(environments, "done").value.done
    task.close()
    # What is set later would be shown to no model.
    for where in ("reset", "step"):
        environments = of_file(tmp_path, SHOWS, name, workers=workers, args=(f"where={where}",))
        assert (environments.tools, environments.stop) == ((), ("of the class",))
        reply = opened(environments, first)
        if where == "step":
            assert reply.failure is None
            reply = answered(environments, "done")
        assert reply.failure is not None
        assert f"{name}.{where} changed self.tools to" in reply.failure.text
        environments.close()
    with pytest.raises(ConfigError, match=r"mine.py:\w+': \w+\(fails=True\) raised Assertion"):
        of_file(tmp_path, SHOWS, name, workers=workers, args=("fails=true",))


OF_A_THREAD = """
import sqlite3, threading, time

hung = []

class Rows:
    def reset(self, prompt):
        self.base, self.thread = sqlite3.connect(":memory:"), threading.get_ident()
        self.base.execute("create table said (text)")
        return prompt.messages
    def step(self, message):
        if message["content"] == "hang" and not hung:
            hung.append(True)
            time.sleep(2.0)
        if message["content"] == "hang":
            return [], float(threading.get_ident() == self.thread), True
        self.base.execute("insert into said values (?)", (message["content"],))
        (count,) = self.base.execute("select count(*) from said").fetchone()
        return [{"role": "user", "content": str(count)}], None, False

class Closing(Rows):
    def close(self):
        self.base.close()
"""


@pytest.mark.filterwarnings("ignore:.*close.. failed")  # after the call that hangs
@pytest.mark.parametrize("name", ["Rows", "Closing"])
def test_calls_of_a_conversation_are_made_in_one_thread(name: str, tmp_path: Path) -> None:
    """SQLite's connections and browsers raise errors in any other."""
    before = set(lanes())  # of cases whose step never returned
    environments = of_file(tmp_path, OF_A_THREAD, name, timeout_s=1.0, retries=1)
    for key in range(3):
        environments.open(key, prompt())
    threads = {reply.failure or key for key, reply in collect(environments, 3).items()}
    assert threads == {0, 1, 2}
    for turn in range(2):
        for key in range(3):
            environments.send(key, said("hello"))
        for reply in collect(environments, 3).values():
            assert reply.failure is None and reply.value.messages[0]["content"] == f"{turn + 1}"
    assert len(set(lanes()) - before) == 3
    # A call that hangs keeps its thread; the retry is made in another one.
    assert answered(environments, "hang").value.reward == 0.0
    for key in range(3):
        environments.forget(key)
    environments.close()
    failed = environments.take_counts()
    assert failed["timeouts"] == 1 and failed["errors"] == (name == "Closing"), "of close, once"
    assert soon(lambda: not set(lanes()) - before), "threads end with their conversations"


def lanes() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("r3-lane")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tools = [look_up]", r"function look_up, .*get_json_schema\(look_up\)"),
        ("tools = [{'type': 'function'}]", "schema 0 has no function.name"),
        ("tools = {'look_up': look_up}", "Mine.tools is .*, not a list"),
        ("stop = ['###', '']", "not empty"),
        ("stop = [3]", "not a list of strings"),
        ("stop = '###'", r"env\.path .*Mine\.stop is '###', not a list"),
    ],
)
def test_what_the_model_cannot_be_shown_is_refused(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        of_file(tmp_path, f"def look_up(): pass\n{GOOD}    {line}\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("None", "TypeError: reset must return a list of messages, returned None"),
        ("(prompt.messages, {})", "a message needs 'role' and 'content'"),
        ("[]", "TypeError: reset returned no message for the model"),
        ("[{'role': 'user', 'content': {'a': 1}}]", "a message needs 'role' and 'content', both"),
    ],
)
def test_what_reset_returns_is_checked(value: str, text: str, tmp_path: Path) -> None:
    """The message begins with what is wrong, without frames of R3."""
    source = GOOD.replace("return prompt.messages", f"return {value}")
    environments = of_file(tmp_path, source)
    failure = opened(environments).failure
    assert failure is not None and text in failure.text and "File" not in failure.text
    environments.close()


def test_an_argument_that_an_environment_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no parameter 'depth'\. Fix: Limited takes limit, name"):
        of_file(tmp_path, WITH_ARGS, "Limited", args=("depth=2",))
    with pytest.raises(ConfigError, match="calculator takes none"):
        Environments(EnvConfig(name="calculator", args=("depth=2",)))


_CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
_A, _F = {"name": "a", "arguments": {}}, {"name": "f", "arguments": {"x": 1}}
# test_sampled_text.py compares other calls, and what is none, with vLLM's parser.


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"one {_CALL}", [_F]),
        (f'<tool_call>\n{{"name": "a", "arguments": {{}}}}\n</tool_call>{_CALL}', [_A, _F]),
        (_CALL.replace('{"x": 1}', r'"{\"x\": 1}"'), [_F]),
        (f"<think>no {_CALL}</think> {_CALL}", [_F]),
        (f"{_CALL} <think>no {_CALL}", [_F]),
        (f"no {_CALL}</think> yes", []),
        (f"<think>no {_CALL}", []),
        (_CALL.replace("1", '"</think>"'), [{"name": "f", "arguments": {"x": "</think>"}}]),
        (f"<tool_call>{{'name': <tool_call>{_CALL}", []),
    ],
)
def test_tool_calls_are_parsed(text: str, calls: list[dict[str, Any]]) -> None:
    assert parsed_calls(text).calls == calls


def test_default_environment_is_one_turn() -> None:
    environments = OneTurn(EnvConfig(stop=("a",)))
    assert environments.one_turn and environments.stop == ("a",)
    environments.open(0, prompt())
    assert environments.outstanding
    (first,) = environments.poll()
    assert first.value == prompt().messages and not environments.outstanding
    environments.send(0, said("2"))
    (ended,) = environments.poll()
    assert ended.value.done and ended.value.reward is None and not ended.value.messages


def test_a_message_readable_message_is_plain_json() -> None:
    plain = {"role": "tool", "content": "7", "name": "calc"}
    assert readable_message({**plain, "board": object(), "tool_calls": None}) == plain
    odd = readable_message({**plain, "tool_calls": [{"arguments": {1: Path("a")}}]})
    assert odd["tool_calls"] == [{"arguments": {"1": "a"}}]
