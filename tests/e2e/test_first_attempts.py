"""What a new user does, as they would write it the first time, from a folder beside the clone.

tests/README.md lists every task of a trial with users of other programs and the tests that show it.
The tests here are those that no other file has: each is written as a user writes it who has read
the README, and works at the first attempt.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hub import Hub, serving
from tests.pages import Block, checkout, run
from tests.runs import rows_of
from tests.world import ROOT

pytestmark = pytest.mark.e2e


class Desk:
    """A user's folder, beside a clone of the repository."""

    def __init__(self, folder: Path) -> None:
        checkout(folder / "clone", is_warm=True)
        self.folder = folder / "proj"
        self.folder.mkdir()

    def write(self, **files: str) -> None:
        """Write files; `__` in a name is a folder, `_` before the last word its dot."""
        for name, text in files.items():
            path = self.folder / ".".join(name.replace("__", "/").rsplit("_", 1))
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    def type(self, script: str) -> str:
        """Run lines in the folder; what they print."""
        return run(Block(page=self.folder.name, line=1, script=script), self.folder)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def rows(*answers: object) -> str:
    lines = [
        {"question": f"Tom has {n} eggs. He finds 4. How many eggs are left?", "answer": answer}
        for n, answer in enumerate(answers, 1)
    ]
    return "\n".join(map(json.dumps, lines)) + "\n"


@pytest.mark.slow
@pytest.mark.large
def test_own_rows_rewards_and_settings(desk: Desk) -> None:
    """Trained, and evaluated from checkpoint and export."""
    desk.write(
        rows_jsonl=rows(*range(5, 13)),
        rewards_py=(
            "def exact_match(response, prompt):\n"
            "    return float(response.strip() == prompt.answer)\n\n\n"
            "def format_bonus(response, prompt, bonus=1.0):\n"
            "    return bonus if '####' in response else 0.0\n"
        ),
        settings__mine_yaml=(
            "base: tiny\n"
            "data: {path: rows.jsonl, system_prompt: Answer with a number.}\n"
            "reward:\n"
            "  function: [rewards.py:exact_match, rewards.py:format_bonus]\n"
            "  args: {bonus: 0.5}\n"
            "rollout: {prompts_per_step: 4}\n"
            "train: {steps: 1}\n"
            "eval: {path: ''}\n"
        ),
    )
    said = desk.type("../clone/launch/local.sh settings/mine.yaml")
    assert "settings   settings/mine.yaml, from tiny with" in said
    (row,) = rows_of(desk.folder / "runs" / "mine")
    assert row["step"] == 1 and "reward/format_bonus/mean" in row
    evaluation = "--eval.only --eval.path rows.jsonl"
    said = desk.type(f"../clone/launch/local.sh --from runs/mine {evaluation}")
    assert "checkpoint" in said and "accuracy" in said
    said = desk.type(
        "../clone/launch/local.sh tiny --model.path runs/mine/hf/step_000001 "
        f"--reward.function exact {evaluation} --log.dir runs/export"
    )
    assert "accuracy" in said


@pytest.mark.slow
@pytest.mark.large
def test_a_model_by_name_trains_and_resumes_without_network(desk: Desk, tmp_path: Path) -> None:
    """Two ranks ask for the weights once; the second start asks for nothing."""
    model = ROOT / "r3" / "assets" / "tiny-moe"
    cache = f"export HF_HUB_CACHE={tmp_path / 'cache'}"
    start = (
        "../clone/launch/local.sh tiny-smoke --model.path hub:owner/tiny --eval.path '' "
        "--rollout.prompts_per_step 4 --train.steps {} --log.dir runs/hub"
    )
    with serving(Hub({"owner/tiny": {"main": model}})) as hub:
        said = desk.type(f"{cache} HF_ENDPOINT={hub.url}\n{start.format(1)}")
        assert said.count("downloading hub:owner/tiny") == 1
        sizes = {file.name: file.stat().st_size for file in model.iterdir()}
        assert dict(hub.sent) == sizes, "each file once"
    said = desk.type(f"{cache} HF_ENDPOINT=http://127.0.0.1:9\n{start.format(2)}")
    assert "after step 1" in said
    assert [row["step"] for row in rows_of(desk.folder / "runs" / "hub")] == [1, 2]
    assert "path: hub:owner/tiny" in (desk.folder / "runs" / "hub" / "config.yaml").read_text()
