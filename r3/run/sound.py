"""Weights and Adam moments that a run may continue from: finite, and not absurdly large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from r3.policy import Policy
from r3.runtime.mesh import Axis

# Weights of trained transformers stay below 1e3; beyond a hundred times that, logits are noise.
_LARGEST_WEIGHT = 1e5
# Gradients are clipped to a norm near 1. Unclipped ones beyond 1e10 come from such weights.
_LARGEST_MOMENT = {"exp_avg": 1e10, "exp_avg_sq": 1e20}
_SHOWN = 3


class UnsoundError(FloatingPointError):
    """Weights or moments that are not finite, or far too large."""


def require_sound(policy: Policy, world: Axis, when: str) -> None:
    """Check this rank's weights and moments. All ranks must call.

    Args:
        when: for the message, such as "after step 5".

    Raises:
        UnsoundError: on all ranks, if a tensor of one rank is not finite or too large.
    """
    with policy.memory.optimizer_on_device():
        mine = [f"rank {world.rank}: {fault}" for fault in unsound(_tensors(policy))]
    if everything := [fault for faults in world.all_gather_object(mine) for fault in faults]:
        more = f" and {len(everything) - _SHOWN} more" if len(everything) > _SHOWN else ""
        raise UnsoundError(
            f"the policy is broken {when}: {'; '.join(everything[:_SHOWN])}{more}. Nothing was "
            "saved or exported. Fix: lower train.lr or set train.clip_grad, then start again: the "
            "run resumes from its newest checkpoint"
        )


def unsound(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Name the tensors with values that are not finite or beyond the limit of their kind."""
    for name, tensor in tensors:
        if not tensor.numel():
            continue
        # aminmax returns nan if any value is nan, and needs no copy of the tensor.
        smallest, largest = (float(value) for value in torch.aminmax(tensor))
        limit = _LARGEST_MOMENT.get(name.rpartition("/")[2], _LARGEST_WEIGHT)
        lowest = 0.0 if name.endswith("/exp_avg_sq") else -limit
        if not (lowest <= smallest and largest <= limit):  # also catches nan
            yield f"{name} has values from {smallest:.3g} to {largest:.3g}"


def _tensors(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    for i, chunk in enumerate(policy.chunks):
        for name, parameter in chunk.named_parameters():
            yield f"weights {i}/{name}", parameter.detach()
    for name, tensor in policy.memory.optimizer_tensors():
        yield f"optimizer {name}", tensor
