"""E8: recomputation of activations under replay changes no bit, in any order of backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from r3.policy import Policy
from r3.routing import RouterTap
from r3.runtime.device import Device
from r3.runtime.mesh import build_mesh
from r3.types import Batch
from tests.policies import (
    batches_of,
    experts_as_on_cuda,
    in_backward,
    policy_of,
    read_back,
    zero_gradients,
)
from tests.tiny import tiny_config


class LastFirst(RouterTap):
    """A tap with a fault: a recomputation takes the routes of the last forward, not its own."""

    kept: list[torch.Tensor]

    def get_replay_topk(self, scores: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        values, routes_NK = super().get_replay_topk(scores, topk, *args, **kwargs)
        if not in_backward():
            self.kept.append(routes_NK)
            return values, routes_NK
        routes_NK = self.kept.pop()
        return scores.gather(1, routes_NK), routes_NK


def recomputation(device: Device, *, model: str, experts: str, dtype: str) -> SimpleNamespace:
    """E8: micro-batches one by one, in flight together, out of order, and with a faulty tap.

    In flight together means: forward all, then backward in the same order, as the first stage of a
    pipeline does.

    Returns:
        Gradients with every kind of recomputation, against those without and one by one.
        dtype: of the policy.
        recomputed: router forwards inside backward passes, by kind of recomputation.
        difference: "KIND, ORDER" -> largest difference, relative to the largest gradient.
        messages: "KIND, ORDER" -> error, if there was one.
    """
    config = tiny_config(model, model={"experts": experts_as_on_cuda(experts), "dtype": dtype})
    mesh = build_mesh(device, config.parallel)
    gradients: dict[str, list[torch.Tensor]] = {}
    messages: dict[str, str] = {}
    recomputed: dict[str, int] = {}
    batch: Batch | None = None
    for recompute in ("none", "selective", "moe", "full"):
        policy = policy_of(
            device, mesh, replace(config, model=replace(config.model, recompute=recompute))
        )
        if batch is None:
            (batch,) = batches_of(mesh, policy.shape, (40, 40, 40, 40), micro_batch_tokens=40)
        policy.score(batch, mode="replay")  # a scoring pass leaves nothing behind
        with read_back(policy, backward=True) as maps:
            policy.forward_backward(batch)
        recomputed[recompute] = sum(map(len, maps.values()))
        gradients[f"{recompute}, one by one"] = _gradient_buffers(policy)
        _in_flight(policy, batch)
        gradients[f"{recompute}, in flight"] = _gradient_buffers(policy)
        orders: list[tuple[str, Sequence[int] | None, type[RouterTap]]] = [
            ("last first", (3, 2, 1, 0), RouterTap),
            ("shuffled", (1, 3, 0, 2), RouterTap),
            ("in one pass", None, RouterTap),
        ]
        if recompute != "selective":  # it computes no router again
            orders += [("twice", (0, 1, 2, 3, 3), RouterTap), ("stack", (0, 1, 2, 3), LastFirst)]
        for name, order, tap_class in orders:
            for tap in policy.replay.taps.values():
                tap.__class__, tap.kept = tap_class, []
            try:
                _in_flight(policy, batch, order=order)
            except (AssertionError, RuntimeError) as error:
                messages[f"{recompute}, {name}"] = str(error)
            gradients[f"{recompute}, {name}"] = _gradient_buffers(policy)
    expected = gradients["none, one by one"]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    return SimpleNamespace(
        dtype=dtype,
        micro_batches=len(batch) if batch else 0,
        recomputed=recomputed,
        difference={
            name: max(
                float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)
            )
            / largest
            for name, found in gradients.items()
        },
        messages=messages,
    )


def _gradient_buffers(policy: Policy) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in policy.memory.gradient_buffers()]


def _in_flight(policy: Policy, batch: Batch, *, order: Sequence[int] | None = (0, 1, 2, 3)) -> None:
    """Forward all four micro-batches, then backward in this order; None: in one backward pass."""
    from r3.layers import local_tokens, packed_params
    from r3.policy import NONE_MADE, policy_loss

    zero_gradients(policy)
    with policy.replay.schedule("replay", training=True):
        losses = []
        for micro_batch in batch:
            tokens = local_tokens(micro_batch, policy.mesh.cp, policy.device.torch)
            captured_N = tokens.captured_N
            policy.replay.load(tokens.routed_experts_NLK, captured_N, rows=int(captured_N.sum()))
            logprobs_N, _ = policy.wrapped[0](
                tokens.tokens_N[None],
                tokens.positions_N[None],
                None,
                labels=tokens.targets_N[None],
                packed_seq_params=packed_params(micro_batch.cu_seqlens, policy.device.torch),
            )
            loss, _ = policy_loss(policy.config, tokens, policy.mesh.cp, logprobs_N, NONE_MADE)
            losses.append(loss)
        for loss in [sum(losses)] if order is None else [losses[i] for i in order]:
            loss.backward(retain_graph=True)
    for chunk in policy.wrapped:
        chunk.finish_grad_sync()
