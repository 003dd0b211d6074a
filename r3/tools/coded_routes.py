"""Rollouts whose routes encode (layer, rollout, position), and a reader of what routers used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from r3.config import Config
from r3.models.shape import ModelShape
from r3.policy import Policy
from r3.runtime.mesh import Mesh
from r3.sync.rollouts import PackingSpec
from r3.tools.passes import shared_batch
from r3.types import Rollout

# small, so that every rank gets several micro-batches of several sequences
_MICRO_BATCH_TOKENS = 128
_ROLLOUTS_PER_RANK = 8


class CheckFailed(AssertionError):
    """A check failed; the message says what is wrong and where."""


def coded_experts(rollouts_N: np.ndarray, positions_N: np.ndarray, shape: ModelShape) -> np.ndarray:
    """Routes [N, L, K] that encode (layer, rollout, position): K distinct experts from a hash.

    Two codes are equal with probability 1 / C(E, K), so a path that mixes them up is found.
    """
    experts = np.arange(shape.num_experts, dtype=np.uint64)
    layers = np.array(shape.moe_layers, dtype=np.uint64)
    key = (
        rollouts_N.astype(np.uint64)[:, None, None] * np.uint64(0x9E3779B97F4A7C15)
        + positions_N.astype(np.uint64)[:, None, None] * np.uint64(0xC2B2AE3D27D4EB4F)
        + layers[:, None] * np.uint64(0x165667B19E3779F9)
        + experts * np.uint64(0x27D4EB2F165667C5)
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(key ^ (key >> np.uint64(31)), axis=-1)[..., : shape.topk]


def coded_rollouts(lengths: Sequence[int], shape: ModelShape) -> list[Rollout]:
    """Rollouts with coded routes; rollout i consists of token i + 1 only."""
    rollouts = []
    for index, length in enumerate(lengths):
        mask_T = np.ones(length, np.float32)
        mask_T[0] = 0
        rows = np.arange(length - 1)
        rollouts.append(
            Rollout(
                prompt_id=f"doctor:{index}",
                group=index // 2,
                sample_index=index % 2,
                tokens_T=np.full(length, index + 1, np.int64),
                loss_mask_T=mask_T,
                logprobs_T=-mask_T,
                routed_experts=coded_experts(np.full(length - 1, index), rows, shape).astype(
                    np.int16
                ),
                finish_reason="stop",
                policy_version=0,
                response="",
            )
        )
    return rollouts


@dataclass
class ReadBack:
    """Compares what the routers of this rank used with the code of the tokens they were given.

    Attributes:
        answered: layer -> (rollout, position) of every token whose experts were compared.
        wrong: layer -> number of compared tokens with other experts.
        first: description of the first wrong token.
    """

    shape: ModelShape
    mesh: Mesh
    lengths: Sequence[int]
    answered: dict[int, list[np.ndarray]] = field(default_factory=dict)
    wrong: dict[int, int] = field(default_factory=dict)
    first: str = ""
    _fed: tuple[np.ndarray, np.ndarray] | None = None

    @contextmanager
    def listening(self, policy: Policy) -> Iterator[None]:
        """Read back every forward of the policy inside the block."""
        hooks = []
        for chunk in policy.chunks:
            hooks.append(chunk.register_forward_pre_hook(self._on_tokens))
            for module in chunk.decoder.modules():
                if hasattr(module, "router_replay"):
                    hooks.append(module.register_forward_hook(self._on_routes))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _on_tokens(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        tokens_N, positions_N = (tensor[0].cpu().numpy() for tensor in arguments[:2])
        self._fed = tokens_N, positions_N

    def _on_routes(
        self, module: Any, _arguments: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        assert self._fed is not None, "a router ran before its model was given tokens"
        tokens_N, positions_N = self._fed
        routed_NE = output[1].cpu().numpy().astype(bool)
        rows = len(routed_NE)
        # sequence parallelism: this rank's routers see one slice
        if rows * self.mesh.tp.size == len(tokens_N):
            part = slice(self.mesh.tp.rank * rows, (self.mesh.tp.rank + 1) * rows)
            tokens_N, positions_N = tokens_N[part], positions_N[part]
        layer = module.layer_number - 1
        rollouts_N = tokens_N - 1  # -1: filler
        lengths_N = np.array([*self.lengths, 0])[rollouts_N]
        coded_N = positions_N < lengths_N - 1  # a sequence's last token has no route
        where_N2 = np.stack([rollouts_N, positions_N], 1)[coded_N]
        position_of = list(self.shape.moe_layers).index(layer)
        expected_NK = coded_experts(where_N2[:, 0], where_N2[:, 1], self.shape)[:, position_of]
        expected_NE = np.zeros((len(where_N2), self.shape.num_experts), bool)
        np.put_along_axis(expected_NE, expected_NK, True, 1)
        differs_N = (routed_NE[coded_N] != expected_NE).any(1)
        self.answered.setdefault(layer, []).append(where_N2)
        self.wrong[layer] = self.wrong.get(layer, 0) + int(differs_N.sum())
        if differs_N.any() and not self.first:
            at = int(differs_N.argmax())
            rollout, position = where_N2[at].tolist()
            self.first = (
                f"layer {layer}, rollout {rollout}, position {position}: its routes are experts "
                f"{np.sort(expected_NK[at]).tolist()}, the router sent it to "
                f"{np.flatnonzero(routed_NE[coded_N][at]).tolist()}"
            )

    def count_slots(self) -> int:
        """Number of (token, layer) slots that were read back. All ranks must call.

        Raises:
            CheckFailed: a slot is wrong, missing or occurs twice.
        """
        everybody = self.mesh.world.all_gather_object((self.answered, self.wrong, self.first))
        wrong = {
            layer: sum(part[1].get(layer, 0) for part in everybody)
            for layer in self.shape.moe_layers
        }
        total = len(self.shape.moe_layers) * sum(length - 1 for length in self.lengths)
        if any(wrong.values()):
            first = next(text for _, _, text in everybody if text)
            layers = {layer: count for layer, count in wrong.items() if count}
            raise CheckFailed(
                f"{sum(wrong.values())} of {total} (token, layer) slots were routed elsewhere, by "
                f"layer {layers}; {first}"
            )
        expected = [(i, t) for i, length in enumerate(self.lengths) for t in range(length - 1)]
        for layer in self.shape.moe_layers:
            parts = [part for answered, _, _ in everybody for part in answered.get(layer, [])]
            seen = sorted(map(tuple, np.concatenate(parts).tolist())) if parts else []
            if seen != expected:
                lost, extra = len(set(expected) - set(seen)), len(seen) - len(set(seen))
                raise CheckFailed(
                    f"layer {layer}: {lost} coded tokens never reached a router, {extra} reached "
                    "it again"
                )
        return total


def read_back_coded_routes(policy: Policy, mesh: Mesh, config: Config) -> str:
    """Check coded routes through exchange, packing, slicing and routers, then in a training pass.

    All ranks must call. Returns the result as text.

    Raises:
        CheckFailed: a route did not arrive where it belongs.
    """
    shape = policy.shape
    if not shape.moe_layers:
        return "a dense model has no routes"
    room = min(_MICRO_BATCH_TOKENS, config.train.micro_batch_tokens)
    count = min(_ROLLOUTS_PER_RANK * mesh.world.size, shape.vocab_size - 1)
    lengths = [2 + 7 * index % (room // 2 - 2) for index in range(count)]
    spec = PackingSpec(micro_batch_tokens=room, layers=policy.replay.layers)
    batch = shared_batch(coded_rollouts(lengths, shape), mesh, shape, spec)
    reader = ReadBack(shape=shape, mesh=mesh, lengths=lengths)
    with reader.listening(policy):
        policy.score(batch, mode="replay")
    slots = reader.count_slots()
    trained = ""
    if config.replays:
        # Raises unless every loaded route was used once in each forward and once in each
        # recomputation.
        policy.forward_backward(batch)
        trained = f"; a training pass (recompute {config.model.recompute}) used each exactly once"
    return (
        f"{slots} coded (token, layer) slots read back right, each once, "
        f"from {len(batch)} micro-batch(es) per rank{trained}"
    )
