"""E4 and E7: passes of one policy, old and new, live and replayed, and what they report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch

from r3.metrics import Mean, mismatch
from r3.policy import Passes, Policy, policy_loss
from r3.routing import routing_metrics
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from r3.tools import part_of
from r3.types import Batch
from tests.errors import message_of
from tests.policies import (
    Parts,
    batches_of,
    build,
    one_update,
    policy_of,
    read_back,
    routing_map,
    step_rewards,
    train_step,
    watch_scores,
)
from tests.tiny import tiny_config


def consistency(device: Device, *, model: str, ep: int) -> SimpleNamespace:
    """E7: the first update against the old pass: replay in both, in one, with recorded routes.

    Returns:
        Old passes by mode, and four updates with routes that were recorded before the first.
        agreement: share of slots whose live route is the recorded one, by update.
        kept_routes: whether a forward after each update still uses the recorded routes.
        The first update, compared with the pass before it that scored old log-probabilities.
        tokens: loss tokens.
        off_by: largest |ratio - 1|.
        clipped: clipped tokens.
        agreed, slots: slots of agreeing routes, and all.
    """
    mesh, policy = build(device, tiny_config(model, parallel={"ep": ep}))
    (batch,) = batches_of(mesh, policy.shape, micro_batch_tokens=96)
    ratios: list[torch.Tensor] = []

    def watched(*given: Any, number: int, **more: Any) -> Any:
        _, tokens, _, logprobs_N, passes = given
        now_N = logprobs_N.detach()
        old_N = passes.old[number] if passes.old else now_N
        ratios.append((now_N - old_N).exp()[tokens.loss_mask_N > 0])
        return policy_loss(*given, number=number, **more)

    old_passes = {}
    for old_mode in ("replay", "live", "record"):
        scores = policy.score(batch, mode=old_mode)
        recorded = scores.ledger.recorded if old_mode == "record" else None
        ratios.clear()
        passes = Passes(old=scores.logprobs, recorded=recorded)
        metrics = policy.forward_backward(batch, passes, loss=watched)
        ratio = torch.cat(ratios)
        old_passes[old_mode] = SimpleNamespace(
            tokens=len(ratio),
            off_by=float((ratio - 1).abs().max()),
            clipped=metrics["loss/clip_frac"].total,
            agreed=metrics["routing/agreement"].total,
            slots=metrics["routing/agreement"].count,
        )
    # Several updates with routes recorded before the first: the router moves away from them, and
    # the forward pass keeps them.
    recorded = policy.score(batch, mode="record").ledger.recorded
    agreement, kept_routes = [], []
    for _ in range(4):
        _, metrics = one_update(policy, batch, Passes(recorded=recorded), total_updates=100)
        agreement.append(metrics["routing/agreement"].total / metrics["routing/agreement"].count)
        kept_routes.append(_keeps(policy, batch, recorded))
    return SimpleNamespace(old_passes=old_passes, agreement=agreement, kept_routes=kept_routes)


def _keeps(policy: Policy, batch: Batch, recorded: Sequence[torch.Tensor]) -> bool:
    """Whether a forward with these routes sends every token to their experts."""
    with read_back(policy) as maps:
        policy.score(batch, mode="replay", recorded_routes=recorded)
    layers = [layer for layer in policy.replay.moe_layers if layer in policy.replay.taps]
    return all(
        torch.equal(maps[layer][i], routing_map(routes_NLK[:, position], maps[layer][i].shape[1]))
        for position, layer in enumerate(layers)
        for i, routes_NLK in enumerate(recorded)
    )


def modes(device: Device, *, model: str) -> SimpleNamespace:
    """Make one step per replay mode, with the reference replayed or not; then an accident.

    Returns:
        Reports by replay mode, and an accident.
        What one step reports in a replay mode.
        scored: (mode, micro-batches) of every scoring pass.
        sizes: micro-batches of every update.
        row: metrics of the step.
        agreement_slots: slots behind `routing/agreement`.
        agreement, all_slots: the same, measured before the step.
        k3_ratio: live k3 / replayed k3 of the sample, scored alone before the step.
        whole_k3_ratio: the same of the whole micro-batch.
    """
    config = tiny_config(
        model, model={"recompute": "full"}, algo={"kl_coef": 0.1}, train={"lr": 0.02}
    )
    mesh = build_mesh(device, config.parallel)
    nothing_R = torch.zeros(0)
    reports: dict[str, SimpleNamespace] = {}
    for name, replay, updates in (
        ("off", {"mode": "off"}, 2),
        ("r2", {"mode": "r2"}, 2),
        ("r3", {"mode": "r3"}, 2),
        ("r3, one update", {"mode": "r3", "reference": True, "shadow_frac": 0.3}, 1),
    ):
        setting = replace(
            config,
            replay=replace(config.replay, **{"shadow_frac": 1.0} | replay),
            train=replace(config.train, updates_per_step=updates),
        )
        policy = policy_of(device, mesh, setting)
        batches = batches_of(mesh, policy.shape, micro_batch_tokens=96, num_updates=updates)
        flat = [*chain.from_iterable(batches)]
        before = policy.score(flat, mode="replay").ledger
        size = math.ceil(setting.replay.shadow_frac * sum(one.num_tokens for one in flat))
        sample, _ = part_of(flat[1], size, multiple=mesh.length_multiples[0], turn=1)
        k3, whole_k3 = (
            [
                mismatch(*(torch.cat(c) for c in (s.logprobs, s.rollout_logprobs, s.loss_mask)))[
                    "k3"
                ]
                for s in (policy.score([tokens], mode=mode) for mode in ("live", "replay"))
            ]
            for tokens in (sample, flat[1])
        )
        scored, parts = watch_scores(policy), Parts()
        rewards = step_rewards(nothing_R, nothing_R)
        train_step(policy, batches, setting, rewards=rewards, step=2, report=parts.report)
        slots = [part.count for part in parts.by_name.get("routing/agreement", [])]
        reports[name] = SimpleNamespace(
            scored=[*scored],
            sizes=[len(batch) for batch in batches],
            row=parts.row(),
            agreement_slots=sum(slots),
            agreement=Mean.reduce([routing_metrics(before)["routing/agreement"]]),
            all_slots=sum(before.rows),
            k3_ratio=k3[0].total / k3[1].total,
            whole_k3_ratio=whole_k3[0].total / whole_k3[1].total,
        )
    return SimpleNamespace(reports=reports, accident=_accident(policy, batches[0]))


def _accident(policy: Policy, batch: Batch) -> SimpleNamespace:
    """Raise an error in the forward of an update's second micro-batch; then make further passes.

    Returns:
        What is left of a schedule that raised an error in the middle.
        message: of the error.
        state: of the last router's tap and of the replay.
        same: whether a pass after it gives the same log-probabilities, bit for bit.
        grad_norm: of an update after it.
    """
    before = policy.score(batch, mode="live").logprobs
    last = max(policy.replay.taps)
    calls = []

    def fail(_module: Any, _args: Any, _out: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("in the middle of a schedule")

    router = next(
        layer.mlp.router
        for layer in policy.chunks[0].decoder.layers
        if layer.layer_number - 1 == last
    )
    hook = router.register_forward_hook(fail)
    message = message_of(lambda: policy.forward_backward(batch), OSError)
    hook.remove()
    tap = policy.replay.taps[last]
    state = [tap.mode, tap.training, tap.forwards, tap.leftovers(), tap.counts, policy.replay.mode]
    after = policy.score(batch, mode="live").logprobs
    return SimpleNamespace(
        message=message,
        state=state,
        same=all(torch.equal(one, other) for one, other in zip(before, after, strict=True)),
        grad_norm=one_update(policy, batch, total_updates=10)[0].grad_norm,
    )
