"""Scorers beside a real engine: samples do not depend on them, and scoring runs meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import scorer_cases
from tests.e2e.scorer_cases import Judged
from tests.families import CLASSIFIER_TOLERANCE, classifier
from tests.runs import rows_of, run
from tests.world import run_world

pytestmark = pytest.mark.e2e

FUNCTIONS = """
import asyncio

async def slow(response, prompt):
    await asyncio.sleep(0.02)
    return float(len(response))

def picky(response, prompt):
    if len(response) % 3 == 0:
        raise ValueError("I do not like its length")
    return 1.0
"""


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judged]:
    """One round with each kind of scorer."""
    folder = tmp_path_factory.mktemp("judges")
    (folder / "mine.py").write_text(FUNCTIONS)
    # As much as the shipped model can take
    (folder / "prompt.txt").write_text("{question} {response}")
    (folder / "classifier").mkdir()
    (found,) = run_world(
        scorer_cases.kinds,
        1,
        file=str(folder / "mine.py"),
        reward_model=str(classifier(folder / "classifier")),
        prompt_file=str(folder / "prompt.txt"),
        timeout_s=400.0,
    )
    return found


def test_samples_do_not_depend_on_the_scorer(rounds: dict[str, Judged]) -> None:
    quick = rounds["quick"].tokens
    assert len(quick) == 32
    for name in ("slow", "model", "kept", "self"):
        assert rounds[name].tokens == quick
    assert rounds["drop"].tokens.items() <= quick.items()


def test_responses_are_scored_while_others_are_sampled(rounds: dict[str, Judged]) -> None:
    for name in ("slow", "model"):
        assert rounds[name].judged == 32
        overlap, seconds = rounds[name].overlap, rounds[name].seconds
        # A busy machine may be slow to score: that any overlaps is what is claimed.
        assert overlap >= 1, f"{name}: {overlap} of 32, in a round of {seconds:.1f} s"


def test_rewards_are_weighted_sums_with_their_parts(rounds: dict[str, Judged]) -> None:
    slow = rounds["slow"]
    for name, response in slow.responses.items():
        assert slow.parts[name]["slow"] == len(response)
        assert slow.rewards[name] == 0.5 * len(response) + slow.parts[name]["exact"]


def test_a_reward_model_in_batches_scores_as_one_by_one(rounds: dict[str, Judged]) -> None:
    model = rounds["model"]
    worst = max(abs(model.rewards[name] - model.single[name]) for name in model.rewards)
    assert worst <= CLASSIFIER_TOLERANCE  # as in tests/unit/test_reward_model.py


def test_the_policy_judges_itself_with_calls_that_nobody_trains_on(
    rounds: dict[str, Judged],
) -> None:
    """The same scores as when it is asked about one response after the other."""
    own = rounds["self"]
    assert own.rewards == own.single and len(own.rewards) == 32
    judged = [reward for reward in own.rewards.values() if reward != -1.0]
    assert 0 < len(judged) < 32
    assert own.metrics["reward/no_verdict_frac"] == 1 - len(judged) / 32
    assert own.metrics["reward/question_tokens_mean"] > 20
    assert own.metrics["rollout/tokens"] == rounds["quick"].metrics["rollout/tokens"]
    assert own.overlap >= 1, "it is asked while other responses are sampled"


def test_failures_are_left_out_of_training_and_0_in_evaluation(rounds: dict[str, Judged]) -> None:
    drop, kept = rounds["drop"], rounds["kept"]
    bad = {name for name, response in kept.responses.items() if len(response) % 3 == 0}
    assert 0 < len(bad) < 32
    assert drop.rewards.keys() == kept.rewards.keys() - bad
    assert {name for name, reward in kept.rewards.items() if reward == 0.0} == bad
    count = len(bad)
    for facts, dropped in ((drop.metrics, count), (kept.metrics, 0)):
        assert (facts["reward/dropped"], facts["reward/zeroed"]) == (dropped, count - dropped)
        assert (facts["reward/errors"], facts["reward/retries"]) == (2 * count, count)


def test_a_run_is_trained_on_several_rewards_each_recorded(tmp_path: Path) -> None:
    """From the command line: a function, a file's async function and a reward model, weighted; the
    held-out set has its own.
    """
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "classifier").mkdir()
    path = classifier(tmp_path / "classifier")
    flags = ["--reward.function", "gsm8k", f"{tmp_path / 'mine.py'}:slow", "model"]
    flags += ["--reward.weights", "1.0", "-0.01", "0.1", "--reward.model_path", str(path)]
    flags += ["--reward.model_dtype", "float32", "--reward.model_ranks", "0", "1"]
    flags += ["--eval.function", "gsm8k", "--train.steps", "1", "--checkpoint.export", "False"]
    flags += ["--rollout.prompts_per_step", "8", "--eval.max_prompts", "32"]
    run(tmp_path / "run", *flags)
    row = rows_of(tmp_path / "run")[-1]
    names = ("gsm8k", "slow", "model")
    total = sum(
        weight * row[f"reward/{name}/mean"]
        for name, weight in zip(names, (1.0, -0.01, 0.1), strict=True)
    )
    # float64 means of the same numbers, summed in other orders
    assert row["reward/mean"] == pytest.approx(total, abs=1e-9)
    assert row["reward/calls"] > 0 and row["reward/errors"] == row["reward/dropped"] == 0
    assert row["time/judge_mean_s"] >= 0.02  # it sleeps so long
    dump = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    for rollout in map(json.loads, dump):
        parts = rollout["rewards"]
        assert list(parts) == list(names) and parts["slow"] == len(rollout["response"])
        assert (
            rollout["reward"] == 1.0 * parts["gsm8k"] + -0.01 * parts["slow"] + 0.1 * parts["model"]
        )
    samples = (tmp_path / "run" / "eval" / "step_000001.jsonl").read_text().splitlines()
    assert all(json.loads(line)["rewards"].keys() == {"gsm8k"} for line in samples)
