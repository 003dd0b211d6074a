"""A model may sample any text: none ends a run, none takes long, and what can be read is read."""

import json
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from r3 import extras
from r3.config import EnvConfig, RewardConfig
from r3.data import Renderer
from r3.engine import Sampling
from r3.envs import (
    ENVIRONMENTS,
    Calculator,
    MessageReader,
    Parse,
    Parsed,
    built_in,
    message_parser,
    read_json,
    sampling_faults,
)
from r3.judges.chat import without_thoughts
from r3.rewards import Score, checked_score, exact, gsm8k
from r3.types import Prompt
from r3.user_code import time_limit
from tests.errors import Capsys, Patch

NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": NUMBER}}]
PROMPT = Prompt(id="rows:0", messages=({"role": "user", "content": "?"},), tokens_T=(), answer="7")
LIMIT_S = 2.0  # of a call that takes milliseconds

# What parsers, judges and verifiers look for, and what none of them expects.
PARTS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=calc>", "</function>"),
    *("<parameter=x>", "</parameter>", "<arg_key>x</arg_key>", "<arg_value>", "[TOOL_CALLS]"),
    *("<|python_tag|>", "functools", "<|tool_call|>", "[calc(x=", ")]", "calc", "<|im_end|>"),
    *('{"name": "calc", "arguments": ', '{"x": 1}', "}", "{", "[", "]", '"', "\\", "\\ud83d", ","),
    *("\x00", "\ufffd", "\U0001f600", "\n", " ", "NaN", "1e999", "-", "9" * 5000, "null", "(", ")"),
    *("####", "$", "\\boxed{", "\\frac{1}{2}", "^", "/0", '"score": ', "Score: ", "<answer>", "!"),
)
ODD = [
    '<tool_call>{"name": "calc", "arguments": ' + "[" * 1200 + "</tool_call>",
    '<tool_call>{"name": "calc", "arguments": ' + '{"x":' * 300 + "1" + "}" * 301 + "</tool_call>",
    "<tool_call>" * 500,
    "<tool_call>\n<function=calc>\n<parameter=x>\n" * 60,
    "[TOOL_CALLS]" * 2,
    "[calc(x=" + "-" * 3000 + "1)]",
    "[calc(x=" + "(" * 150 + "]",
    "[" * 3000,
    "#### " + "9" * 6000,
    "<answer>" * 500,
    "\\boxed{" * 500,
    "#### 1e99999999",
    "#### 1" + ",000" * 9000,
    "#### " + "1 000 " * 5000,
]


def odd_texts(count: int) -> list[str]:
    """The same texts in every run: parts in any order, some of them repeated."""
    rng = random.Random(0)
    return ODD + [
        "".join(rng.choice(PARTS) * rng.choice((1, 1, 1, 2, 20)) for _ in range(rng.randrange(20)))
        for _ in range(count)
    ]


class Late(Exception):
    """A call took longer than `LIMIT_S`."""


def parsers() -> list[tuple[str, str]]:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return [
        *(("tool_parser", name) for name in ToolParserManager.list_registered()),
        *(("reasoning_parser", name) for name in ReasoningParserManager.list_registered()),
    ]


@pytest.mark.large
def test_every_parser_leaves_odd_messages_as_text(tokenizer: Any, capfd: Any) -> None:
    message_parser(EnvConfig(tool_parser="hermes"), tokenizer, {})  # imports what lists them
    texts, tried, unread = odd_texts(15), [], 0
    samples = [(text, tokenizer(text)["input_ids"]) for text in texts]
    for setting, name in parsers():
        try:
            reader = message_parser(EnvConfig(**{setting: name}), tokenizer, {})
        except ValueError:  # of another family
            continue
        reader = MessageReader(reader._parser, limit_s=0.3)
        read = reader(TOOLS)
        for text, tokens in samples:
            began = time.monotonic()
            message = read(text, tokens)
            # 0.3 s, or 1.3 s for one that catches its end. Without the limit some take minutes.
            assert time.monotonic() - began < 10, f"{name} takes long for {text[:200]!r}"
            assert all(isinstance(call["name"], str) for call in message.calls), name
            read_json(json.dumps(message.fields()))  # nothing deeper than 100 levels
        tried.append(name)
        unread += reader.take_unread()
    assert len(tried) > 50, tried
    assert unread, "the texts are odd enough for some parser of vLLM"
    assert "warning: the parser of tool calls or reasoning failed" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["built_in", "without_thoughts", *ENVIRONMENTS])
def test_our_readers_read_any_text_themselves(name: str) -> None:
    def play(text: str) -> None:
        environment: Any = ENVIRONMENTS[name]()
        environment.reset(PROMPT)
        environment.step({"role": "assistant", "content": text})

    reads = {"built_in": lambda text: built_in(TOOLS)(text, ())}
    reads["without_thoughts"] = without_thoughts
    for text in odd_texts(300):
        time_limit(lambda text=text: reads.get(name, play)(text), LIMIT_S, Late)


@pytest.mark.parametrize("part", ["<tool_call>", "<think>", "<tool_call>{</tool_call>"])
def test_reading_calls_takes_linear_time(part: str) -> None:
    text, began = part * 16_000, time.monotonic()
    assert built_in(TOOLS)(text, ()) == Parsed(content=text, calls=[])
    Calculator().step({"role": "assistant", "content": text.replace("{", "1+")})
    # 0.1 s on an idle core; a search that begins anew at each tag takes minutes.
    assert time.monotonic() - began < 5


def test_our_reading_of_calls_is_that_of_hermes(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "calc", "arguments": %s}</tool_call>'
    texts = [
        *("no call", call % '{"x": 1}', f"So {call % '{}'}", call % '{"x": NaN}'),
        *(call % '"{\\"x\\": 1}"', call.replace("arguments", "parameters") % '{"x": 1}'),
        *(call % "null", call % '""', call % "{"),
        *('<tool_call>{"name": "calc"}</tool_call>', "<tool_call>1+2</tool_call>"),
    ]
    hermes = message_parser(EnvConfig(tool_parser="hermes"), tokenizer, {})(TOOLS)
    ours = built_in(TOOLS)
    for text in texts:
        one, other = ours(text, ()), hermes(text, ())
        assert repr(one.calls) == repr(other.calls), text  # NaN is not equal to itself
        assert one.content.strip() == other.content.strip()


def test_a_parser_that_raises_is_counted_and_said_once(capfd: Capsys) -> None:
    def parse(text: str, tokens: Sequence[int]) -> Parsed:
        raise KeyError("name")

    reader = MessageReader(lambda tools: parse)
    read = reader(())
    assert [read(text, ()) for text in "ab"] == [Parsed(content=each, calls=[]) for each in "ab"]
    assert reader.take_unread() == 2 and reader.take_unread() == 0
    said = capfd.readouterr().err
    assert said.count("warning") == 1 and "KeyError: 'name'" in said and "'a'" in said


def test_a_failure_that_a_parser_only_logs_is_counted_and_said_once(
    tokenizer: Any, capfd: Capsys
) -> None:
    """Most of vLLM's parsers catch their errors and log a traceback per message."""
    reader = message_parser(EnvConfig(tool_parser="hermes"), tokenizer, {})
    read, bad = reader(TOOLS), "<tool_call>1+2</tool_call>"
    from vllm.logger import _configure_vllm_root_logger

    _configure_vllm_root_logger()  # as an engine that is built later does
    assert [read(bad, ()).content for _ in range(3)] == [bad] * 3
    assert read("no call", ()).calls == [] and reader.take_unread() == 3
    said = capfd.readouterr().err
    assert said.count("warning") == 1 and "JSONDecodeError" in said and "Traceback" not in said


def test_tools_that_a_parser_cannot_use_are_a_value_error() -> None:
    def refuse(tools: Any) -> Parse:
        raise KeyError("function")

    with pytest.raises(ValueError, match="KeyError: 'function'"):
        MessageReader(refuse)(TOOLS)


def swallows(text: str, tokens: Sequence[int]) -> Parsed:
    while True:
        try:
            time.sleep(10)
        except Exception:  # as parsers of vLLM do
            continue


def backtracks(text: str, tokens: Sequence[int]) -> Parsed:
    re.match("(a+)+$", "a" * 40 + "b")
    raise AssertionError("it takes years")


@pytest.mark.parametrize("parse", [swallows, backtracks])
def test_a_parser_that_takes_for_ever_is_ended_and_then_spared(parse: Parse) -> None:
    tried = 0

    def counted(text: str, tokens: Sequence[int]) -> Parsed:
        nonlocal tried
        tried += 1
        return parse(text, tokens) if text == "long" else Parsed(content="", calls=[])

    reader = MessageReader(lambda tools: counted, limit_s=0.2)
    read, began = reader(()), time.monotonic()
    for _ in range(10):
        assert read("long", ()) == Parsed(content="long", calls=[])
    # Three limits of 0.2 s, and at most a second for each until it is ended again.
    assert tried == 3 and time.monotonic() - began < 6
    assert read("s", ()).content == "", "a shorter message is tried"
    assert reader.take_unread() == 10
    read("long", ())
    assert tried == 5, "another round tries again"


@pytest.mark.parametrize("place", ["main", "thread"])
def test_a_limit_ends_code_that_catches_every_exception(place: str) -> None:
    def swallows_in_python() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                sum(range(1000))
            except Exception:
                continue

    limited = partial(time_limit, swallows_in_python, 0.2, Late)
    with ThreadPoolExecutor(1) as threads, pytest.raises(Late):
        limited() if place == "main" else threads.submit(limited).result()


def test_an_inner_limit_does_not_take_the_end_of_an_outer_one() -> None:
    def inner() -> None:
        time_limit(lambda: None, 5.0, Late)
        time.sleep(5.0)

    with pytest.raises(TimeoutError):
        time_limit(inner, 0.2, TimeoutError)


@pytest.mark.parametrize("pattern", ["", r"Score: *(\S+)"])
def test_judges_read_any_reply_or_say_that_it_has_no_score(pattern: str, tokenizer: Any) -> None:
    settings, renderer = RewardConfig(pattern=pattern), Renderer(tokenizer, {})
    judge = extras.judge("j", "self_judge", settings, model=None, renderer=renderer)
    texts, place, without = odd_texts(300), judge.pool.place, 0.0
    for text in texts:
        judge.pool.submit(text, judge.function, "", PROMPT)
        (question,) = place.take_questions()
        reply = partial(place.answer, question.number, text, complete=True)
        time_limit(reply, LIMIT_S, Late)
        (done,) = judge.pool.poll()
        without += done.value.metrics["reward/no_verdict_frac"]
    assert without > len(texts) / 2, "most of the texts have no score"


@pytest.mark.parametrize("reward", [gsm8k, exact])
def test_verifiers_score_any_response(reward: Callable[[str, Prompt], Any]) -> None:
    prompt = replace(PROMPT, answer="#### 7")
    for text in odd_texts(300):
        value = time_limit(lambda text=text: reward(text, prompt), LIMIT_S, Late)
        assert value in (0.0, 1.0), text


def of_library(name: str) -> tuple[Any, Any]:
    """The function of `reward.function math` or gym, and its module."""
    judge = extras.judge(name, name, RewardConfig(), model=None, renderer=None)
    judge.pool.close()
    return judge.function, sys.modules["r3.judges.verifier"]


def test_math_scores_any_response(monkeypatch: Patch) -> None:
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    equal, verify = of_library("math")
    monkeypatch.setattr(verify, "_LIMIT_S", 0.3)
    hard = ["\\boxed{x" + "!" * 50 + "}", "\\boxed{10^{10^{10}}}", "#### " + "9" * 6000]
    unread = 0.0
    for text in [*hard, *odd_texts(40)]:
        score = time_limit(lambda text=text: equal(text, PROMPT), LIMIT_S, Late)
        assert score.value == 0.0
        unread += score.metrics["reward/math_unread"]
    assert unread >= len(hard)
    assert equal("\\boxed{\\frac{14}{2}}", PROMPT).value == 1.0


def test_others_scorers_fail_or_run_without_end_for_one_response_only(
    monkeypatch: Patch, capsys: Capsys
) -> None:
    _, verify = of_library("gym")
    monkeypatch.setattr(verify, "_LIMIT_S", 0.3)
    monkeypatch.setattr(verify, "_SAID", {})
    endless = re.compile("(a+)+$")
    late = lambda: endless.match("a" * 40 + "b")  # noqa: E731
    for value in (late, lambda: float("seven"), lambda: float("nan")):
        score = verify.compared("gym", value, "seven")
        assert score == Score(0.0, {"reward/gym_unread": 1.0})
    scored = verify.compared("gym", lambda: 0.5, "7")
    assert scored == Score(0.5, {"reward/gym_unread": 0.0})
    assert checked_score(scored) is scored, "what the scorer of a run takes"
    assert capsys.readouterr().err.count("gym could not compare a response (TimeoutError") == 1


@pytest.mark.parametrize("part", ["<answer>", "####", "\\boxed{", "\\boxed{{}", "####\t"])
def test_looking_for_the_final_answer_takes_linear_time(part: str) -> None:
    began = time.monotonic()
    of_library("gym")[1]._FINAL_ANSWER.findall(part * 30_000)
    # 0.01 s on an idle core; a search to the end from each part takes a minute.
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        *[({"temperature": value}, "temperature") for value in (-0.01, 2.01, 1e400, True, "1")],
        *[({"top_p": value}, "top_p") for value in (0.0, 1.01, float("nan"), "1")],
        *[({"top_k": value}, "top_k") for value in (-1, 2**31, 1.0, True)],
        *[({"stop": value}, "stop") for value in (("",), (1,), ("\ud83d",), tuple("ab" * 33))],
    ],
)
def test_what_the_engine_would_not_take_is_named(values: Any, rule: str) -> None:
    (fault,) = sampling_faults(Sampling(**values))
    assert fault.startswith(rule)


@pytest.mark.parametrize(
    "values",
    [
        *({"temperature": 0}, {"temperature": 2}, {"top_p": 1e-300}, {"top_p": 1}, {"top_k": 0}),
        *({"top_k": 2**31 - 1}, {"stop": tuple(map(str, range(64)))}),
    ],
)
def test_both_ends_of_every_range_are_taken_by_the_engine(values: Any) -> None:
    from vllm.sampling_params import SamplingParams

    assert sampling_faults(Sampling(**values)) == []
    SamplingParams(**{key: list(v) if key == "stop" else v for key, v in values.items()})


def test_json_has_a_limit_of_depth() -> None:
    assert read_json("[" * 100 + "]" * 100)
    for depth in (101, 5000):
        with pytest.raises(ValueError, match="deeper than 100 levels"):
            read_json("[" * depth + "]" * depth)
    with pytest.raises(json.JSONDecodeError):
        read_json("[" * 50)
