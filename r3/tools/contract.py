"""Contract checks for losses and advantages, which run on any function of that kind.

    for finding in check_loss(ppo_clip):
        print(finding.claim, finding.fault)        # fault is "" if the claim holds

The unit tests run the checks on every built-in function. `python -m r3.check_loss` and
`train.py --check` run them on users' functions. A check calls the function on small examples of the
inputs that a run would give to it. A few milliseconds each, on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from queue import SimpleQueue

import torch
from torch import Tensor

from r3.algo.advantage import ADVANTAGES
from r3.algo.loss import LOSSES, Bounds, Loss, LossInputs, Sequences
from r3.config import AlgoConfig
from r3.tools.own_algorithm import advantage_fault, loss_fault, own_function
from r3.user_code.algorithm import Advantage, bounds_of

_LossOfInputs = Callable[[LossInputs], tuple[Tensor, Tensor]]

USUAL_BOUNDS = Bounds(low=0.2, high=0.28, cap=5.0)

# float32 rounds at 6e-8 relative. A function may add up a sequence's tokens in another order and
# take exp of the sum, which loses some ten of those; a wrong denominator changes tens of percent.
_CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        claim: what should hold, such as "returns one float32 loss per token".
        fault: what does not hold and how to fix it; "" if the claim holds.
        required: whether a run would be wrong otherwise. The others are only advice.
    """

    claim: str
    fault: str
    required: bool


class _Fault(Exception):
    """A claim does not hold."""


def check_loss(loss: Loss, bounds: Bounds = USUAL_BOUNDS) -> list[Finding]:
    """Give a loss to all checks of losses. What the loss raises passes through."""
    return _findings(
        LOSS_CHECKS, lambda check: check(lambda inputs: loss(inputs, bounds), example_inputs())
    )


def check_advantage(advantage: Advantage) -> list[Finding]:
    """Give an advantage to all checks of advantages. What it raises passes through."""
    return _findings(ADVANTAGE_CHECKS, lambda check: check(advantage))


def _findings(
    checks: Mapping[str, Callable[..., None]], run: Callable[[Callable[..., None]], None]
) -> list[Finding]:
    findings = []
    for claim, check in checks.items():
        fault = ""
        try:
            run(check)
        except _Fault as error:
            fault = str(error)
        findings.append(Finding(claim, fault, required=claim not in ADVICE))
        # The other checks use what a function returns, so its form comes first.
        if fault and len(findings) == 1:
            break
    return findings


# --- results: checked in every call of a run too ------------------------------------------------


def example_inputs() -> LossInputs:
    """Return a micro-batch of three sequences and a filler, as a run would make it.

    Prompts (5 tokens), the last position of a sequence and the filler (4 tokens) carry no loss.
    Policies differ by some tenths per token; the advantage is one number per sequence.
    """
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = (0, 17, 41, 60, 64)
    mask_N = torch.zeros(64)
    advantages_N = torch.zeros(64)
    for start, end, advantage in ((0, 17, 0.8), (17, 41, -1.3), (41, 60, 0.6)):
        mask_N[start + 5 : end - 1] = 1.0
        advantages_N[start:end] = advantage

    def near(logprobs_N: Tensor, distance: float) -> Tensor:
        return logprobs_N + distance * torch.randn(64, generator=generator)

    rollout_N = (-0.5 - 3 * torch.rand(64, generator=generator)) * mask_N
    old_N = near(rollout_N, 0.1)
    return LossInputs(
        logprobs_N=near(old_N, 0.2),
        old_logprobs_N=old_N,
        rollout_logprobs_N=rollout_N,
        advantages_N=advantages_N,
        loss_mask_N=mask_N,
        sequences=Sequences(cu_seqlens),
    )


def _tensors(inputs: LossInputs) -> dict[str, Tensor]:
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _gradient_N(loss: _LossOfInputs, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return a loss, its clipped tokens, and the gradient of the sum over loss tokens."""
    logprobs_N = inputs.logprobs_N.detach().clone().requires_grad_()
    loss_N, clipped_N = loss(replace(inputs, logprobs_N=logprobs_N))
    if not loss_N.requires_grad:
        raise _Fault(
            "the loss has no gradient, so nothing would be learned. Use inputs.logprobs_N without "
            ".detach(), .item() or torch.no_grad()"
        )
    total = (loss_N * inputs.loss_mask_N).sum()
    (gradient_N,) = torch.autograd.grad(total, logprobs_N, allow_unused=True)
    if gradient_N is None:
        gradient_N = torch.zeros_like(logprobs_N)
    return loss_N.detach(), clipped_N, gradient_N


def _select(inputs: LossInputs, rows: Tensor, sequences: Sequences) -> LossInputs:
    tensors = {name: tensor[rows] for name, tensor in _tensors(inputs).items()}
    return LossInputs(**tensors, sequences=sequences)


def _loss_result(loss: _LossOfInputs, inputs: LossInputs) -> None:
    if fault := loss_fault(loss(inputs), inputs):
        raise _Fault(fault)


def _loss_gradient(loss: _LossOfInputs, inputs: LossInputs) -> None:
    *_, gradient_N = _gradient_N(loss, inputs)
    if not bool((gradient_N != 0).any()):
        raise _Fault("the gradient is 0 at every token. Use inputs.logprobs_N in the loss")


def _loss_constants(loss: _LossOfInputs, inputs: LossInputs) -> None:
    others = {
        name: getattr(inputs, name).clone().requires_grad_()
        for name in ("old_logprobs_N", "rollout_logprobs_N")
    }
    loss_N, _ = loss(
        replace(inputs, logprobs_N=inputs.logprobs_N.clone().requires_grad_(), **others)
    )
    if not loss_N.requires_grad:
        return
    gradients = torch.autograd.grad(loss_N.sum(), list(others.values()), allow_unused=True)
    for name, gradient in zip(others, gradients, strict=True):
        if gradient is not None and bool((gradient != 0).any()):
            raise _Fault(
                f"a gradient would reach {name}. R3 passes it without one; to be safe write "
                f"inputs.{name}.detach()"
            )


def _loss_unchanged(loss: _LossOfInputs, inputs: LossInputs) -> None:
    before = {name: tensor.clone() for name, tensor in _tensors(inputs).items()}
    loss(inputs)
    for name, tensor in before.items():
        if not torch.equal(tensor, getattr(inputs, name)):
            raise _Fault(f"it changed {name}, which R3 uses afterwards. Make a new tensor instead")


def _loss_finite(loss: _LossOfInputs, inputs: LossInputs) -> None:
    on_N = inputs.on_N
    cases = {
        "at usual values": inputs,
        "without any loss token": replace(inputs, loss_mask_N=torch.zeros_like(inputs.loss_mask_N)),
    }
    for now, old in ((0.0, -900.0), (-900.0, 0.0)):
        cases[f"at log pi = {now:g} and log pi_old = log mu = {old:g}"] = replace(
            inputs,
            logprobs_N=inputs.logprobs_N.masked_fill(on_N, now),
            old_logprobs_N=inputs.old_logprobs_N.masked_fill(on_N, old),
            rollout_logprobs_N=inputs.rollout_logprobs_N.masked_fill(on_N, old),
        )
    for where, case in cases.items():
        loss_N, _, gradient_N = _gradient_N(loss, case)
        for what, values_N in (("loss", loss_N), ("gradient", gradient_N)):
            bad_N = ~torch.isfinite(values_N)
            if bool(bad_N.any()):
                token = int(torch.nonzero(bad_N)[0])
                kind = "a loss token" if bool(on_N[token]) else "a token without loss"
                raise _Fault(
                    f"{where} the {what} is {float(values_N[token])} at {kind}. Clamp log ratios "
                    "to +-20 before exp, and divide by counts.clamp(min=1). Tokens without loss "
                    "are multiplied by 0, which keeps inf and nan"
                )


def _loss_masked(loss: _LossOfInputs, inputs: LossInputs) -> None:
    off_N = ~inputs.on_N
    changed = replace(
        inputs,
        logprobs_N=inputs.logprobs_N.masked_fill(off_N, -0.1),
        # Far outside of any trust region.
        old_logprobs_N=inputs.old_logprobs_N.masked_fill(off_N, -300.0),
        rollout_logprobs_N=inputs.rollout_logprobs_N.masked_fill(off_N, -7.0),
        advantages_N=inputs.advantages_N.masked_fill(off_N, 5.0),
    )
    before_N, _, _ = _gradient_N(loss, inputs)
    after_N, clipped_N, gradient_N = _gradient_N(loss, changed)
    fix = "Multiply by inputs.loss_mask_N before you add up tokens"
    if not torch.equal(before_N[~off_N], after_N[~off_N]):
        raise _Fault(f"values at tokens without loss change the loss of others. {fix}")
    if bool((gradient_N[off_N] != 0).any()):
        raise _Fault(f"tokens without loss have a gradient. {fix}")
    if bool(clipped_N[off_N].any()):
        raise _Fault("clipped_N is True at tokens without loss. Return clipped_N & inputs.on_N")


def _loss_packing(loss: _LossOfInputs, inputs: LossInputs) -> None:
    borders = inputs.sequences.cu_seqlens
    pieces = [torch.arange(start, end) for start, end in pairwise(borders)]
    whole_N, _, whole_gradient_N = _gradient_N(loss, inputs)
    for order in ([2, 0, 3, 1], [0], [1], [2]):
        rows = torch.cat([pieces[i] for i in order])
        lengths = torch.tensor([0, *(len(pieces[i]) for i in order)])
        sequences = Sequences(tuple(lengths.cumsum(0).tolist()))
        loss_N, _, gradient_N = _gradient_N(loss, _select(inputs, rows, sequences))
        on_N = inputs.on_N[rows]
        for what, one_N, other_N in (
            ("loss", loss_N, whole_N[rows]),
            ("gradient", gradient_N, whole_gradient_N[rows]),
        ):
            if difference := _difference(one_N[on_N], other_N[on_N]):
                raise _Fault(
                    f"a token's {what} depends on the other sequences of its micro-batch: "
                    f"{difference}. Do not take means or counts over all tokens: R3 divides by "
                    "those of the whole update. inputs.sequences.sum_and_count_N adds up each "
                    "sequence alone"
                )


def _loss_ranks(loss: _LossOfInputs, inputs: LossInputs) -> None:
    """Two threads stand for two ranks of context parallelism, each with half of every sequence."""
    borders = inputs.sequences.cu_seqlens
    halves: tuple[list[int], list[int]] = ([], [])
    for start, end in pairwise(borders):
        for rank in (0, 1):
            halves[rank].extend(range(start + rank, end, 2))
    # The rows of a rank before each border: rank 0 has the first row of every sequence.
    borders_of = [tuple(sum(row < border for row in half) for border in borders) for half in halves]
    mail: tuple[SimpleQueue[Tensor | None], ...] = (SimpleQueue(), SimpleQueue())
    alone: list[int] = []  # ranks whose partner did not add up

    def run(rank: int) -> Tensor:
        def add_up(own: Tensor) -> Tensor:
            mail[1 - rank].put(own)
            other = mail[rank].get()
            if other is None:
                alone.append(rank)
                return own
            return own + other

        part = _select(inputs, torch.tensor(halves[rank]), Sequences(borders_of[rank], add_up))
        try:
            return loss(part)[0].detach()
        finally:
            mail[1 - rank].put(None)

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(run, (0, 1)))
    fix = "Add up sequences with inputs.sequences.sum_and_count_N, on every rank equally often"
    if alone:
        raise _Fault(f"only one of two ranks that share sequences added them up. {fix}")
    whole_N = loss(inputs)[0].detach()
    for rank in (0, 1):
        rows = torch.tensor(halves[rank])
        on_N = inputs.on_N[rows]
        if difference := _difference(results[rank][on_N], whole_N[rows][on_N]):
            raise _Fault(
                "a token's loss differs when two ranks have a half of each sequence "
                f"(parallel.cp 2): {difference}. {fix}"
            )


def _loss_on_policy(loss: _LossOfInputs, inputs: LossInputs) -> None:
    same = inputs.rollout_logprobs_N
    *_, gradient_N = _gradient_N(loss, replace(inputs, logprobs_N=same, old_logprobs_N=same))
    expected_N = -inputs.advantages_N * inputs.loss_mask_N
    if difference := _difference(gradient_N, expected_N):
        raise _Fault(
            "at pi = pi_old = mu the gradient is not -A, that of the policy gradient: "
            f"{difference}. The scale changes what train.lr means"
        )


def _difference(one: Tensor, other: Tensor) -> str:
    """Return two values that differ; "" if all are close."""
    far = ~torch.isclose(one, other, **_CLOSE)
    if not bool(far.any()):
        return ""
    at = int(torch.nonzero(far)[0])
    return f"{float(one[at]):.6g} instead of {float(other[at]):.6g}"


LOSS_CHECKS: dict[str, Callable[[_LossOfInputs, LossInputs], None]] = {
    "returns one float32 loss and one bool per token": _loss_result,
    "has a gradient with respect to inputs.logprobs_N": _loss_gradient,
    "leaves its inputs unchanged": _loss_unchanged,
    "is finite for any ratio, also at tokens without loss": _loss_finite,
    "tokens without loss have no influence and no gradient": _loss_masked,
    "does not depend on how sequences are packed": _loss_packing,
    "does not depend on how ranks share sequences": _loss_ranks,
    "has no gradient with respect to other policies": _loss_constants,
    "equals the policy gradient at pi = pi_old = mu": _loss_on_policy,
}


# --- advantages ---------------------------------------------------------------------------------


def example_rewards() -> tuple[Tensor, Tensor]:
    """Return rewards and groups as a run has them: float64, int64 labels.

    Groups have different sizes and are interleaved. One has a single rollout, one equal rewards.
    """
    generator = torch.Generator().manual_seed(0)
    groups_R = torch.randint(0, 6, (40,), generator=generator)
    # Small integers add up exactly in float64, in whatever order.
    rewards_R = torch.randint(0, 4, (40,), generator=generator).double()
    rewards_R[groups_R == 5] = 0.1
    return torch.cat([rewards_R, rewards_R[:1]]), torch.cat([groups_R, torch.tensor([6])])


def _advantages_R(advantage: Advantage, rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    result = advantage(rewards_R, groups_R)
    if fault := advantage_fault(result, rewards_R):
        raise _Fault(fault)
    return result


def _advantage_result(advantage: Advantage) -> None:
    _advantages_R(advantage, *example_rewards())


def _advantage_finite(advantage: Advantage) -> None:
    groups_R = torch.arange(6) // 2
    for rewards in ([0.1] * 6, [1e8 / 3] * 6, [0.0, 1e8, 0.0, -1e8, 0.0, 1e-8]):
        _advantages_R(advantage, torch.tensor(rewards, dtype=torch.float64), groups_R)
    _advantages_R(advantage, torch.tensor([0.7], dtype=torch.float64), torch.tensor([3]))


def _advantage_unchanged(advantage: Advantage) -> None:
    rewards_R, groups_R = example_rewards()
    advantage(rewards_R, groups_R)
    for name, now, before in zip(
        ("rewards_R", "groups_R"), (rewards_R, groups_R), example_rewards(), strict=True
    ):
        if not torch.equal(now, before):
            raise _Fault(f"it changed {name}, which R3 uses afterwards. Make a new tensor instead")


def _advantage_order(advantage: Advantage) -> None:
    rewards_R, groups_R = example_rewards()
    order = torch.randperm(len(rewards_R), generator=torch.Generator().manual_seed(1))
    expected_R = _advantages_R(advantage, rewards_R, groups_R)[order]
    shuffled_R = _advantages_R(advantage, rewards_R[order], groups_R[order])
    if difference := _difference(shuffled_R.double(), expected_R.double()):
        raise _Fault(
            f"a rollout's advantage depends on the order of the rollouts: {difference}. Find the "
            "rollouts of a group by groups_R, not by their place"
        )


def _advantage_labels(advantage: Advantage) -> None:
    rewards_R, groups_R = example_rewards()
    expected_R = _advantages_R(advantage, rewards_R, groups_R)
    renamed_R = _advantages_R(advantage, rewards_R, 1000 - 7 * groups_R)
    if difference := _difference(renamed_R.double(), expected_R.double()):
        raise _Fault(
            f"an advantage depends on the number of its group: {difference}. groups_R holds "
            "labels of any value; torch.unique(groups_R, return_inverse=True) numbers them"
        )


def _advantage_equal_rewards(advantage: Advantage) -> None:
    rewards_R, groups_R = torch.full((6,), 0.1, dtype=torch.float64), torch.arange(6) // 3
    advantages_R = _advantages_R(advantage, rewards_R, groups_R)
    if bool((advantages_R.abs() > 1e-6).any()):  # the mean of three 0.1 is not exactly 0.1
        raise _Fault(
            f"if all rewards are equal, advantages are {advantages_R.tolist()}, not 0: samples "
            "would be learned or unlearned although none is better"
        )


ADVANTAGE_CHECKS: dict[str, Callable[[Advantage], None]] = {
    "returns one floating-point number per rollout": _advantage_result,
    "is finite for equal rewards and single rollouts": _advantage_finite,
    "leaves its inputs unchanged": _advantage_unchanged,
    "does not depend on the order of rollouts": _advantage_order,
    "does not depend on the labels of groups": _advantage_labels,
    "is 0 if all rewards are equal": _advantage_equal_rewards,
}

# Claims that may fail on purpose: a run is well-defined without them.
ADVICE = {
    "has no gradient with respect to other policies",
    "equals the policy gradient at pi = pi_old = mu",
    "is 0 if all rewards are equal",
}


def run_contract(algo: AlgoConfig, role: str) -> list[Finding]:
    """Run the contract on the function that the settings name.

    Args:
        role: "loss" or "advantage".

    Raises:
        ConfigError: it cannot be loaded.
        AlgorithmError: it raised an error.
    """
    own = own_function(algo, role, checks=False) if role in algo.own_functions else None
    if role == "advantage":
        return check_advantage(own or ADVANTAGES[algo.advantage])
    return check_loss(own or LOSSES[algo.loss], bounds_of(algo))
