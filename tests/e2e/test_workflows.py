"""Workflows: each token sequence of an episode is what was sampled, with its routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import workflow_cases
from tests.e2e.workflow_cases import Episodes, Facts
from tests.world import run_world

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = str(tmp_path_factory.mktemp("workflows"))
    (found,) = run_world(workflow_cases.episodes, 1, folder=folder, timeout_s=300.0)
    return found


@pytest.mark.parametrize("kind", ["talks", "branching", "reasoning"])
def test_every_sequence_equals_transformers(facts: Facts, kind: str) -> None:
    agreement = facts.kinds[kind].agreement
    assert agreement is not None and agreement.slots > 500
    # Float32 on both sides: a near tie of two experts flips once in ten thousand slots at most, a
    # shift flips most.
    assert agreement.wrong <= agreement.slots / 5000
    assert agreement.worst <= 1e-4  # rounding of two float32 stacks leaves some 1e-6
    assert facts.kinds[kind].metrics.get("routing/overlap_differs", 0.0) == 0.0


def test_a_workflow_samples_what_the_same_environment_samples(facts: Facts) -> None:
    """Seeds, continuations, routes: bit for bit, except where an observation does not fit."""
    environment, workflow = facts.kinds["environment"], facts.kinds["talks"]
    assert workflow.names == environment.names and len(workflow.names) == 16
    assert workflow.signatures == environment.signatures
    assert workflow.metrics["env/continued_frac"] > 0.5


def test_a_branching_episode_has_the_sequences_it_should(facts: Facts) -> None:
    found = facts.kinds["branching"]
    # One branch continues the first conversation and the other does not; two forks; tokens.
    by_episode = _by_episode(found)
    assert len(by_episode) == 16
    for turns in by_episode.values():
        assert turns in ([2, 1, 2, 2, 2], [1, 1, 1, 2, 2, 2])
    assert found.metrics["env/turns_mean"] == 10


def test_a_template_that_drops_reasoning_makes_each_turn_a_sequence(facts: Facts) -> None:
    found = facts.kinds["reasoning"]
    assert "moves or changes the model's message" in facts.refused, "environments cannot have it"
    assert set(map(tuple, _by_episode(found).values())) == {(1, 1, 1)}
    assert found.rewards == [0.0, 0.5, 1.0] * 16
    assert found.metrics["env/continued_frac"] == 0
    for text in found.texts:
        assert text.count("<think>") == 1, "the reasoning of earlier turns is not in the prompt"


def test_episodes_do_not_depend_on_the_number_of_engines(facts: Facts, tmp_path: Path) -> None:
    left, right = run_world(workflow_cases.episodes, 2, folder=str(tmp_path), timeout_s=400.0)
    for kind, whole in facts.kinds.items():
        parts = [left.kinds[kind], right.kinds[kind]]
        both = {
            name: signature
            for part in parts
            for name, signature in zip(part.names, part.signatures, strict=True)
        }
        assert both == dict(zip(whole.names, whole.signatures, strict=True)), kind


def test_two_ranks_share_one_engine(tmp_path: Path) -> None:
    first, second = run_world(
        workflow_cases.episodes, 2, folder=str(tmp_path), engine_tp=2, timeout_s=400.0
    )
    agreement = first.kinds["branching"].agreement
    assert agreement is not None and agreement.worst <= 1e-4  # as above
    assert agreement.wrong <= agreement.slots / 5000
    assert second.kinds["branching"].names == [] and len(first.kinds["branching"].names) > 60


def _by_episode(found: Episodes) -> dict[str, list[int]]:
    """Turns of each sequence, by episode."""
    by_episode: dict[str, list[int]] = {}
    for name, turns in zip(found.names, found.turns, strict=True):
        by_episode.setdefault(name.rpartition("/")[0], []).append(turns)
    return by_episode
