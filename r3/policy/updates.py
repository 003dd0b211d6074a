"""The updates of one step: which forward and backward passes run, and with which routes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import torch

from r3 import extras
from r3.algo.loss import kl_penalty
from r3.config import AlgoConfig, Config
from r3.metrics.reduce import Mean, mismatch
from r3.policy.objective import NONE_MADE, Passes, PolicyLoss, policy_loss
from r3.policy.policy import Policy
from r3.policy.scoring import TokenScores
from r3.routing.ledger import routing_metrics
from r3.routing.replay import Mode
from r3.types import Batch, MicroBatch

ReplayMode = Literal["off", "r2", "r3"]  # replay.mode
Panel = Callable[..., Mapping[str, Any]]

# Metrics that compare live routes with replayed ones: reported for the step's first pass with
# replay only, at the rollout's weights.
_COMPARISON = ("routing/agreement", "routing/margin", "routing/replaced_frac", "routing/router_")

# Metrics that are reported for each epoch too.
_OF_EPOCHS = ("loss/total", "loss/clip_frac", "policy/entropy", "policy/kl_old")

# replay.mode -> mode of the pass that scores old log-probabilities.
_OLD_PASS: dict[ReplayMode, Mode] = {"off": "live", "r2": "record", "r3": "replay"}


def earlier_passes(
    policy: Policy,
    batches: Sequence[Batch],
    config: Config,
    *,
    report: Callable[[Mapping[str, Any]], None],
    sampled: bool = True,
) -> tuple[Passes, dict[int, float]]:
    """Make the passes that the updates of a step need before the first one. All ranks must call.

    Old log-probabilities are scored before the first update if
      - there are several batches (all but the first: later updates have other weights)
      - routes are recorded, not captured (R2)
      - KL is subtracted from the reward
    Otherwise the first update's own forward is the old policy, and later epochs use what it
    computed. With algo.correction bypass the engine's log-probabilities stand for the old policy's
    everywhere, and only R2 scores them. The reference policy scores all batches before the first
    update, because it uses the policy's memory. So do teachers.

    Args:
        policy: what is trained.
        batches: this rank's share of every update.
        config: the run's settings.
        report: receives partials of metrics.
        sampled: False if rows are learned (sft), which no older policy has sampled.

    Returns:
        What the passes found for all micro-batches, and the KL of each rollout of the step, if it
        is to be taken from its reward.
    """
    algo, mode, passes = config.algo, _mode(policy, config), NONE_MADE
    flat = [*chain.from_iterable(batches)]
    bypasses = algo.correction == "bypass"
    scores_first = _scores_first(algo, mode)
    if scores_first or (len(batches) > 1 and not bypasses and sampled):
        unscored = 0 if scores_first else len(batches[0])
        scores = policy.score(flat[unscored:], mode=_OLD_PASS[mode])
        recorded = scores.ledger.recorded if mode == "r2" else None
        passes = Passes(old=(None,) * unscored + scores.logprobs, recorded=recorded)
        report(
            {f"mismatch/{name}": part for name, part in panel_of(policy, scores, mismatch).items()}
        )
        report(routing_metrics(scores.ledger))
    if algo.kl_coef:
        replays = config.replay.reference and mode != "off"
        with policy.reference_weights():
            reference = policy.score(
                flat, mode="replay" if replays else "live", recorded_routes=passes.recorded
            )
        if not algo.takes_kl_from_reward:
            passes = replace(passes, reference=reference.logprobs)
    if policy.teachers:
        passes = replace(passes, teacher=policy.teachers.logprobs(flat))
    if not algo.takes_kl_from_reward or not sampled:
        return passes, {}
    old = reference.rollout_logprobs if bypasses else scores.logprobs
    return passes, kl_of_rollouts(policy, batches, old, reference, algo, report)


def train_on(
    policy: Policy,
    batches: Sequence[Batch],
    passes: Passes,
    config: Config,
    *,
    step: int,
    report: Callable[[Mapping[str, Any]], None],
    loss: PolicyLoss = policy_loss,
    sampled: bool = True,
    on_micro_batch: Callable[[], None] = lambda: None,
) -> None:
    """Make the step's updates: in each epoch, one per batch. All ranks must call.

    Every epoch makes the same updates in the same order, with the same micro-batches, advantages
    and routes.

    Args:
        policy: what to train.
        batches: this rank's share of every update, with advantages.
        passes: what `earlier_passes` found.
        config: the run's settings.
        step: number of the step, from 1.
        report: receives partials of metrics.
        loss: of a micro-batch.
        sampled: see `earlier_passes`.
        on_micro_batch: called after every micro-batch of an update, for progress.
    """
    mode = _mode(policy, config)
    every = config.replay.shadow_every if mode == "r3" else 0
    first = batches[0]  # its update's own forward is at the rollout's weights
    sample = None
    if every and (step - 1) % every == 0:
        total = sum(one.num_tokens for batch in batches for one in batch)
        tokens = math.ceil(config.replay.shadow_frac * total)
        sample = extras.shadow_sample(policy, first, tokens, turn=(step - 1) // every)
    # Micro-batches whose old log-probabilities are those of their own update.
    unscored = 0 if _scores_first(config.algo, mode) else len(first)
    # Whether live and replayed routes were compared, at the rollout's weights.
    compared = mode == "r3" and not unscored

    borders = list(pairwise(accumulate(map(len, batches), initial=0)))
    of_first: list[torch.Tensor] = []  # old log-probabilities that the first update computes

    def keep(number: int, tokens: MicroBatch, logprobs_N: torch.Tensor) -> None:
        of_first.append(logprobs_N)
        if sample:
            sample.keep(number, tokens, logprobs_N)

    epochs = config.train.epochs_per_step
    for number in range(epochs * len(batches)):
        epoch, place = divmod(number, len(batches))
        metrics = policy.forward_backward(
            batches[place],
            passes.part(slice(*borders[place])),
            loss=loss,
            first=number == 0,
            on_micro_batch=on_micro_batch,
            on_scores=keep if number == 0 else lambda *_: None,
        )
        update = policy.step(config.train.total_updates)
        if number == 0 and epochs > 1 and unscored:
            passes = replace(passes, old=(*of_first, *(passes.old or ())[unscored:]))
        if number == 0 and sample:
            report(sample.metrics(policy))
        routing = {key: part for key, part in metrics.items() if key.startswith(_COMPARISON)}
        report({key: part for key, part in metrics.items() if not (compared and key in routing)})
        compared = sampled
        if epochs * len(batches) > 1 and "routing/agreement" in routing:
            report({f"routing/agreement_update_{number + 1}": routing["routing/agreement"]})
        if epochs > 1:
            names = [name for name in _OF_EPOCHS if name in metrics]
            report({f"{name}_epoch_{epoch + 1}": metrics[name] for name in names})
        if policy.mesh.world.rank == 0:  # it is the same on every rank: one reports it
            report({f"optim/{name}": Mean(value, 1.0) for name, value in asdict(update).items()})


def _mode(policy: Policy, config: Config) -> ReplayMode:
    """replay.mode; "off" without routers."""
    return config.replay.mode if policy.shape.moe_layers else "off"


def _scores_first(algo: AlgoConfig, mode: ReplayMode) -> bool:
    """Whether the first update's batch too is scored before: to record routes (R2), or for KL in
    the reward.
    """
    return mode == "r2" or (algo.takes_kl_from_reward and algo.correction != "bypass")


def kl_of_rollouts(
    policy: Policy,
    batches: Sequence[Batch],
    old: Sequence[torch.Tensor],
    reference: TokenScores,
    algo: AlgoConfig,
    report: Callable[[Mapping[str, Any]], None],
) -> dict[int, float]:
    """Sum the KL of every rollout of the step, at the rollout's weights. All ranks must call.

    The sum is over the sampled tokens of the response, with or without loss: a filtered response
    (`overlong_filter`) counts in its group's baseline.

    Args:
        policy: has the layout of the ranks.
        batches: this rank's share of every update.
        old: log-probabilities of the old policy, per micro-batch.
        reference: scores of the reference policy.
        algo: names the estimator.
        report: receives the mean KL.
    """
    flat = [*chain.from_iterable(batches)]
    own: list[tuple[int, float]] = []
    # Other ranks have the same tokens or none. Under context parallelism every rank has a part of
    # each response.
    if policy.reports:
        tokens = 0.0
        for micro_batch, old_N, reference_N, mask_N in zip(
            flat, old, reference.logprobs, reference.sampled, strict=True
        ):
            kl_N = kl_penalty(old_N, reference_N, estimator=algo.kl_estimator).double() * mask_N
            lengths = [
                (end - start) // policy.mesh.cp.size
                for start, end in pairwise(micro_batch.cu_seqlens)
            ]
            # one transfer
            sums = torch.stack([part_N.sum() for part_N in kl_N.split(lengths)]).tolist()
            own += [(i, kl) for i, kl in zip(micro_batch.rollout_ids, sums, strict=True) if i >= 0]
            tokens += float(mask_N.sum())
        report({"loss/kl_ref": Mean(total=sum(kl for _, kl in own), count=tokens)})
    everybody = [item for part in policy.mesh.world.all_gather_object(own) for item in part]
    summed: dict[int, float] = {}
    for index, kl in sorted(everybody):
        summed[index] = summed.get(index, 0.0) + kl
    return summed


def panel_of(policy: Policy, scores: TokenScores, panel: Panel) -> dict[str, Any]:
    """Return metrics over this rank's marked tokens: those that the present weights sampled."""
    if not policy.reports:
        return {}
    columns = (scores.logprobs, scores.rollout_logprobs, scores.compared, scores.positions)
    return dict(panel(*(torch.cat(column) for column in columns)))
