"""Which tokens of a packed micro-batch this rank computes.

    packed micro-batch [N] --cp--> zigzag part [N / cp] --tp--> rows of its routers [N / cp / tp]

Context parallelism splits every sequence into 2 * cp equal chunks; rank r takes chunks r and
2 * cp - 1 - r, so that all ranks have equally much causal attention to compute. With tensor
parallelism, Megatron's sequence parallelism gives every tp rank's router a contiguous part of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch.nn.functional import one_hot

from r3.algo.sampling_mask import of_rows
from r3.metrics.reduce import DEPTHS
from r3.runtime.mesh import Axis
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


# What stays on the host: routers take their rows of the routes, and the head its columns.
_ON_HOST = ("routed_experts_NLK", "real_N", "kept_counts_N", "kept_ids")


def local_tokens(micro_batch: MicroBatch, cp: Axis, device: torch.device) -> MicroBatch:
    """Return this rank's part of a micro-batch that all model-parallel ranks have. Local.

    On the device is what model and loss read; routes and kept tokens stay on the host.
    """
    rows = local_rows(micro_batch.cu_seqlens, cp)
    columns = {
        name: getattr(micro_batch, name)[rows]
        for name in MicroBatch.__slots__
        if name.endswith(("_N", "_NLK"))
    }
    counts_N, kept_ids = micro_batch.kept_counts_N, micro_batch.kept_ids
    return replace(
        micro_batch,
        **{name: c if name in _ON_HOST else c.to(device) for name, c in columns.items()},
        cu_seqlens=tuple(border // cp.size for border in micro_batch.cu_seqlens),
        kept_ids=of_rows(counts_N, kept_ids, rows)[1] if len(kept_ids) else kept_ids,
    )


def router_rows(tokens: MicroBatch, tp: Axis) -> slice:
    """Return the rows of this rank's part of a micro-batch that its routers see."""
    size, rest = divmod(tokens.num_tokens, tp.size)
    assert rest == 0, f"{tokens.num_tokens} tokens are not a multiple of tp"
    return slice(tp.rank * size, (tp.rank + 1) * size)


def depths_ND(positions_N: torch.Tensor) -> torch.Tensor:
    """Return 1 at the range of `DEPTHS` that each position is in, float64 [N, D]."""
    starts = torch.tensor([*DEPTHS.values()], device=positions_N.device)
    place_N = torch.bucketize(positions_N, starts, right=True) - 1
    return one_hot(place_N, len(DEPTHS)).double()
