"""Workflows: each token sequence of an episode is what was sampled, with its routes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from r3 import assets
from r3.tools import read_rollouts
from r3.types import Rollout
from tests.e2e import workflow_cases
from tests.runs import dumped, rows_of, run, words
from tests.talkers import require_agreement
from tests.tiny import embedded
from tests.world import run_world

pytestmark = pytest.mark.e2e

Facts = dict[str, SimpleNamespace]  # by kind


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = str(tmp_path_factory.mktemp("workflows"))
    return run_world(workflow_cases.episodes, 1, folder=folder, timeout_s=300.0)[0]


@pytest.mark.parametrize("kind", ["talks", "branching", "reasoning"])
def test_every_sequence_equals_transformers(facts: Facts, kind: str) -> None:
    require_agreement(facts[kind].agreement)
    assert facts[kind].metrics.get("routing/overlap_differs", 0.0) == 0.0


@pytest.mark.parametrize("kind", ["talks", "command", "served"])
def test_a_workflow_samples_what_the_same_environment_samples(facts: Facts, kind: str) -> None:
    """Seeds, continuations, routes: bit for bit, except where an observation does not fit."""
    environment, workflow = facts["environment"], facts[kind]
    assert workflow.names == environment.names and len(workflow.names) == 16
    assert workflow.signatures == environment.signatures
    assert workflow.metrics["env/continued_frac"] > 0.5


def test_the_policy_judges_its_own_episodes(facts: Facts) -> None:
    """What it samples for a verdict is in no sequence, and the verdicts differ."""
    judged, plain = facts["judged"], facts["talks"]
    assert (judged.names, judged.signatures) == (plain.names, plain.signatures)
    assert judged.metrics["env/turns_mean"] == plain.metrics["env/turns_mean"]
    assert len(set(judged.rewards)) > 2


def test_a_branching_episode_has_the_sequences_it_should(facts: Facts) -> None:
    found = facts["branching"]
    # One branch continues the first conversation and the other does not; two forks; tokens.
    by_episode = _by_episode(found)
    assert len(by_episode) == 16
    for turns in by_episode.values():
        assert turns in ([2, 1, 2, 2, 2], [1, 1, 1, 2, 2, 2])
    assert found.metrics["env/turns_mean"] == 10


def test_a_template_that_drops_reasoning_makes_each_turn_a_sequence(facts: Facts) -> None:
    found = facts["reasoning"]
    assert set(map(tuple, _by_episode(found).values())) == {(1, 1, 1)}
    assert found.rewards == [0.0, 0.5, 1.0] * 16
    assert found.metrics["env/continued_frac"] == 0
    for text in found.texts:
        assert text.count("<think>") == 1, "the reasoning of earlier turns is not in the prompt"


def test_a_crashing_a_hanging_and_a_slow_episode_lose_nothing_else(facts: Facts) -> None:
    calm, dropped, zeroed = (facts[kind] for kind in ("calm", "drop", "zero"))
    whole = dict(zip(calm.names, calm.signatures, strict=True))
    assert len(whole) == 32 and set(calm.rewards) == {1.0}
    left = dict(zip(dropped.names, dropped.signatures, strict=True))
    assert len(left) == 30 and left.items() <= whole.items()
    counts = ("calls", "errors", "timeouts", "dropped", "zeroed")
    assert [dropped.metrics[f"env/{name}"] for name in counts] == [32, 1, 1, 2, 0]
    assert [zeroed.metrics[f"env/{name}"] for name in counts] == [32, 1, 1, 0, 2]
    failed = {n for n, reward in zip(zeroed.names, zeroed.rewards, strict=True) if reward == 0}
    assert failed == whole.keys() - left.keys() and len(zeroed.names) == 32


def test_calls_that_are_given_up_leave_nothing_behind(facts: Facts) -> None:
    found = facts["impatient"]
    assert found.turns == [1] * 16 and found.rewards == [1.0] * 16
    # The engine ends them: it has sampled nothing but the 16 messages of at most two tokens.
    assert found.metrics["rollout/sampled_tokens"] <= 32


def test_a_client_of_tokens_gets_the_routes_that_are_trained_on(facts: Facts) -> None:
    found = facts["tokens"]
    assert found.turns == [2] * 16 and found.agreement is not None
    moe_layers = found.agreement.slots / found.routes_sent  # all rows of all rollouts were sent
    assert moe_layers == int(moe_layers) > 0 and found.metrics["env/continued_frac"] == 0.5


@pytest.mark.large
def test_two_ranks_share_one_engine(tmp_path: Path) -> None:
    first, second = run_world(
        workflow_cases.episodes,
        2,
        folder=str(tmp_path),
        engine_tp=2,
        kinds=("talks", "branching", "judged"),
        prompts=4,
        timeout_s=400.0,
    )
    for kind in ("talks", "branching"):
        require_agreement(first[kind].agreement)
    assert second["branching"].names == [] and len(first["branching"].names) == 40
    assert len(set(first["judged"].rewards)) > 2


@pytest.mark.large
@pytest.mark.parametrize("rewards", ["episode", "calls"])
def test_a_reasoning_template_trains_end_to_end(tmp_path: Path, rewards: str) -> None:
    model = embedded(tmp_path / "model")
    (model / "chat_template.jinja").write_text(workflow_cases.REASONING)
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    (tmp_path / "judge.txt").write_text("{question} {response}")
    judge = ["--reward.prompt_file", str(tmp_path / "judge.txt"), "--reward.max_tokens", "8"]
    judge += ["--reward.function", "env", "self_judge", "--reward.pattern", r"(\d)"]
    judge += ["--algo.teacher", str(TEACHER), "--algo.teacher_coef", "0.01"]
    run(
        tmp_path / "run",
        *("--model.path", str(model), "--env.path", f"{file}:Agent"),
        *("--env.args", f"rewards={rewards}", "--train.steps", "1"),
        *words(
            "--eval.max_prompts 4 --rollout.prompts_per_step 4 --train.updates_per_step 2 "
            "--algo.dynamic_sampling 2 --algo.kl_coef 0.01 --algo.kl_in reward "
            "--algo.advantage rloo --algo.kl_estimator k1 --checkpoint.export false "
            "--log.rollouts_every 1"
        ),
        *(judge if rewards == "episode" else ()),
    )
    start, *rows = rows_of(tmp_path / "run")
    assert "eval/heldout/accuracy" in start and len(rows) == 1
    for row in rows:
        assert row["env/sequences_mean"] == 3 and row["env/continued_frac"] == 0
        assert row["env/turns_mean"] == 4, "the call without training counts too"
        assert row["rollout/groups_trained"] <= 4 <= row["rollout/groups_sampled"]
        # The policy scores its own last message; its replies are in no sequence.
        assert ("reward/self_judge/mean" in row) == (rewards == "episode")
        assert row.get("reward/no_verdict_frac", 0.0) < 1
        assert row["routing/coverage"] == 1.0
        # Policy and engine agree on every token of every sequence; float32 on both sides.
        assert row["mismatch/abs_max"] <= 1e-4 and row["routing/agreement"] > 0.999
    dump = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    if rewards == "episode":
        # Of each sequence by itself, in transformers. The engine's log-probabilities stand for the
        # policy's, 1e-4 apart as above; a teacher that saw another text differs by units.
        assert rows[0]["loss/kl_teacher"] == pytest.approx(_kl(read_rollouts(dump)[0]), abs=1e-3)
    by_episode: dict[tuple[int, int], list[float]] = {}
    for each in dumped(tmp_path / "run"):
        by_episode.setdefault((each["group"], each["sample_index"]), []).append(each["advantage"])
    assert {len(advantages) for advantages in by_episode.values()} == {3}
    several = any(len(set(advantages)) > 1 for advantages in by_episode.values())
    assert several == (rewards == "calls")


@torch.no_grad()
def _kl(rollouts: Sequence[Rollout]) -> float:
    """Mean of log policy - log teacher over the sampled tokens."""
    from transformers import AutoModelForCausalLM

    teacher: Any = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    total, count = 0.0, 0
    for rollout in rollouts:
        ids = torch.from_numpy(rollout.tokens_T)
        logprobs = teacher(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        sampled = torch.from_numpy(rollout.loss_mask_T[1:] > 0)
        total += float((torch.from_numpy(rollout.logprobs_T[1:]) - logprobs)[sampled].sum())
        count += int(sampled.sum())
    return total / count


# Its routers are decided. With near ties, rounding would choose other experts in transformers than
# in the policy, on some processors.
TEACHER = assets.TINY_MOE_TOOLS
AGENT = '''
def user(text):
    return {"role": "user", "content": text}

class Agent:
    """Three turns of a conversation, and a call without training."""
    def __init__(self, rewards):
        self.rewards = rewards
    async def run(self, task, model):
        messages, scores = list(task.messages), []
        for turn in range(3):
            message = await model.chat(messages, max_tokens=16)
            scores.append(float(len(message["content"]) % 5))
            messages += [message, user("and then 2 more")]
        await model.chat([user("Is it right?")], train=False, temperature=0.0, max_tokens=3)
        return scores if self.rewards == "calls" else sum(scores)
'''


def _by_episode(found: SimpleNamespace) -> dict[str, list[int]]:
    """Turns of each sequence, by episode."""
    by_episode: dict[str, list[int]] = {}
    for name, turns in zip(found.names, found.turns, strict=True):
        by_episode.setdefault(name.rpartition("/")[0], []).append(turns)
    return by_episode
