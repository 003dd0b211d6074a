"""Agents in other processes: results, failures, time-outs, and that nothing is left behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from r3.envs import Command, Resident, command
from r3.rollout import EnvironmentFailed, RoundResult
from tests.errors import Patch
from tests.rounds import play_command
from tests.runs import soon
from tests.sources import ROOT
from tests.talkers import WITHOUT_CLIENT, values
from tests.tiny import rewards_of

AGENT = (
    WITHOUT_CLIENT
    + """
import subprocess, sys, time, urllib.error
def result(text):
    open(os.environ["R3_RESULT_FILE"], "w").write(text)
message = chat(task["messages"])
"""
)


# One that stays. `run` is async, or a plain function that gets a thread.
STAYS = """
import asyncio, json, os, subprocess, sys, time, urllib.request
def call(model, messages):
    request = urllib.request.Request(
        model.base_url + "/chat/completions",
        json.dumps({"model": model.name, "messages": messages}).encode(),
        {"Authorization": "Bearer " + model.api_key},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
class Agent:
    def __init__(self, **arguments):
        self.arguments, self.lived = arguments, 0
    async def run(self, task, model):
        message = await asyncio.to_thread(call, model, task["messages"])
        self.lived += 1
"""


def play(
    folder: Path, rest: str, *, prompts: int = 1, stays: str = "", agent: str = STAYS, **env: Any
) -> RoundResult:
    """One round of episodes of the agent, with the rest of its program, or of its `run`."""
    file = folder / "agent.py"
    lines = "".join(f"        {line}\n" for line in rest.strip().splitlines())
    file.write_text(agent + lines if stays else AGENT + rest)
    args, env = env.pop("args", ()), {"timeout_s": 60.0, **env}
    words = f"{sys.executable} -S {file}" + (f":{stays}" if stays else "")
    rows = [{"level": number} for number in range(prompts)]
    kind = Resident if stays else Command
    return play_command(words, rows, lambda asked: "hello", *args, kind=kind, **env)[0]


@pytest.mark.parametrize(
    ("rest", "reward"),
    [
        ("result('0.5')", 0.5),
        ("result(json.dumps({'reward': 2, 'metrics': {'steps': 3}}))", 2.0),
        ("chat([*task['messages'], message, task['messages'][0]]); result('[0.25, 0.5]')", 0.75),
        ("result(str(len({v for k, v in os.environ.items() if k.startswith('ANTHROPIC_')})))", 3.0),
        ("result(str(task['metadata']['level'] + len(task['answer']) + len(task['id'])))", 7.0),
    ],
    ids=["number", "object", "one per call", "variables of Anthropic", "the row"],
)
def test_a_reward_is_read_from_the_result(tmp_path: Path, rest: str, reward: float) -> None:
    collected = play(tmp_path, rest)
    assert rewards_of(collected) == [reward]
    assert "hello" in collected.rollouts[0].response
    assert collected.rollouts[0].metrics == ({"env/steps": 3.0} if "metrics" in rest else {})


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ("print('why'); sys.exit(3)", "exit code 3; its last lines:\n  why"),
        ("raise RuntimeError('of the agent')", "RuntimeError: of the agent"),
        ("os.kill(os.getpid(), 9)", "ended with signal SIGKILL; it printed nothing"),
        ("print('done')", "wrote no result to R3_RESULT_FILE; its last lines:\n  done"),
        ("result('{')", "wrote a result that is not JSON"),
        ("result('{\"score\": 1}')", "an object has the key reward"),
        ("result('\"good\"')", "returned 'good'"),
        ("result('[1, 2]')", "returned 2 rewards, and the episode has 1 calls"),
        ("time.sleep(60)", "not done after 2 s, calls of the model excluded"),
        ("print('I wait', flush=True); time.sleep(60)", "stopped; its last lines:\n  I wait"),
    ],
)
def test_a_failing_command_fails_the_episode(tmp_path: Path, rest: str, text: str) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        play(tmp_path, rest, timeout_s=2.0 if "sleep" in rest else 60.0)
    assert text in str(caught.value)


RETURNS = {
    "number": ("return 0.5", 0.5),
    "metrics": ("return 2, {'steps': 3}", 2.0),
    "one per call": (
        "call(model, [*task['messages'], message, task['messages'][0]]); return [0.25, 0.5]",
        0.75,
    ),
    "the row": ("return task['metadata']['level'] + len(task['answer']) + len(task['id'])", 7.0),
    "arguments": ("return self.arguments['size'] + self.arguments['more']", 5.0),
    "prints": ("print('no result', flush=True); os.system('echo and none'); return 1", 1.0),
    "prints a lot": ("sys.stderr.write('x' * 5_000_000); print('x' * 5_000_000); return 1", 1.0),
    "of numpy": ("return type('scalar', (), {'tolist': lambda self: 0.125})()", 0.125),
}


@pytest.mark.parametrize("name", RETURNS)
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
def test_an_agent_that_stays_returns_its_reward(tmp_path: Path, name: str, is_async: bool) -> None:
    rest, reward = RETURNS[name]
    plain = STAYS.replace("await asyncio.to_thread(call, model, ", "call(model, ")
    agent = STAYS if is_async else plain.replace("async def", "def")
    collected = play(tmp_path, rest, stays="Agent", agent=agent, args=("size=2", "more=3"))
    assert rewards_of(collected) == [reward]
    assert "hello" in collected.rollouts[0].response
    assert collected.rollouts[0].metrics == ({"env/steps": 3.0} if "steps" in rest else {})


def test_one_process_lives_all_episodes_at_once(tmp_path: Path) -> None:
    rest = "while self.lived < 8: await asyncio.sleep(0.01)\nreturn os.getpid()"
    assert len(set(rewards_of(play(tmp_path, rest, prompts=8, stays="Agent")))) == 1


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ("raise RuntimeError('of the agent')", "in run\n    raise RuntimeError('of the"),
        ("sys.exit('of the agent')", "SystemExit: of the agent"),
        ("print('why', flush=True); os._exit(3)", "its last lines:\n  why"),
        ("os.kill(os.getpid(), 9)", "ended with signal SIGKILL"),
        ("os._exit(0)", "ended with exit code 0"),
        # Neither child hides that the process died, nor loses a file of its own.
        ("os.fork() or (os.fork(), time.sleep(300)); os._exit(3)", "exit code 3 (output: "),
        ("os.write(2, b'caf\\xe9\\n'); os._exit(3)", "its last lines:\n  caf\ufffd"),
        ("return 1.0, {'a' * 3_000_000: 1.0}", "gave a result of more than 1 MiB: R3 killed it"),
        # What else is no result is the same as of a command.
        ("return float('nan')", "must return a finite number"),
        ("return object()", "AttributeError: 'object' object has no attribute 'tolist'"),
        ("await asyncio.sleep(60)", "not done after 2 s, calls of the model excluded"),
    ],
)
def test_an_agent_that_stays_fails_the_episode(
    tmp_path: Path, monkeypatch: Patch, rest: str, text: str
) -> None:
    monkeypatch.setattr(command, "_LONGEST_LINE", 1 << 20)
    with pytest.raises(EnvironmentFailed) as caught:
        play(tmp_path, rest, stays="Agent", timeout_s=2.0 if "sleep" in rest else 60.0)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("class Agent", "class Agnet", "has no attribute 'Agent'"),
        ("import asyncio", "import no_such, asyncio", "No module named 'no_such'"),
        ("def __init__(self", "def __init__(self, size", "missing 1 required .* 'size'"),
        ("self.lived =", "self.lived = 1 / 0,", "(?s)in __init__.*division by zero"),
        ("import asyncio", "import time; time.sleep(60); import asyncio", "still loading its file"),
    ],
    ids=["class", "import", "arguments", "raises", "slow"],
)
def test_a_class_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: Patch, old: str, new: str, text: str
) -> None:
    monkeypatch.setattr(command, "_END_S", 0.5)
    given: Any = {"retries": 3, "timeout_s": 2.0 if "60" in new else 60.0}
    with pytest.raises(EnvironmentFailed, match=text):
        play(tmp_path, "return 1", stays="Agent", agent=STAYS.replace(old, new), **given)


def test_a_coroutine_below_a_plain_decorator_is_awaited(tmp_path: Path) -> None:
    plain = "def run(self, task, model): return self.go(task, model)\n    async def go"
    agent = STAYS.replace("async def run", plain)
    assert rewards_of(play(tmp_path, "return 0.5", stays="Agent", agent=agent)) == [0.5]


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13"])
def test_an_agent_that_stays_has_another_python(
    tmp_path: Path, monkeypatch: Patch, version: str
) -> None:
    python = shutil.which(f"python{version}") or ""
    if not python or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"there is no Python {version}")
    monkeypatch.setattr(sys, "executable", python)
    rest = "return sys.version_info[0] + sys.version_info[1] / 100"
    assert rewards_of(play(tmp_path, rest, stays="Agent")) == [3 + int(version[2:]) / 100]


@pytest.mark.parametrize("end", ["os._exit(1)", "time.sleep(300)"], ids=["dies", "hangs"])
def test_a_process_that_dies_or_hangs_is_started_again(
    tmp_path: Path, monkeypatch: Patch, end: str
) -> None:
    """The episodes that it lived are retried; one that hangs does not take the end of another."""
    monkeypatch.setattr(command, "_SILENT_S", 0.5)
    flag = tmp_path / "flag"
    rest = f"""
if task["answer"] == "1" and not os.path.exists({str(flag)!r}):
    open({str(flag)!r}, "w").close()
    {end}
return os.getpid()"""
    collected = play(tmp_path, rest, prompts=4, stays="Agent", retries=2, timeout_s=3.0)
    assert len(rewards_of(collected)) == 4
    assert 1 <= values(collected.metrics)["env/retries"] <= 8


def test_output_goes_to_the_folder_of_the_run(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("R3_RUN_DIR", str(tmp_path))
    play(tmp_path, "print('row', task['answer']); return 1", prompts=2, stays="Agent")
    output = (tmp_path / "agents" / "rank_00000.txt").read_text()
    assert sorted(output.split()) == ["0", "1", "row", "row"]


def test_a_command_is_tried_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    rest = f"if not os.path.exists({str(flag)!r}): sys.exit(open({str(flag)!r}, 'w').write('once'))"
    collected = play(tmp_path, f"{rest}\nresult('1')", retries=1)
    assert rewards_of(collected) == [1.0]
    found = values(collected.metrics)
    assert (found["env/errors"], found["env/retries"], found["env/dropped"]) == (1, 1, 0)


@pytest.mark.parametrize("stays", ["", "Agent"])
def test_an_agent_that_dies_of_a_limit_is_unfinished(tmp_path: Path, stays: str) -> None:
    call = "await asyncio.to_thread(call, model, " if stays else "chat("
    rest = f"while True: {call}task['messages'])"
    collected = play(tmp_path, rest, stays=stays, max_turns=3, unfinished_reward=-0.5)
    assert set(rewards_of(collected)) == {-0.5} and collected.rollouts[0].finish_reason == "turns"


def test_workers_limit_the_commands_at_once(tmp_path: Path) -> None:
    rest = f"""
import glob
mine = {str(tmp_path)!r} + f"/alive{{task['id']}}"
open(mine, "w")
time.sleep(0.3)
count = len(glob.glob({str(tmp_path)!r} + "/alive*"))
os.remove(mine)
result(str(count))
"""
    collected = play(tmp_path, rest, prompts=5, workers=2)
    assert len(rewards_of(collected)) == 5 and max(rewards_of(collected)) <= 2


def is_gone(file: Path) -> bool:
    """Whether the process whose id a file holds has ended."""
    pid = int(file.read_text())
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def leaves(pid_file: Path) -> str:
    """Program text that starts a process which would live on, and notes its id."""
    return f"""
child = subprocess.Popen(["sleep", "300"])
open({str(pid_file)!r}, "w").write(str(child.pid))
"""


@pytest.mark.parametrize(
    ("end", "stays"),
    [("result('1')", ""), ("time.sleep(60)", ""), ("return 1", "Agent")],
    ids=["at its end", "time-out", "end of the run"],
)
def test_what_a_command_started_ends_with_it(tmp_path: Path, end: str, stays: str) -> None:
    pid_file = tmp_path / "pid"
    play(tmp_path, leaves(pid_file) + end, stays=stays, timeout_s=3.0, on_error="zero")
    assert soon(lambda: is_gone(pid_file))


@pytest.mark.large
@pytest.mark.parametrize("stays", ["", "Agent"])
def test_commands_end_with_a_rank_that_is_killed(tmp_path: Path, stays: str) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
from pathlib import Path
from tests.unit.test_command import leaves, play
rest = leaves(Path({str(pid_file)!r})) + "time.sleep(300)"
play(Path({str(tmp_path)!r}), rest, stays={stays!r}, timeout_s=300.0)
"""
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = os.environ | {"TMPDIR": str(folder)}
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment)
    try:
        assert soon(lambda: pid_file.exists() and pid_file.read_text(), 90) and not rank.poll()
        assert list(folder.glob("r3-episodes-*/*"))
    finally:
        rank.kill()
        rank.wait()
    assert soon(lambda: is_gone(pid_file))
    assert soon(lambda: not list(folder.glob("r3-episodes-*")))
