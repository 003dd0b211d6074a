"""How often ranks tell each other how much they exchange: planned, without a plan, and live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from r3 import extras
from r3.runtime.device import Device
from r3.types import Batch, MicroBatch
from tests.errors import message_of
from tests.policies import batches_of, build, experts_as_on_cuda
from tests.tiny import tiny_config
from tests.wrong_routes import patched


def plans(device: Device, *, model: str, experts: str) -> SimpleNamespace:
    """Passes with full recomputation, so that recomputations need the sizes, too.

    Returns:
        One rank of two that share experts.
        micro_batches, layers: numbers of micro-batches and of MoE layers.
        exchanges: exchanges of the sizes of a layer in one pass, by kind of pass.
        same: whether loss and gradients are the same bits with and without a plan.
        message: error of a pass whose plan has the sizes of other layers.
        other_tokens: error of one whose plan is made of the same routes, but those of other tokens.
    """
    kind = experts_as_on_cuda(experts)
    sections = {"experts": kind, "recompute": "full"}
    _, policy = build(device, tiny_config(model, parallel={"ep": 2}, model=sections))
    (batch,) = batches_of(policy.mesh, policy.shape, micro_batch_tokens=64)
    if device.rank:  # ranks need not have the same rows without routes
        batch = _rows_lost(batch)
    exchanges: dict[str, int] = {}

    def count(name: str, run: Callable[[], Any]) -> Any:
        exchanges[name] = 0

        def counted(exchange: Any) -> Any:
            def counting(*args: Any) -> Any:
                exchanges[name] += 1
                return exchange(*args)

            return counting

        with patched(extras.dispatch().TokenDispatcher, "_exchange_sizes", counted):
            return run()

    def gradients() -> list[torch.Tensor]:
        loss = policy.forward_backward(batch)["loss/total"]
        buffers = [buffer.clone() for buffer in policy.memory.gradient_buffers()]
        return [torch.tensor(loss.total), *buffers]

    planned = count("replay", gradients)
    count("live", lambda: policy.score(batch, mode="live"))
    plan = policy.replay.plan
    assert plan is not None
    policy.replay.plan = None
    unplanned = count("replay without a plan", gradients)
    policy.replay.plan = lambda routes: plan(routes)[::-1]
    message = message_of(lambda: policy.forward_backward(batch), AssertionError)
    policy.replay.plan = lambda routes: plan(list(map(_in_other_order, routes)))
    other_tokens = message_of(lambda: policy.forward_backward(batch), AssertionError)
    return SimpleNamespace(
        micro_batches=len(batch),
        layers=len(policy.replay.layers),
        exchanges=exchanges,
        same=all(torch.equal(one, other) for one, other in zip(planned, unplanned, strict=True)),
        message=message,
        other_tokens=other_tokens,
    )


def _in_other_order(routes_NK: torch.Tensor) -> torch.Tensor:
    """The last token's route first, but for tokens without a route."""
    changed_NK, known_N = routes_NK.clone(), routes_NK[:, 0] >= 0
    changed_NK[known_N] = routes_NK[known_N].flip(0)
    return changed_NK


def _rows_lost(batch: Batch) -> Batch:
    """Every fifth row of the last layer has no route, nor has the last row of a sequence."""

    def lost(micro_batch: MicroBatch) -> MicroBatch:
        routes_NLK = micro_batch.routed_experts_NLK.clone()
        routes_NLK[::5, -1] = -1
        return replace(micro_batch, routed_experts_NLK=routes_NLK)

    return tuple(map(lost, batch))
