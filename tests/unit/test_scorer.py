"""Scorers: components never block, fail by name and add up by weight. Servers are real HTTP."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest

from r3 import assets, extras
from r3.checks import problems
from r3.config import ConfigError, RewardConfig
from r3.rewards import CallError
from r3.rewards.scorer import RewardError, RewardResult, Scorer, make_scorer
from r3.rollout import read_task
from r3.types import Prompt, Rollout
from tests.errors import Capsys, Patch
from tests.tables import table
from tests.tiny import FEW_ROWS, tiny_config
from tests.tiny import QUESTION as PROMPT
from tests.tiny import responded as rollout

FUNCTIONS = """
import asyncio, os, sys, time
import numpy as np
from pathlib import Path

def length(response, prompt):
    return len(response) / 10

async def later(response, prompt):
    await asyncio.sleep(0.3)
    return 2.0

asked = []

async def together(response, prompt):
    asked.append(response)
    while len(asked) < 8:
        await asyncio.sleep(0.01)
    return 2.0

def crash(response, prompt):
    return 1 / 0

def text(response, prompt):
    return "1"

def hang(response, prompt):
    if "hang" in response:
        time.sleep(600)
    return 1.0

async def hang_async(response, prompt):
    if "hang" in response:
        await asyncio.sleep(600)
    return 1.0

def die(response, prompt):
    if "die" in response:
        os._exit(9)
    return 1.0

def short(response, prompt, limit=5, word=""):
    return float(len(response) <= limit) + (word == "a b")

def turns(response, prompt, messages):
    reward = float(len(messages)) + 0.5 * (messages[-1]["role"] == "assistant")
    return reward, {"cites": 2, "letters": len(response)}

def letters(response, prompt):
    return 0.5, {"letters": 3}

def endless(response, prompt):
    return 1.0, {"cites": float("inf")}

def mean(response, prompt):
    return 1.0, {"mean": 1}

def pair(response, prompt):
    return 1.0, 2.0

async def turns_async(response, prompt, messages):
    return turns(response, prompt, messages)

def rank(responses, prompt, scale=1.0):
    return [scale * sorted(responses).index(response) for response in responses]

async def rank_async(responses, prompt):
    await asyncio.sleep(0.01)
    return rank(responses, prompt)

def share(responses, prompt, messages):
    turns = np.array([len(each) for each in messages], dtype=float)
    return turns / turns.sum()

def measured(responses, prompt):
    return [(float(len(each)), {"number": i}) for i, each in enumerate(responses)]

def one_short(responses, prompt):
    return [1.0] * (len(responses) - 1)

def one_text(responses, prompt):
    return [1.0] * (len(responses) - 1) + ["1"]

def one_number(responses, prompt):
    return 1.0

def hangs_together(responses, prompt):
    if "hang" in responses:
        time.sleep(600)
    return [1.0] * len(responses)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@contextmanager
def judging(*functions: str, **settings: Any) -> Iterator[Scorer]:
    config = RewardConfig(function=functions, **{"retries": 0} | settings)
    with closing(make_scorer(config)) as scorer:
        yield scorer


def finished(scorer: Scorer) -> dict[Any, RewardResult]:
    """What was asked, by key, as far as it ends within a minute."""
    found: dict[Any, RewardResult] = {}
    until = time.monotonic() + 60.0
    while scorer.outstanding and time.monotonic() < until:
        found |= {each.key: each for each in scorer.poll(0.2)}
    return found


def reward_results(
    scorer: Scorer, responses: list[str], first_key: int = 0
) -> dict[Any, RewardResult]:
    """All of them and those asked before, however they come."""
    for key, response in enumerate(responses, first_key):
        scorer.submit(key, rollout(response, key), PROMPT)
    found = finished(scorer)
    assert len(found) == first_key + len(responses), f"{scorer.outstanding} have no result"
    return found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("prefix", ["", "short."])
def test_arguments_are_typed_and_go_to_the_function_that_takes_them(
    file: Path, prefix: str, workers: int
) -> None:
    functions, args = (f"{file}:length", f"{file}:short", "gsm8k"), (f"{prefix}limit=3", "word=a b")
    with judging(*functions, workers=workers, args=args) as scorer:
        results = reward_results(scorer, ["abc", "abcd"])
    assert results[0].parts == {"length": 0.3, "short": 2.0, "gsm8k": 0.0}
    assert results[1].parts == {"length": 0.4, "short": 1.0, "gsm8k": 0.0}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_coroutine_is_awaited_inside_a_running_loop(file: Path, workers: int) -> None:
    """As in a cell of a notebook, where asyncio.run raises an error."""

    async def cell() -> float:
        with pytest.raises(RuntimeError, match="running event loop"):
            asyncio.run(unused := asyncio.sleep(0))
        unused.close()
        with judging(f"{file}:later", workers=workers) as scorer:
            return reward_results(scorer, ["abc"])[0].reward

    assert asyncio.run(cell()) == 2.0


def test_functions_of_one_name_get_arguments_by_the_names_of_metrics(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.py").write_text("def short(response, prompt, value=1): return value")
    functions = (f"{file}:short", f"{tmp_path}/other.py:short")
    with judging(*functions, args=("short.limit=9", "short_2.value=0.5")) as scorer:
        assert reward_results(scorer, ["123456"])[0].parts == {"short": 1.0, "short_2": 0.5}
    with pytest.raises(ConfigError, match=r"short_2 has no parameter 'limit'\. Fix: short takes"):
        make_scorer(RewardConfig(function=functions, args=("short_2.limit=3",)))


def test_an_argument_may_be_for_the_function_of_a_set(file: Path) -> None:
    mine, other = f"{file}:length", f"{file}:short"
    config = tiny_config(
        data={"path": (FEW_ROWS,)},
        reward={"function": (mine,), "args": ("limit=3",)},
        eval={"function": (other,), "path": (str(assets.WORD_PROBLEMS_EVAL),)},
    )
    assert not [each for each in problems(config, 1) if each.place == "reward.args"]
    task = read_task(config)
    (heldout,) = task.heldout
    assert heldout.scorer(rollout("abcd"), PROMPT) == 0.0
    task.close()


@pytest.mark.parametrize(("name", "workers"), [("turns", 0), ("turns", 1), ("turns_async", 0)])
def test_a_function_may_take_messages_and_report_metrics(
    file: Path, name: str, workers: int
) -> None:
    spoken = ("user", "assistant", "tool", "assistant")
    messages = tuple({"role": role, "content": "x"} for role in spoken)
    with judging("gsm8k", f"{file}:{name}", workers=workers) as scorer:
        assert scorer(replace(rollout("x"), messages=messages), PROMPT) == 4.5
        result = reward_results(scorer, ["abc"])[0]
    assert result.parts == {"gsm8k": 0.0, name: 2.5}, "prompt and response"
    assert result.metrics == {"reward/cites": 2.0, "reward/letters": 3.0}


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        (["endless"], "metric 'cites' is inf, not a finite number"),
        (["mean"], "reward/mean is a metric of R3"),
        (["pair"], "metrics must be a dict of numbers by name, returned 2.0"),
        (["turns", "letters"], "two functions report reward/letters. Rename one"),
    ],
)
def test_bad_metrics_are_failures(file: Path, functions: list[str], text: str) -> None:
    specs = [f"{file}:{name}" for name in functions]
    with judging(*specs) as scorer, pytest.raises(RewardError, match=text):
        reward_results(scorer, ["abc"])
    with judging(*specs, on_error="zero", retries=2) as scorer:
        result = reward_results(scorer, ["abc"])[0]
        assert text in result.failure and (result.reward, result.metrics) == (0.0, {})
        assert scorer.take_counts()["retries"] == 0, "the same call would return the same"


# ---- all samples of a prompt at once


def of_groups(scorer: Scorer, groups: list[list[str]]) -> list[list[RewardResult]]:
    """Results of groups whose samples end in an order of their own: the last sample first."""
    keys = [(g, s) for g, responses in enumerate(groups) for s in range(len(responses))]
    for group, sample in reversed(keys):
        made = replace(rollout(groups[group][sample], sample), group=group)
        scorer.submit((group, sample), made, PROMPT)
        if sample == 0:
            scorer.complete_group(group)
    found = finished(scorer)
    assert sorted(found) == keys
    return [[found[g, s] for s in range(len(responses))] for g, responses in enumerate(groups)]


@pytest.mark.parametrize(("name", "workers"), [("rank", 0), ("rank", 1), ("rank_async", 0)])
def test_a_function_of_responses_scores_a_group(file: Path, name: str, workers: int) -> None:
    with judging(f"{file}:{name}", workers=workers) as scorer:
        found = of_groups(scorer, [["b", "c", "a"], ["z", "y"]])
        counts = scorer.take_counts()
    assert [[each.reward for each in group] for group in found] == [[1.0, 2.0, 0.0], [1.0, 0.0]]
    assert counts == {"calls": 2}, "one call per prompt"


def test_a_group_is_not_scored_before_it_is_complete(file: Path) -> None:
    with judging("exact", f"{file}:rank") as scorer:
        scorer.submit("first", rollout("b", 0), PROMPT)
        assert scorer.poll(0.1) == []
        scorer.submit("second", rollout("a", 1), PROMPT)
        scorer.complete_group(0)
        results = {each.key: each.parts for each in [*scorer.poll(60.0), *scorer.poll(1.0)]}
    assert results["first"] == {"exact": 0.0, "rank": 1.0}
    assert results["second"] == {"exact": 0.0, "rank": 0.0}


def test_groups_are_parts_of_a_sum_and_return_arrays_and_metrics(file: Path) -> None:
    functions = (f"{file}:{name}" for name in ("length", "rank", "share", "measured"))
    with judging(*functions, weights=(1.0, 0.5, 0, 0), args=("rank.scale=4",)) as scorer:
        ((a, b),) = of_groups(scorer, [["b" * 10, "a" * 20]])
    assert a.parts == {"length": 1.0, "rank": 4.0, "share": 0.5, "measured": 10.0}
    assert b.parts == {"length": 2.0, "rank": 0.0, "share": 0.5, "measured": 20.0}
    assert (a.reward, b.reward) == (1.0 + 0.5 * 4, 2.0)
    assert (a.metrics, b.metrics) == ({"reward/number": 0}, {"reward/number": 1})


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("one_short", r"it returned \[1\.0\]\. Return a list of 2 numbers, one per response"),
        ("one_text", r"it returned '1', not a number"),
        ("one_number", r"it returned 1\.0\. Return a list of 2 numbers"),
        ("hangs_together", "timeout"),
    ],
)
def test_a_failure_of_a_group_is_that_of_all_its_samples(file: Path, name: str, rule: str) -> None:
    groups = [["hang", "x"]]
    failing = judging(f"{file}:{name}", timeout_s=0.5)
    with failing as scorer, pytest.raises(RewardError, match=rule) as caught:
        of_groups(scorer, groups)
    assert f"reward {name} failed on 2 samples together" in str(caught.value)
    assert "rows.jsonl:7" in str(caught.value) and "without these samples" in str(caught.value)
    with judging(f"{file}:{name}", timeout_s=0.5, on_error="zero") as scorer:
        (found,) = of_groups(scorer, groups)
        counts = scorer.take_counts()
    assert all(each.reward == 0.0 and name in each.failure for each in found)
    assert counts["errors"] + counts["timeouts"] == 1, "one call failed"


# ---- composition


def test_the_reward_is_the_weighted_sum_of_its_components(file: Path) -> None:
    functions = ("gsm8k", f"{file}:length", f"{file}:later")
    with judging(*functions, weights=(1.0, -0.5, 0.25)) as scorer:
        found = reward_results(scorer, ["#### 7", "#### 8888888888"])
    # 1 - 0.5 * 6 / 10 + 0.25 * 2; 0 - 0.5 * 15 / 10 + 0.25 * 2. In float64, and in this order.
    assert found[0].reward == 1.0 - 0.5 * 0.6 + 0.5
    assert found[1].reward == 0.0 - 0.5 * 1.5 + 0.5
    assert found[0].parts == {"gsm8k": 1.0, "length": 0.6, "later": 2.0}


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_a_function_of_weight_0_that_fails_leaves_the_sum(
    file: Path, on_error: str, capsys: Capsys
) -> None:
    functions = ("gsm8k", f"{file}:crash")
    with judging(*functions, weights=(1.0, 0.0), on_error=on_error) as scorer:
        found = reward_results(scorer, ["#### 7", "#### 8"])
    assert [found[0].reward, found[1].reward] == [1.0, 0.0]
    for each in found.values():
        assert not each.failure and "ZeroDivisionError" in each.unreported
    assert found[0].parts == {"gsm8k": 1.0}
    assert capsys.readouterr().err.count("reward crash failed") == 1, "the first one is shown"
    with judging(*functions, weights=(1.0, 0.1), on_error=on_error) as scorer:
        found = reward_results(scorer, ["#### 7"])
    assert found[0].reward == 0.0 and "ZeroDivisionError" in found[0].failure


def test_built_in_functions_score_at_once() -> None:
    with judging("gsm8k", "exact") as scorer:
        assert scorer.quick
        scorer.submit("a", rollout("#### 7"), PROMPT)
        assert [(each.key, each.reward) for each in scorer.poll(0.0)] == [("a", 2.0)]


def test_nobody_waits_for_a_slow_function(file: Path) -> None:
    with judging(f"{file}:together") as scorer:  # no call returns before eight were made
        assert not scorer.quick
        for key in range(7):
            scorer.submit(key, rollout(""), PROMPT)
        assert scorer.poll(0.1) == []
        found = reward_results(scorer, [""] * 8, first_key=7)
    assert len(found) == 15 and {each.reward for each in found.values()} == {2.0}


# ---- failures


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("crash", "ZeroDivisionError: division by zero"),
        ("text", r"returned '1', not a number"),
        ("hang", "timeout"),
        ("hang_async", "timeout"),
    ],
)
def test_a_failure_stops_the_run_and_names_the_sample(file: Path, name: str, rule: str) -> None:
    with judging(f"{file}:{name}", timeout_s=0.5) as scorer:
        scorer.submit(0, rollout("hang " + "r" * 300, sample_index=3), PROMPT)
        with pytest.raises(RewardError, match=rule) as caught:
            scorer.poll(60.0)
    message = str(caught.value)
    assert f"reward {name} failed" in message and "prompt rows.jsonl:7, sample 3" in message
    assert f"'hang {'r' * 195}'" in message and "reward.on_error" in message


def test_interrupts_are_not_rewards() -> None:
    def interrupted(rollout: Rollout, prompt: Prompt) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scorer.of_function(interrupted)(rollout(""), PROMPT)


@pytest.mark.parametrize(("name", "kind"), [("hang", "timeouts"), ("die", "crashes")])
def test_a_worker_that_hangs_or_dies_costs_its_own_answer_alone(
    file: Path, name: str, kind: str, capsys: Capsys
) -> None:
    functions = "gsm8k", f"{file}:{name}"
    with judging(*functions, workers=1, timeout_s=2.0, on_error="zero") as scorer:
        found = reward_results(scorer, ["#### 7", f"#### 7 {name}", "#### 7"])
        counts = scorer.take_counts()
    assert [found[key].reward for key in range(3)] == [2.0, 0.0, 2.0]
    assert found[1].parts == {"gsm8k": 1.0} and f"reward {name} failed" in found[1].failure
    assert counts[kind] == 1 and counts["calls"] == 6
    shown = capsys.readouterr().err
    assert f"reward {name} failed" in shown and "on_error is zero. reward/zeroed counts" in shown


# ---- math


def test_math_compares_by_value_in_worker_processes() -> None:
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    half = replace(PROMPT, answer="steps\n#### \\frac{1}{2}")
    tower = "$" + "9^{" * 7 + "9" + "}" * 7 + "$"  # a number that cannot be computed
    with judging("math", timeout_s=10.0, on_error="zero") as scorer:
        for key, response in enumerate(["it is \\boxed{0.5}", "\\boxed{2}", tower]):
            scorer.submit(key, rollout(response), half)
        scorer.submit(3, rollout("7"), replace(PROMPT, answer="####"))
        found = finished(scorer)
        counts = scorer.take_counts()
    assert [found[key].reward for key in range(4)] == [1.0, 0.0, 0.0, 0.0]
    assert not any(found[key].failure for key in range(3)), "no text of a model is a failure"
    assert "has no expression" in found[3].failure
    assert [found[key].metrics["reward/math_unread"] for key in range(3)] == [0, 0, 1]
    assert counts["errors"] + counts["timeouts"] + counts["crashes"] == 1


def test_math_without_its_package_names_the_package(monkeypatch: Patch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(ConfigError, match="pip install 'math-verify"):
        make_scorer(RewardConfig(function=("math",)))


# ---- HTTP

Answer = tuple[int, Any, dict[str, str]]
Behaviour = Callable[[int, dict[str, Any]], Answer]


class Server:
    """A real HTTP server on loopback with just enough of OpenAI's protocol; `behave(n,
    body)` answers request n.
    """

    def __init__(self, behave: Behaviour) -> None:
        self.seen: list[tuple[float, dict[str, Any], str]] = []
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                how = f"{self.path} {self.headers.get('Authorization')}"
                with lock:
                    outer.seen.append((time.monotonic(), body, how))
                    number = len(outer.seen)
                status, content, headers = behave(number, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if isinstance(content, Iterator):  # of unknown length
                    self.send_header("Connection", "close")
                else:
                    text = content if isinstance(content, str) else json.dumps(content)
                    content = [text.encode()]
                    self.send_header("Content-Length", str(len(content[0])))
                self.end_headers()
                with suppress(ConnectionError):  # the client has left
                    for part in content:
                        self.wfile.write(part)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        class Listening(ThreadingHTTPServer):
            request_queue_size = 128  # requests come together: beyond it, connections are reset
            daemon_threads = True

        self._server = Listening(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(behave: Behaviour | Answer) -> Iterator[Server]:
    with closing(Server(behave if callable(behave) else lambda number, body: behave)) as server:
        yield server


@contextmanager
def served(
    behave: Behaviour | Answer, *functions: str, query: str = "", **settings: Any
) -> Iterator[tuple[Scorer, Server]]:
    with serving(behave) as server:
        defaults = {"model": "grader", "backoff_s": 0.05, "timeout_s": 20.0}
        defaults |= {"url": server.url + query}
        with judging(*functions or ("http",), **defaults | settings) as scorer:
            yield scorer, server


def completion(text: Any, reason: str = "stop") -> Answer:
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": reason}]}, {}


RIGHT = completion('{"score": 1}')


def test_a_row_names_the_function_that_scores_it(file: Path) -> None:
    """One data set of several domains: a response goes to its row's function and to no other."""
    expected = {"gsm8k": 1.0, "exact": 0.0, "math": 1.0, "http": 0.25, "short": 0.0, "length": 0.8}
    functions = ("gsm8k", "exact", "math", "http", f"{file}:short", f"{file}:length")
    settings: dict[str, Any] = {"on_error": "zero", "args": ("short.limit=3",)}
    settings |= {"row_functions": functions, "weights": (2.0, 1.0)}
    behave = completion('{"score": 0.25}')
    with served(behave, "row", f"{file}:later", **settings) as (scorer, server):
        for name in (*expected, "other"):
            prompt = replace(PROMPT, metadata={"verifier": name})
            assert scorer.path(prompt) == (name if name in expected else "row", "later")
            scorer.submit(name, rollout("#### 7.0"), prompt)
        results = finished(scorer)
    for name, value in expected.items():
        assert results[name].parts == {"row": value, "later": 2.0, f"row_{name}": value}
        assert results[name].reward == 2.0 * value + 2.0
    assert "is 'other', which is not in reward.row_functions" in results["other"].failure
    assert len(server.seen) == 1, "one row names http"


def test_requests_to_a_server_are_concurrent_and_limited(monkeypatch: Patch) -> None:
    monkeypatch.setenv("GRADER_KEY", "secret")
    running, at_once = set[int](), list[int]()

    def behave(number: int, body: dict[str, Any]) -> Answer:
        running.add(number)
        at_once.append(len(running))
        time.sleep(0.1)
        running.remove(number)
        said = body["messages"][0]["content"]
        assert "3 + 4?" in said and "#### 7" in said
        score = float("Response:\n#### 7" in said)
        return completion(f'I think {{"reason": "sum", "score": {score}}} it is')

    with served(behave, max_connections=3, api_key_env="GRADER_KEY") as (scorer, server):
        began = time.monotonic()
        found = reward_results(scorer, ["#### 7", "#### 8"] * 6)
        seconds = time.monotonic() - began
    assert [found[key].reward for key in range(12)] == [1.0, 0.0] * 6
    assert max(at_once) == 3
    assert seconds >= 0.4  # twelve of 0.1 s, three at a time
    assert {how for _, _, how in server.seen} == {"/v1/chat/completions Bearer secret"}
    assert server.seen[0][1]["model"] == "grader" and server.seen[0][1]["temperature"] == 0.0


def test_a_key_that_the_server_repeats_is_masked(monkeypatch: Patch) -> None:
    monkeypatch.setenv("GRADER_KEY", "sk-secret")
    served_once = served((401, "wrong key: Bearer sk-secret", {}), api_key_env="GRADER_KEY")
    with served_once as (scorer, server), pytest.raises(RewardError) as error:
        scorer(rollout("1"), PROMPT)
    assert server.seen[0][2].endswith("Bearer sk-secret")
    assert "answered 401: wrong key: Bearer [hidden]" in str(error.value)
    assert "secret" not in str(error.value)


def test_rate_limits_and_faults_of_a_server_are_waited_out() -> None:
    faults = [(429, "slow down", {"Retry-After": "1"}), (503, "busy", {}), (500, "oops", {})]

    def behave(number: int, body: dict[str, Any]) -> Answer:
        return [*faults, completion('{"score": 0.5}')][number - 1]

    with served(behave, retries=3) as (scorer, server):
        assert scorer(rollout("r"), PROMPT) == 0.5
        assert scorer.take_counts() == {"calls": 1, "errors": 3, "retries": 3}
    times = [when for when, _, _ in server.seen]
    pauses = [after - before for before, after in pairwise(times)]
    # As long as Retry-After says, then 0.1, 0.2 s of back-off at least; how much more is the
    # machine's affair.
    assert all(pause >= least for pause, least in zip(pauses, (1.0, 0.1, 0.2), strict=True))


@pytest.mark.parametrize(
    ("header", "pause_s"),
    [
        *[("7", 7.0), ("9999", 300.0), ("999999999", 300.0)],
        # a date or nonsense leaves it to the back-off
        *[(each, 0.0) for each in ("9" * 40, "-5", "", "Wed, 21 Oct 2026 07:28:00 GMT")],
    ],
)
def test_retry_after_is_capped(header: str, pause_s: float) -> None:
    with serving((429, "slow down", {"Retry-After": header})) as server:
        settings = RewardConfig(function=("http",), url=server.url, model="grader")
        judge = extras.judge("http", "http", settings, model=None, renderer=None)
        with pytest.raises(CallError) as caught:
            asyncio.run(judge.function("r", PROMPT))
        judge.pool.close()
    assert caught.value.wait_s == pause_s


def test_a_slow_body_is_cut_and_others_do_not_wait() -> None:
    def behave(number: int, body: dict[str, Any]) -> Answer:
        if "slow" not in body["messages"][0]["content"]:
            return completion('{"score": 1}')
        return 200, (time.sleep(0.1) or b" " for _ in range(100)), {}

    with served(behave, timeout_s=1.0, on_error="zero") as (scorer, _):
        began = time.monotonic()
        found = reward_results(scorer, ["slow", "quick"])
        seconds = time.monotonic() - began
        assert scorer.take_counts()["timeouts"] == 1
    assert "failed (timeout): not done after 1 s" in found[0].failure
    assert found[1].reward == 1.0 and seconds < 5


def test_a_body_without_end_is_cut() -> None:
    endless = (200, repeat(b"x" * 65536), {})
    with served(endless, timeout_s=60.0, on_error="zero") as (scorer, _):
        found = reward_results(scorer, ["slow"])
    assert "sent more than 4194304 bytes" in found[0].failure


@contextmanager
def echoing(folder: Path, **settings: Any) -> Iterator[Scorer]:
    """A judge whose replies are the responses."""
    (folder / "echo.txt").write_text("{response}")
    settings |= {"prompt_file": f"{folder}/echo.txt", "on_error": "zero"}
    echo = lambda number, body: completion(body["messages"][0]["content"])  # noqa: E731
    with served(echo, **settings) as (scorer, _):
        yield scorer


@pytest.mark.parametrize("part", ['{"a":1,', '{"a":', "[", '{"a":"', '{"a":[[{'])
def test_text_that_is_hard_to_parse_takes_no_time(part: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with echoing(tmp_path) as scorer:
        found = reward_results(scorer, [part * 100_000, part * 100_000 + '{"score": 0.5}'])
    # 0.1 s on an idle core; without the limit it takes minutes, while all other judges wait.
    assert time.monotonic() - began < 10
    assert found[0].failure and found[1].reward == 0.5


@pytest.mark.parametrize(
    ("answer", "settings", "rule", "requests"),
    [
        ((404, "no such model", {}), {"retries": 3}, "answered 404: no such model", 1),
        ((429, "slow down", {}), {"retries": 1}, "answered 429: slow down", 2),
        (completion("It is right."), {}, "has no JSON object .* 'It is right.'", 1),
        (completion(None), {}, "is not text: None", 1),
        (
            completion("Score: 1", "length"),
            {"pattern": r"Score: *([\d.]+)", "retries": 3, "max_tokens": 7},
            r"not whole \(finish_reason 'length'\); reward.max_tokens = 7",
            1,
        ),
        ((200, "<html>", {}), {}, "sent no chat completion: <html>", 1),
        ((200, "[" * 100_000, {}), {}, "sent no chat completion: ", 1),
        (completion("high"), {"pattern": r"(\d)"}, "has no number that reward.pattern", 1),
    ],
)
def test_an_error_quotes_what_the_server_sent(
    answer: Answer, settings: dict[str, Any], rule: str, requests: int
) -> None:
    with served(answer, **settings) as (scorer, server):
        scorer.submit(0, rollout("my answer"), PROMPT)
        with pytest.raises(RewardError, match=rule) as caught:
            while True:
                scorer.poll(1.0)
        assert len(server.seen) == requests
    assert "prompt rows.jsonl:7, sample 0" in (said := str(caught.value)) and "'my answer'" in said


def test_an_absent_server_is_asked_again_and_named() -> None:
    with served(completion("1"), retries=2) as (scorer, server):
        server.close()
        with pytest.raises(RewardError, match="ConnectError"):
            scorer(rollout("r"), PROMPT)
        assert scorer.take_counts() == {"calls": 1, "errors": 3, "retries": 2}


BY_PATTERN = [("Score: 3, no, Score: 4.5", "4.5"), ("<think>Score: 2</think>Score: 3", "3")]
BY_PATTERN += [("Score: high", "refused"), ('{"score": 1}', "refused")]
BY_JSON = [*table("judge_replies"), ["", "refused"], [f'{{"score": {"9" * 400}}}', "refused"]]


@pytest.mark.parametrize(
    ("pattern", "rows"), [("", BY_JSON), (r"Score: *([\d.]+)", BY_PATTERN)], ids=["JSON", "pattern"]
)
def test_a_reply_has_a_score_or_is_refused(pattern: str, rows: Any, tmp_path: Path) -> None:
    with echoing(tmp_path, pattern=pattern) as scorer:
        results = reward_results(scorer, [reply for reply, _ in rows])
    for key, (reply, score) in enumerate(rows):
        found = "refused" if results[key].failure else f"{results[key].reward:g}"
        assert found == score, reply


def test_a_pattern_that_backtracks_for_ever_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with echoing(tmp_path, pattern="(?:(a+)+)$", retries=3) as scorer:
        found = reward_results(scorer, ["a" * 20_000 + "!"])[0]
        assert scorer.take_counts()["retries"] == 0
    # The limit of 1 s and the time to notice it; without the limit it does not end.
    assert time.monotonic() - began < 10 and "takes longer than 1 s" in found.failure


def test_a_judge_is_shown_the_whole_conversation(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 3}}}
    messages = (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    )
    prompt = replace(PROMPT, messages=messages[:2], tools=({"name": "add"},))
    said = "{answer} {question}"  # a response cannot reach into the template
    turns = (*messages, {"role": "assistant", "content": said})
    (tmp_path / "judge.txt").write_text("{question}|{response}|{x}")
    with served(RIGHT, prompt_file=f"{tmp_path}/judge.txt") as (scorer, server):
        assert scorer(replace(rollout(said), messages=turns), prompt) == 1.0
    assert server.seen[0][1]["messages"][-1]["content"] == (
        'tools: [{"name": "add"}]\n\nsystem: Be short.\n\nuser: 3 + 4?\n\n'
        'assistant: {"name": "add", "arguments": {"x": 3}}\n\ntool: 7|{answer} {question}|{x}'
    )


def test_fields_of_the_request_are_those_that_the_server_takes() -> None:
    fields = ("max_tokens=null", "temperature=None", "max_completion_tokens=64", "top_k=1")
    with served(RIGHT, request=fields) as (scorer, server):
        assert scorer(rollout("r"), PROMPT) == 1.0
    sent = server.seen[0][1]
    del sent["model"], sent["messages"]
    assert sent == {"max_completion_tokens": 64, "top_k": 1}


def test_a_version_behind_the_address_is_sent_with_the_key_of_its_kind(monkeypatch: Patch) -> None:
    monkeypatch.setenv("GRADER_KEY", "secret")
    query = "?api-version=2026-01-01"
    with served(RIGHT, query=query, api_key_env="GRADER_KEY") as (scorer, server):
        assert scorer(rollout("r"), PROMPT) == 1.0
    assert server.seen[0][2] == "/v1/chat/completions?api-version=2026-01-01 None"


def test_a_judge_on_this_machine_is_asked_without_the_proxy(monkeypatch: Patch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    found = {}
    with serving(RIGHT) as server:
        urls = server.url, server.url.replace("127.0.0.1", "localhost"), "http://judge.invalid/v1"
        for url in urls:
            with judging("http", url=url, model="grader", on_error="zero") as scorer:
                found[url] = reward_results(scorer, ["r"])[0]
    assert [each.reward for each in found.values()] == [1.0, 1.0, 0.0]
    assert "ConnectError" in found[urls[2]].failure, "others go through the proxy"


def test_a_missing_key_is_reported_before_the_run() -> None:
    settings = RewardConfig(function=("http",), url="http://x/v1", api_key_env="R3_NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="R3_NO_SUCH_KEY"):
        make_scorer(settings)
