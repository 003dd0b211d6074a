"""What the examples of other packages' environments do, in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.rounds import play_command
from tests.runs import dumped, program, require_replayed, rows_of
from tests.tiny import rewards_of

SERVERS = """
import os, time
from pathlib import Path
from word_env import Message, Reply, WordEnv, create_app

class Slow(WordEnv):
    def reset(self, seed=None, episode_id=None, **_):
        self.seed = seed
        return super().reset(seed, episode_id)
    def step(self, action, timeout_s=None, **_):
        time.sleep(3 * (self.seed == 0))
        return super().step(action)

class Dies(WordEnv):
    def step(self, action, timeout_s=None, **_):
        if not Path(os.environ["DIED"]).exists():
            Path(os.environ["DIED"]).touch()
            os._exit(1)
        return super().step(action)

slow = create_app(Slow, Message, Reply, max_concurrent_envs=8)
dies = create_app(Dies, Message, Reply, max_concurrent_envs=8)
narrow = create_app(WordEnv, Message, Reply, max_concurrent_envs=1)
"""
# Plays the messages of a run once more, without a server.
PLAYED_AGAIN = """
import json, sys
sys.path.insert(0, "examples/openenv")
from word_env import Message, WordEnv
for line in open(sys.argv[1]):
    row, env = json.loads(line), WordEnv()
    first, total = env.reset(seed=int(row["prompt_id"].rpartition(":")[2]) - 1), 0.0
    said = [each["content"] for each in row["messages"] if each["role"] == "assistant"]
    heard = [each["content"] for each in row["messages"] if each["role"] != "assistant"]
    replies = [first, *(env.step(Message(message=text)) for text in said)]
    assert [each.text for each in replies[:-1]] == heard
    assert [each.done for each in replies].index(True) == len(replies) - 1  # no step after the end
    print("again", row["reward"], sum(each.reward or 0.0 for each in replies))
"""


def scored_again(script: str, python: Path, runs: Path, files: str) -> list[tuple[float, float]]:
    """Rewards in files of a run, and what a script in the other environment gives."""
    done = program(python, "-c", script, runs / files, cwd=runs.parent)
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("again")]
    return [(float(kept), float(again)) for kept, again in lines]


def require_whole(row: dict[str, float], *, calls: int) -> None:
    """Require that no episode of a step failed, and that routers used all captured routes."""
    assert row["env/calls"] == calls and row["env/errors"] == 0
    require_replayed(row)


def openenv(runs: Path, output: str) -> None:
    python = runs / "openenv" / "bin" / "python"
    row = rows_of(runs / "of-openenv")[-1]
    require_whole(row, calls=8)
    assert row["env/turns_mean"] == row["env/openenv_steps"] > 1
    again = scored_again(PLAYED_AGAIN, python, runs, "of-openenv/rollouts/step_000001.jsonl")
    assert len(again) == 8 and len(set(again)) > 1
    # The rewards of up to five steps of 0.05 are added in the same order.
    assert all(kept == scored for kept, scored in again)
    openenv_reports(python, runs)


def openenv_reports(python: Path, folder: Path) -> None:
    """What users of OpenEnv report, tried through R3; `tests/README.md` names the reports."""
    example = folder / "openenv-example"
    example.mkdir()
    for file in (ROOT / "examples" / "openenv").glob("*.py"):
        text = file.read_text().replace('parents[2] / "r3"', f'parents[0] / "{ROOT}/r3"')
        (example / file.name).write_text(text)
    (example / "servers.py").write_text(SERVERS)
    command = f"env DIED={folder}/died {python} {example}/agent.py:Agent"
    rows = [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    right = {"Mia has 8": "#### 21", "Tom has 4": "#### 10", "Ben has 4": "#### 0"}

    def knows(text: str) -> str:
        return next(answer for name, answer in right.items() if name in text)

    # A reply that comes too late is read by no other call, nor by another episode.
    slow, _ = play_command(
        command, rows, knows, "server=servers:slow", "timeout_s=1", retries=0, on_error="zero"
    )
    assert rewards_of(slow) == [0.0, 1.0, 1.0]
    # A server that dies takes its sessions along; their episodes are played again in a new one.
    dies, _ = play_command(command, rows, knows, "server=servers:dies", retries=2)
    assert rewards_of(dies) == [1.0, 1.0, 1.0]
    # More episodes than sessions: the failure names it.
    server = "server=servers:narrow"
    narrow, _ = play_command(command, rows, knows, server, retries=0, on_error="drop")
    assert 1 <= len(rewards_of(narrow)) < 3 and set(rewards_of(narrow)) == {1.0}
    assert all("1/1 sessions active" in each for each in narrow.dropped)


def harbor(runs: Path, output: str) -> None:
    row = rows_of(runs / "of-harbor")[-1]
    require_whole(row, calls=8)
    rewards = [each["reward"] for each in dumped(runs / "of-harbor")]
    verified = [
        float(file.read_text())
        for file in runs.glob("of-harbor/agents/trials/*/verifier/reward.txt")
    ]
    assert sorted(rewards) == sorted(verified) and len(verified) == 8
    harbor_reports(runs / "harbor" / "bin" / "python", runs)


def harbor_reports(python: Path, folder: Path) -> None:
    """What users of Harbor report, tried through R3; `tests/README.md` names the reports."""
    script, tasks = ROOT / "examples/harbor/make_tasks.py", folder / "harbor-cases"
    subprocess.run([sys.executable, script, "4", tasks], stdout=subprocess.DEVNULL, check=True)
    (tasks / "shop-2/tests/test.sh").write_text("sleep 300\n")
    for name, section in (("shop-2", "verifier"), ("shop-3", "agent")):
        file = tasks / name / "task.toml"
        head, tail = file.read_text().split(f"[{section}]\ntimeout_sec = ")
        file.write_text(f"{head}[{section}]\ntimeout_sec = 20.0\n{tail.partition(chr(10))[2]}")
    write = "echo 1 > /logs/verifier/reward.txt"
    daemon = f"setsid sh -c 'while :; do {write}; sleep 0.1; done' >/dev/null 2>&1 &"
    commands = {
        "Mia has 8": f"{write}; {daemon}",
        "Tom has 4": "sed -i 's/return 4+4/return 10/' shop.py",
        "Ben has 4": "sed -i 's/return 4-7/return 0/' shop.py",
        "Leo has 7": "sed -i 's/return 7+2/return 1/' shop.py; sleep 300",
    }

    def says(text: str) -> str:
        if "</tool_call>" in text:
            return "Done."
        return f"<tool_call>{next(commands[key] for key in commands if key in text)}</tool_call>"

    rows = [{"task": f"shop-{index}"} for index in range(4)]
    command = f"{python} {ROOT}/examples/harbor/agent.py:Agent"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("R3_RUN_DIR", str(folder))  # trials go there, as those of a run
        found, _ = play_command(command, rows, says, f"tasks={tasks}", retries=0, on_error="drop")
    by_row = {each.rollout.key[0]: each.reward for each in found.samples}
    # An agent that writes the reward, also by a daemon, does not get it. One that mends the
    # repository does, also if its time is over then. A verifier that does not end is no reward.
    assert by_row == {0: 0.0, 1: 1.0, 3: 1.0}
    assert len(found.dropped) == 1 and "VerifierTimeoutError" in found.dropped[0]


# Scores the messages of a run once more, by reasoning-gym alone.
ASKED_AGAIN = """
import json, sys, reasoning_gym
rows = [json.loads(line)["gym"] for line in open("runs/gym-rows.jsonl")]
for line in open(sys.argv[1]):
    row = json.loads(line)
    entry = rows[int(row["prompt_id"].rpartition(":")[2]) - 1]
    score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    print("again", row["reward"], score(answer=row["messages"][-1]["content"].strip(), entry=entry))
"""


def nemo_gym(runs: Path, output: str) -> None:
    row = rows_of(runs / "of-gym")[-1]
    require_whole(row, calls=8)
    python, file = runs / "gym" / "bin" / "python", "of-gym/rollouts/step_000001.jsonl"
    again = scored_again(ASKED_AGAIN, python, runs, file)
    assert len(again) == 8 and all(kept == scored for kept, scored in again)
