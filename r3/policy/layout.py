"""Which tokens of a packed micro-batch this rank computes: context parallelism cuts sequences, sequence parallelism the rest.

    packed micro-batch [N]  --cp-->  this rank's zigzag part [N / cp]  --tp-->  what its routers see [N / cp / tp]

Context parallelism cuts every sequence into 2 * cp equal chunks; rank r takes chunks r and 2 * cp - 1 - r, so that every rank
has as much causal attention to do. With tensor parallelism Megatron's sequence parallelism hands every tp rank's router a
contiguous part of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from r3.runtime.mesh import Mesh
from r3.types import MicroBatch


def zigzag_rows(cu_seqlens: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """Rows of the packed micro-batch that context-parallel rank `rank` of `size` computes, in its order, int64 [N / size].

    Every sequence must be a multiple of 2 * size long.
    """
    rows = []
    for start, end in pairwise(cu_seqlens):
        chunk, rest = divmod(end - start, 2 * size)
        assert rest == 0, (
            f"a sequence of {end - start} tokens is no multiple of 2 * cp = {2 * size}"
        )
        for number in (rank, 2 * size - 1 - rank):
            rows.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(rows)


@dataclass(frozen=True, kw_only=True)
class LocalTokens:
    """The tokens of a micro-batch that this rank computes, on its device; `N` here is N / cp.

    `cu_seqlens` are the borders of its parts of the sequences. `routes_NLK` and `captured_N` are further cut to what its
    routers see; `real_N` (not filler) is cut the same way.
    """

    tokens_N: torch.Tensor
    targets_N: torch.Tensor
    positions_N: torch.Tensor
    loss_mask_N: torch.Tensor
    current_N: torch.Tensor
    rollout_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_weights_N: torch.Tensor
    cu_seqlens: tuple[int, ...]
    routes_NLK: torch.Tensor
    captured_N: torch.Tensor
    num_captured: int
    real_N: torch.Tensor
    num_real: int


def local_tokens(micro_batch: MicroBatch, mesh: Mesh, device: torch.device) -> LocalTokens:
    """Cut a micro-batch, the same on all model-parallel ranks, to this rank's tokens. No communication."""
    borders = micro_batch.cu_seqlens
    rows = None if mesh.cp.size == 1 else zigzag_rows(borders, mesh.cp.rank, mesh.cp.size)

    def mine(values_N: torch.Tensor) -> torch.Tensor:
        return values_N if rows is None else values_N[rows]

    def seen_by_routers(values_N: torch.Tensor) -> torch.Tensor:
        part, rest = divmod(values_N.shape[0], mesh.tp.size)
        assert rest == 0, f"{values_N.shape[0]} tokens are no multiple of tp = {mesh.tp.size}"
        return values_N[mesh.tp.rank * part : (mesh.tp.rank + 1) * part]

    captured_N = seen_by_routers(mine(micro_batch.captured_N))
    real_N = seen_by_routers(mine(micro_batch.real_N))
    return LocalTokens(
        tokens_N=mine(micro_batch.tokens_N).to(device),
        targets_N=mine(micro_batch.targets_N).to(device),
        positions_N=mine(micro_batch.positions_N).to(device),
        loss_mask_N=mine(micro_batch.loss_mask_N).to(device),
        current_N=mine(micro_batch.current_N).to(device),
        rollout_logprobs_N=mine(micro_batch.rollout_logprobs_N).to(device),
        advantages_N=mine(micro_batch.advantages_N).to(device),
        sequence_weights_N=mine(micro_batch.sequence_weights_N).to(device),
        cu_seqlens=tuple(border // mesh.cp.size for border in borders),
        routes_NLK=seen_by_routers(mine(micro_batch.routed_experts_NLK)).to(device),
        captured_N=captured_N.to(device),
        num_captured=int(captured_N.sum()),
        real_N=real_N.to(device),
        num_real=int(real_N.sum()),
    )
