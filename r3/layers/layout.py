"""Which tokens of a packed micro-batch this rank computes.

    packed micro-batch [N] --cp--> zigzag part [N / cp] --tp--> rows of its routers [N / cp / tp]

Context parallelism splits every sequence into 2 * cp equal chunks; rank r takes chunks r and
2 * cp - 1 - r, so that all ranks have equally much causal attention to compute. With tensor
parallelism, Megatron's sequence parallelism gives every tp rank's router a contiguous part of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import one_hot

from r3.algo.sampling_mask import of_rows
from r3.metrics.reduce import DEPTHS
from r3.runtime.mesh import Axis, Mesh
from r3.types import MicroBatch


def zigzag_rows(cu_seqlens: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """Return the rows of the packed micro-batch of one context-parallel rank, int64 [N / size].

    Args:
        cu_seqlens: borders of the sequences. Every length must be a multiple of 2 * size.
        rank, size: the rank within its context-parallel group.
    """
    rows = []
    for start, end in pairwise(cu_seqlens):
        chunk, rest = divmod(end - start, 2 * size)
        assert rest == 0, (
            f"a sequence of {end - start} tokens is not a multiple of 2 * cp = {2 * size}"
        )
        for number in (rank, 2 * size - 1 - rank):
            rows.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(rows)


def local_rows(cu_seqlens: Sequence[int], cp: Axis) -> slice | torch.Tensor:
    """Return the rows of the packed micro-batch that this rank computes, as an index."""
    return slice(None) if cp.size == 1 else zigzag_rows(cu_seqlens, cp.rank, cp.size)


@dataclass(frozen=True, kw_only=True)
class LocalTokens:
    """The tokens of a micro-batch that this rank computes, on its device. N here is N / cp.

    Attributes:
        cu_seqlens: borders of this rank's parts of the sequences.
        routes_NLK: rows of this rank's routers only, [N / tp, L, K].
        captured_N: true at those rows that were captured, [N / tp].
        num_captured: number of captured rows.
        real_N: true at those rows that are not filler, [N / tp].
        num_real: number of rows that are not filler.
        depths_ND: 1 at the range of `DEPTHS` that a row's position is in, float64 [N / tp, D].
        kept: `MicroBatch.kept_counts_N` and `kept_ids`, on the host; None: no set is restricted.
    """

    tokens_N: torch.Tensor
    targets_N: torch.Tensor
    positions_N: torch.Tensor
    loss_mask_N: torch.Tensor
    sampled_N: torch.Tensor
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
    depths_ND: torch.Tensor
    kept: tuple[torch.Tensor, torch.Tensor] | None


def local_tokens(micro_batch: MicroBatch, mesh: Mesh, device: torch.device) -> LocalTokens:
    """Select this rank's tokens of a micro-batch that all model-parallel ranks have. Local."""
    borders = micro_batch.cu_seqlens
    rows = local_rows(borders, mesh.cp)

    def mine(values_N: torch.Tensor) -> torch.Tensor:
        return values_N[rows]

    def seen_by_routers(values_N: torch.Tensor) -> torch.Tensor:
        part, rest = divmod(values_N.shape[0], mesh.tp.size)
        assert rest == 0, f"{values_N.shape[0]} tokens are not a multiple of tp"
        return values_N[mesh.tp.rank * part : (mesh.tp.rank + 1) * part]

    columns = (
        *("tokens_N", "targets_N", "positions_N", "loss_mask_N", "sampled_N", "current_N"),
        *("rollout_logprobs_N", "advantages_N", "sequence_weights_N"),
    )
    captured_N = seen_by_routers(mine(micro_batch.captured_N))
    real_N = seen_by_routers(mine(micro_batch.real_N))
    starts = torch.tensor([*DEPTHS.values()])
    place_N = (
        torch.bucketize(seen_by_routers(mine(micro_batch.positions_N)), starts, right=True) - 1
    )
    return LocalTokens(
        **{name: mine(getattr(micro_batch, name)).to(device) for name in columns},
        cu_seqlens=tuple(border // mesh.cp.size for border in borders),
        routes_NLK=seen_by_routers(mine(micro_batch.routed_experts_NLK)).to(device),
        captured_N=captured_N.to(device),
        num_captured=int(captured_N.sum()),
        real_N=real_N.to(device),
        num_real=int(real_N.sum()),
        depths_ND=one_hot(place_N, len(DEPTHS)).double().to(device),
        kept=of_rows(micro_batch.kept_counts_N, micro_batch.kept_ids, rows)
        if len(micro_batch.kept_ids)
        else None,
    )
