"""The contract of losses and advantages: built-in ones pass, and each check notices a mistake."""

import contextlib
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from r3.algo.advantage import ADVANTAGES
from r3.algo.loss import LOSSES, Bounds, LossInputs
from r3.check_loss import main
from r3.tools import (
    ADVANTAGE_CHECKS,
    ADVICE,
    LOSS_CHECKS,
    check_advantage,
    check_loss,
    example_inputs,
)
from tests.errors import Capsys
from tests.rows import write

Pair = tuple[Tensor, Tensor]


def clipped(inputs: LossInputs) -> Tensor:
    return torch.zeros_like(inputs.on_N)


def ratio(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs_N - inputs.old_logprobs_N.detach()).clamp(-20, 20).exp()


def plain(inputs: LossInputs, bounds: Bounds) -> Pair:
    """A loss with nothing wrong."""
    return -ratio(inputs) * inputs.advantages_N, clipped(inputs)


# Losses with one mistake each, by the claim that must fail. A mistake may break others too.


def unclamped(inputs: LossInputs, bounds: Bounds) -> Pair:
    ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N.detach()).exp()
    return -ratio_N * inputs.advantages_N, clipped(inputs)


def of_the_old_policy(inputs: LossInputs, bounds: Bounds) -> Pair:
    loss_N = -(inputs.logprobs_N - inputs.old_logprobs_N).clamp(-20, 20).exp()
    return loss_N * inputs.advantages_N, clipped(inputs)


def by_mean(inputs: LossInputs, mask_N: Tensor, least: int) -> Pair:
    """Weights by the mean ratio of a sequence over the tokens of a mask."""
    log_N = (inputs.logprobs_N - inputs.old_logprobs_N).clamp(-20, 20)
    total_N, count_N = inputs.sequences.sum_and_count_N(log_N, mask_N)
    weight_N = (total_N / count_N.clamp(min=least)).exp()
    return -weight_N * inputs.advantages_N * inputs.logprobs_N, clipped(inputs)


def in_place(inputs: LossInputs, bounds: Bounds) -> Pair:
    inputs.advantages_N.mul_(inputs.loss_mask_N)
    return plain(inputs, bounds)


def baseline_of_everything(inputs: LossInputs, bounds: Bounds) -> Pair:
    """Every token's gradient reaches all tokens, those without loss too."""
    loss_N = -inputs.advantages_N * inputs.logprobs_N
    return loss_N + 0.0 * loss_N + inputs.logprobs_N.mean(), clipped(inputs)


def own_sum(inputs: LossInputs, bounds: Bounds) -> Pair:
    """Adds up a sequence by its borders: only this rank's part of it."""
    log_N = ((inputs.logprobs_N - inputs.old_logprobs_N) * inputs.loss_mask_N).detach()
    weights = []
    borders = inputs.sequences.cu_seqlens
    for start, end in pairwise(borders):
        weights.append(log_N[start:end].sum().clamp(-20, 20).exp().expand(end - start))
    return -torch.cat(weights) * inputs.advantages_N * inputs.logprobs_N, clipped(inputs)


def sums_of_some_ranks(inputs: LossInputs, bounds: Bounds) -> Pair:
    """Ranks that call a different number of times would wait for each other without end."""
    if int(inputs.sequences.cu_seqlens[1]) == 8:  # the second rank's part of the first sequence
        inputs.sequences.sum_and_count_N(inputs.logprobs_N, inputs.loss_mask_N)
    return plain(inputs, bounds)


FORM = "returns one float32 loss and one bool per token"
MASKED = "tokens without loss have no influence and no gradient"
FINITE = "is finite for any ratio, also at tokens without loss"
RANKS = "does not depend on how ranks share sequences"
GRADIENT = "has a gradient with respect to inputs.logprobs_N"
# fmt: off
BROKEN_LOSSES: list[tuple[Callable[[LossInputs, Bounds], Any], str, str]] = [
    (lambda i, b: plain(i, b)[0], FORM, "it returned Tensor"),
    (lambda i, b: (plain(i, b)[0].mean(), clipped(i)), FORM, r"\[\], and there are 64 tokens"),
    (lambda i, b: (plain(i, b)[0].double(), clipped(i)), FORM, r"loss_N is torch\.float64"),
    (lambda i, b: (plain(i, b)[0], clipped(i).float()), FORM, r"clipped_N is torch\.float32"),
    (lambda i, b: (0.0, clipped(i)), FORM, "loss_N is float"),
    (lambda i, b: (plain(i, b)[0].detach(), clipped(i)), GRADIENT, "without .detach"),
    (lambda i, b: (0.0 * i.logprobs_N, clipped(i)), GRADIENT, "0 at every token"),
    (in_place, "leaves its inputs unchanged", "it changed advantages_N"),
    (unclamped, FINITE, "log pi = 0 and log pi_old = log mu = -900 the loss is .*inf"),
    # The filler has no loss tokens: 0 / 0.
    (lambda i, b: by_mean(i, i.loss_mask_N, 0), FINITE, "nan at a token without loss"),
    (lambda i, b: by_mean(i, i.loss_mask_N**0, 1), MASKED, "change the loss of others"),
    (baseline_of_everything, MASKED, "loss of others|have a gradient"),
    (lambda i, b: (plain(i, b)[0], ratio(i) > 1.2), MASKED, "clipped_N is True"),
    (lambda i, b: (plain(i, b)[0] / i.loss_mask_N.sum().clamp(min=1), clipped(i)),
     "does not depend on how sequences are packed", "instead of"),
    (own_sum, RANKS, r"parallel\.cp 2"),
    (sums_of_some_ranks, RANKS, "only one of two ranks"),
    (of_the_old_policy, "has no gradient with respect to other policies", "old_logprobs_N"),
    (lambda i, b: (2 * plain(i, b)[0], clipped(i)),
     "equals the policy gradient at pi = pi_old = mu", "train.lr"),
]
# fmt: on


def faults_of(findings: Any, claim: str, words: str) -> None:
    """Require that the claim failed with these words."""
    (found,) = [each for each in findings if each.fault and each.claim == claim]
    assert re.search(words, found.fault) and found.required == (claim not in ADVICE)


@pytest.mark.parametrize("name", LOSSES)
def test_built_in_losses_pass(name: str) -> None:
    findings = check_loss(LOSSES[name])
    assert [each.claim for each in findings] == list(LOSS_CHECKS)
    assert [each for each in findings if each.fault] == []


@pytest.mark.parametrize(("loss", "claim", "words"), BROKEN_LOSSES)
def test_broken_loss_is_noticed(loss: Any, claim: str, words: str) -> None:
    faults_of(check_loss(loss), claim, words)


def test_every_claim_about_losses_has_a_broken_loss() -> None:
    assert {claim for _, claim, _ in BROKEN_LOSSES} == LOSS_CHECKS.keys()
    assert [each for each in check_loss(plain) if each.fault] == [], "their common part is right"


def test_example_has_what_a_run_has() -> None:
    """Prompts, a filler and the last position of each sequence carry no loss."""
    inputs = example_inputs()
    last = [end - 1 for end in inputs.sequences.cu_seqlens[1:]]
    assert not inputs.on_N[last].any() and not inputs.on_N[60:].any()
    assert not inputs.on_N[:5].any() and inputs.on_N.sum() == 42
    assert (inputs.rollout_logprobs_N[~inputs.on_N] == 0).all()


# --- advantages ---------------------------------------------------------------------------------


def zero_over_zero(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    if len(rewards_R) < 10:
        return (rewards_R - rewards_R.mean()) / (rewards_R - rewards_R.mean()).abs().max()
    return rewards_R


ONE = "returns one floating-point number per rollout"
BROKEN_ADVANTAGES: list[tuple[Callable[[Tensor, Tensor], Any], str, str]] = [
    (lambda r, g: r.tolist(), ONE, "it returned list"),
    (lambda r, g: r.long(), ONE, r"returned torch\.int64"),
    (lambda r, g: r.sum(), ONE, r"shape \[\] for 41"),
    (zero_over_zero, "is finite for equal rewards and single rollouts", "rollout 0 is nan"),
    (lambda r, g: r.sub_(r.mean()), "leaves its inputs unchanged", "it changed rewards_R"),
    (lambda r, g: r - r.roll(1), "does not depend on the order of rollouts", "not by their place"),
    (lambda r, g: r * g, "does not depend on the labels of groups", "labels of any value"),
    (lambda r, g: r, "is 0 if all rewards are equal", "although none is better"),
]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_built_in_advantages_pass(name: str) -> None:
    findings = check_advantage(ADVANTAGES[name])
    assert [each.claim for each in findings] == list(ADVANTAGE_CHECKS)
    assert [each for each in findings if each.fault] == []


@pytest.mark.parametrize(("advantage", "claim", "words"), BROKEN_ADVANTAGES)
def test_broken_advantage_is_noticed(advantage: Any, claim: str, words: str) -> None:
    faults_of(check_advantage(advantage), claim, words)


def test_every_claim_about_advantages_has_a_broken_one() -> None:
    assert {claim for _, claim, _ in BROKEN_ADVANTAGES} == ADVANTAGE_CHECKS.keys()


# --- the command --------------------------------------------------------------------------------

MINE = """
def good(inputs, bounds, scale=1.0):
    ratio = (inputs.logprobs_N - inputs.old_logprobs_N.detach()).clamp(-20, 20).exp()
    return -scale * ratio * inputs.advantages_N, ratio.isnan()

def averaged(inputs, bounds):
    loss, clipped = good(inputs, bounds)
    return loss / inputs.loss_mask_N.sum().clamp(min=1), clipped

def breaks(inputs, bounds):
    return inputs.nothing

def centred(rewards_R, groups_R):
    return rewards_R - rewards_R.mean()
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ppo_clip"], 0, "no check of 9 failed"),
        (["grpo", "--advantage"], 0, "no check of 6 failed"),
        (["{file}:good"], 0, "no check of 9 failed"),
        (["{file}:good", "--args", "scale=2.0"], 0, "note  equals the policy gradient"),
        (["{file}:centred", "--advantage"], 0, "no check of 6 failed"),
        (["{file}:averaged"], 1, "FAILS does not depend on how sequences are packed"),
        (["{file}:breaks"], 1, "AttributeError: 'LossInputs' object has no attribute 'nothing'"),
        (["{file}:breaks"], 1, "in breaks: return inputs.nothing"),
        (["{file}:good", "--args", "tau=1"], 2, "has no parameter 'tau'. Fix: loss takes scale"),
        (["{file}:good", "--args", "tau"], 2, "algo.args = ('tau',): must be key=value"),
        (["ppo_clip", "--args", "tau=1"], 2, "the built-in ppo_clip takes none"),
        (["ppo_klip"], 2, "must be one of ppo_clip, pg"),
        (["absent.py:f", "--advantage"], 2, "there is no file absent.py"),
    ],
)
def test_command(words: list[str], code: int, said: str, tmp_path: Path, capsys: Capsys) -> None:
    file = write(tmp_path, MINE, name="mine.py")
    end = contextlib.nullcontext() if code == 0 else pytest.raises(SystemExit, match=f"^{code}$")
    with end:
        main([word.format(file=file) for word in words])
    output = capsys.readouterr()
    assert said in output.out + output.err
