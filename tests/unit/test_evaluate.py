"""Figures of an evaluation against ones worked out by hand."""

from itertools import combinations

import pytest

from r3.rollout import accuracy_metrics, is_graded, none_right, pass_at_k
from tests.talkers import values


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_choices_of_k_that_hold_a_right_one(samples: int) -> None:
    for correct in range(samples + 1):
        for k in range(1, samples + 1):
            # Samples 0 .. correct - 1 are the right ones.
            choices = list(combinations(range(samples), k))
            share = sum(min(choice) < correct for choice in choices) / len(choices)
            # float64 rounding
            assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-12)


def test_one_sample_gives_accuracy_alone() -> None:
    metrics = accuracy_metrics("a", [1.0, 0.5, 0.0, 1.0], 1)
    assert values(metrics) == {"eval/a/accuracy": 0.5}


def test_several_samples_give_avg_and_pass() -> None:
    rewards = [1.0, 0.5, 0.0, 0.0] + [1.0, 1.0, 1.0, 0.0]  # two questions, four samples each
    assert values(accuracy_metrics("a", rewards, 4, (1, 2, 4))) == pytest.approx(
        {
            "eval/a/accuracy": 4 / 8,  # rewards below 1 are not right
            "eval/a/avg_at_4": 4.5 / 8,
            "eval/a/pass_at_1": (1 / 4 + 3 / 4) / 2,
            "eval/a/pass_at_2": (3 / 6 + 1) / 2,  # one right of four: 3 of 6 pairs hold it
            "eval/a/pass_at_4": 1.0,
        },
        abs=1e-12,  # float64 rounding
    )


def test_a_sum_that_rounds_below_1_is_right() -> None:
    reward = 0.7 * 1.0 + 0.2 * 1.0 + 0.1 * 1.0
    assert reward < 1.0
    metrics = values(accuracy_metrics("a", [reward, 1.0 - 1e-6], 2))
    assert metrics["eval/a/accuracy"] == 0.5, "and what is really below is not"
    assert metrics["eval/a/pass_at_2"] == 1.0


def test_the_deciding_function_says_what_is_right() -> None:
    # A length penalty lowers right rewards below 1; a format reward lifts wrong ones above.
    metrics = accuracy_metrics("a", [0.97, 1.2, 0.3], 1, deciding=[1.0, 0.0, 0.0])
    assert values(metrics)["eval/a/accuracy"] == 1 / 3


def test_a_graded_function_without_a_right_response_is_named() -> None:
    assert not is_graded([0.0, 1.0, 0.7 + 0.2 + 0.1, 0.0]) and is_graded([0.0, 1.0, 0.5])
    assert is_graded([0.0, -1.0]) and is_graded([2.0])
    assert none_right("a", [0.25, 0.7 + 0.2 + 0.1], "length") == "", "1 but for rounding"
    assert none_right("a", [0.25, 0.512345], "length").startswith(
        "a: no response is right: length gave at most 0.5123, and a right response has at least 1. "
        "The figure of the evaluation is the mean reward. --reward.correct names the function"
    )


def test_a_k_beyond_the_samples_of_a_set_is_left_to_the_other_sets() -> None:
    for given in ([(2, 4)], []):
        metrics = accuracy_metrics("a", [1.0] * 4, 2, *given)
        assert metrics.keys() == {f"eval/a/{key}" for key in ("accuracy", "avg_at_2", "pass_at_2")}
