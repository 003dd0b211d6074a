"""The repositories of examples/swe_task: what a shell may do there, and what earns the reward."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT
from tests.rounds import play_command
from tests.runs import program, soon
from tests.tiny import rewards_of

pytestmark = pytest.mark.e2e
FOLDER = ROOT / "examples" / "swe_task"
FIX = "sed -i 's/return 8-4/return 8+4+5-5+9/' shop.py"


def row() -> dict[str, Any]:
    script = [sys.executable, FOLDER / "make_rows.py", "1"]
    return dict(json.loads(subprocess.run(script, capture_output=True, check=True).stdout))


@pytest.fixture(params=["isolated", "limited"])
def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A copy of the first row's repository."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import repository

    prefix = repository.isolation() if request.param == "isolated" else repository.LIMITED
    if request.param == "isolated" and prefix == repository.LIMITED:
        pytest.skip("no user namespaces here")
    monkeypatch.setattr(repository, "LIMIT_S", 2)
    with repository.Repository(row(), prefix) as found:
        yield found


def alive(marker: str) -> str:
    return program("pgrep", "-f", marker).stdout


def test_a_fix_earns_one_and_an_edit_a_tenth(shell: Any) -> None:
    assert shell.score(shell.edits())[0] == 0.0
    assert shell.run("8+4") == ("12", 0)  # the short command of the repository
    assert shell.score(shell.edits())[0] == 0.1
    assert shell.run(FIX.replace("8-4", "8+4"))[1] == 0
    assert shell.score(shell.edits())[0] == 1.0
    assert shell.run("sed -i 's/sum/max/' shop.py")[1] == 0
    # The hidden test passes still, but a visible one does not.
    assert shell.score(shell.edits()) == (0.0, {"swe_valid": 0, "swe_solved": 0, "swe_late": 0})


def test_tests_that_do_not_end_in_time_are_counted(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[type(shell).__module__], "TESTS_S", 2)
    assert shell.run("echo 'import time; time.sleep(300)' >> shop.py")[1] == 0
    assert shell.score(shell.edits()) == (0.0, {"swe_valid": 0, "swe_solved": 0, "swe_late": 1})


@pytest.mark.parametrize(
    "cheat",
    [
        "echo 'import os; os._exit(0)' >> shop.py",
        "echo 'import unittest; unittest.TestCase.assertEqual = print' > unittest.py",
        "echo > test_shop.py; echo > test_hidden.py; rm -rf .git; git init -q; echo '#' >> shop.py",
        'echo \'print("{\\"test_shop\\": true, \\"test_hidden\\": true}")\' >> shop.py',
    ],
)
def test_the_reward_cannot_be_had_without_the_fix(shell: Any, cheat: str) -> None:
    assert shell.run(cheat)[1] == 0
    assert shell.score(shell.edits())[0] < 1


def test_output_is_cut_visibly_and_commands_end(shell: Any) -> None:
    text, code = shell.run("seq 1000")
    assert code == 0 and text.startswith("1\n2\n") and text.endswith("\n1000")
    assert "[... 3492 characters left out ...]" in text
    assert shell.run("no-such-program") == ("no-such-program: command not found", 127)
    marker = f"300.{os.getpid()}"
    began = time.monotonic()
    text, code = shell.run(f"sleep {marker} & echo started; sleep {marker}")
    assert code == 124 and text.startswith("started") and text.endswith("[ended after 2 s]")
    assert time.monotonic() - began < 30
    shell.run(f"sleep {marker} & echo left behind")
    assert shell.run("yes")[1] != 0  # ends at the largest file or at the limit
    assert not alive(marker)


def test_isolated_commands_have_no_network_and_no_daemons(shell: Any) -> None:
    if shell._prefix[0] != "unshare":
        pytest.skip("this one has both")
    marker = f"301.{os.getpid()}"
    shell.run(f"setsid sleep {marker} >/dev/null 2>&1 & sleep 0.2")
    assert not alive(marker)
    program = "import socket; socket.create_connection(('127.0.0.1', PORT), 1)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        _, code = shell.run(f'{sys.executable} -c "{program.replace("PORT", port)}"')
    assert code == 1


@pytest.mark.large
def test_nothing_is_left_when_the_agent_is_killed(tmp_path: Path) -> None:
    marker = f"302.{os.getpid()}"
    program = f"""
import sys; sys.path.insert(0, {str(FOLDER)!r})
from repository import *
with Repository({row()!r}, isolation()) as found:
    print(found._prefix[0], flush=True)
    found.run("setsid sleep {marker} & sleep {marker}")
"""
    agent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert agent.stdout is not None
    if agent.stdout.readline() != "unshare\n":
        os.killpg(agent.pid, signal.SIGKILL)
        pytest.skip("no user namespaces here")
    assert soon(lambda: len(alive(marker).split()) >= 2, 60.0)
    os.killpg(agent.pid, signal.SIGKILL)  # as R3 ends the group of an agent
    agent.wait()
    assert soon(lambda: not alive(marker), 60.0)


@pytest.mark.large
@pytest.mark.parametrize("agent", ["agent", "mini_agent"])
def test_a_model_that_can_write_commands_is_paid(agent: str) -> None:
    python = sys.executable
    if agent == "mini_agent":
        python = os.environ.get("R3_PYTHON_WITH_MINISWEAGENT", "")
        if not python:
            pytest.skip("R3_PYTHON_WITH_MINISWEAGENT names no interpreter that has it")
    call = json.dumps({"name": "bash", "arguments": {"command": FIX}}) if agent == "agent" else FIX
    said = iter([f"<tool_call>{call}</tool_call>", "Done."])
    columns = {key: value for key, value in row().items() if key not in ("question", "answer")}
    command = f"{python} {FOLDER}/{agent}.py:Agent"
    found, asked = play_command(command, [columns], lambda asked: next(said))
    assert rewards_of(found) == [1.0] and len(asked) == 2
    assert found.rollouts[0].metrics["env/swe_solved"] == 1
