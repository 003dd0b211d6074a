"""Experiment E6: deliberately wrong routes, with real rollouts of a real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from r3.policy import Policy
from r3.routing import Mode
from r3.runtime.device import Device
from r3.sync import State
from r3.types import MicroBatch, Rollout
from tests.engines import World
from tests.policies import figures_of, read_back, routing_map
from tests.tiny import tiny_config

DOSES = (0.0, 0.001, 0.01, 0.1, 1.0)


def dose_response(device: Device, *, engine_dtype: str, model: str = "") -> SimpleNamespace:
    """Measure k3 and agreement by share of corrupted slots, and for misaligned routes.

    Returns:
        Passes with live routes, by share of corrupted slots, by corrupted layer, by misalignment.
        Each has `figures` of the mismatch, captured `rows` per layer, rows per layer that `agreed`
        with live routing, rows that went to `wrong` experts, and corrupted rows per layer (`hits`).
    """
    config = tiny_config(
        model,
        engine={"dtype": engine_dtype},
        rollout={"prompts_per_step": 16, "max_response_tokens": 40},
    )
    world = World(device, config)
    world.sync(0)
    before = world.collect(0, step=1).rollouts
    collected = world.collect(0, step=0)
    world.residency.move(State.TRAIN)
    rollouts = collected.rollouts
    policy, shape = world.policy, world.task.shape

    def packed(changed: Sequence[Rollout]) -> tuple[MicroBatch, ...]:
        pairs = zip(collected.samples, changed, strict=True)
        samples = [replace(sample, rollout=rollout) for sample, rollout in pairs]
        return world.batch_of(replace(collected, samples=samples), 1024)

    def measure(micro_batches: Sequence[MicroBatch], mode: Mode = "replay") -> SimpleNamespace:
        with read_back(policy) as maps:
            scores = policy.score(micro_batches, mode=mode)
        dose = SimpleNamespace(figures=figures_of(scores), hits=[])
        if scores.ledger.counts is None:
            return dose
        wrong = 0
        for position, layer in enumerate(shape.moe_layers):
            for micro_batch, used in zip(micro_batches, maps[layer], strict=True):
                given = routing_map(micro_batch.routed_experts_NLK[:, position], shape.num_experts)
                wrong += int((used != given)[micro_batch.captured_N].sum())
        agreed = scores.ledger.counts[:, 0].tolist()
        dose.rows, dose.agreed, dose.wrong = scores.ledger.rows[0], agreed, wrong
        return dose

    def changed_by(change: Callable[[Rollout, int], np.ndarray]) -> tuple[MicroBatch, ...]:
        return packed(
            [
                replace(rollout, routed_experts=np.ascontiguousarray(change(rollout, i)))
                for i, rollout in enumerate(rollouts)
            ]
        )

    def of(other: Rollout, rollout: Rollout) -> np.ndarray:
        return np.resize(other.routed_experts, rollout.routed_experts.shape)

    correct = packed(rollouts)
    runners_up = _runners_up(policy, correct)
    layers = range(len(shape.moe_layers))

    def corrupted(share: float, only: int | None = None) -> SimpleNamespace:
        micro_batches, hits = [], []
        for micro_batch, next_best in zip(correct, runners_up, strict=True):
            hit = _hit(micro_batch, share)
            if only is not None:
                hit &= torch.arange(len(layers)) == only
            micro_batches.append(_corrupted(micro_batch, next_best, hit))
            hits.append(hit)
        dose = measure(micro_batches)
        dose.hits = torch.cat(hits).sum(0).tolist()
        return dose

    return SimpleNamespace(
        live=measure(correct, "live"),
        doses={str(share): corrupted(share) for share in DOSES},
        one_layer=[corrupted(0.1, only=layer) for layer in layers],
        misaligned={
            name: measure(changed_by(change))
            for name, change in {
                "shifted back": lambda rollout, i: np.roll(rollout.routed_experts, -1, axis=0),
                "shifted on": lambda rollout, i: np.roll(rollout.routed_experts, 1, axis=0),
                "layers swapped": lambda rollout, i: rollout.routed_experts[:, [1, 0, *layers[2:]]],
                "samples permuted": lambda rollout, i: of(
                    rollouts[(i + 1) % len(rollouts)], rollout
                ),
                "groups permuted": lambda rollout, i: of(
                    rollouts[(i + 4) % len(rollouts)], rollout
                ),
                "of the batch before": lambda rollout, i: of(before[i], rollout),
            }.items()
        },
    )


def _hit(micro_batch: MicroBatch, share: float) -> torch.Tensor:
    """Choose the captured slots [captured, L] that a dose corrupts; doses contain smaller ones."""
    layers = micro_batch.routed_experts_NLK.shape[1]
    rng = np.random.default_rng(micro_batch.rollout_ids[0])
    noise = torch.from_numpy(rng.random((micro_batch.num_tokens, layers)))
    return noise[micro_batch.captured_N] < share


def _corrupted(
    micro_batch: MicroBatch, next_best_NLK: torch.Tensor, hit: torch.Tensor
) -> MicroBatch:
    """Swap the least likely expert of each hit slot for the likeliest that is not chosen."""
    routes_NLK = micro_batch.routed_experts_NLK.clone()
    captured_N = micro_batch.captured_N
    mine = routes_NLK[captured_N]
    routes_NLK[captured_N] = torch.where(
        hit[..., None], next_best_NLK[captured_N].to(mine.dtype), mine
    )
    return replace(micro_batch, routed_experts_NLK=routes_NLK)


def _runners_up(policy: Policy, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Return routes [N, L, K] with the rank-K expert swapped for rank K + 1, by live logits."""
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in policy.replay.taps}
    routers = {
        layer.layer_number - 1: layer.mlp.router for layer in policy.chunks[0].decoder.layers
    }
    gatings = {layer: router.gating for layer, router in routers.items()}

    def watch(layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def gating(hidden: torch.Tensor) -> torch.Tensor:
            logits = gatings[layer](hidden)
            seen[layer].append(logits.detach().flatten(0, 1))
            return logits

        return gating

    for layer, router in routers.items():
        router.gating = watch(layer)
    policy.score(micro_batches, mode="replay")
    for layer, router in routers.items():
        router.gating = gatings[layer]
    swapped = []
    for i, micro_batch in enumerate(micro_batches):
        layers = []
        for position, layer in enumerate(policy.shape.moe_layers):
            logits_NE = seen[layer][i]
            routes_NK = micro_batch.routed_experts_NLK[:, position].long()
            mine = routing_map(routes_NK, policy.shape.num_experts)
            weakest = logits_NE.masked_fill(~mine, torch.inf).argmin(-1, keepdim=True)
            strongest_left = logits_NE.masked_fill(mine, -torch.inf).argmax(-1, keepdim=True)
            layers.append(torch.where(routes_NK == weakest, strongest_left, routes_NK))
        swapped.append(torch.stack(layers, 1))
    return swapped
