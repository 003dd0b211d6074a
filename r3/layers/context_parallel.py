"""Causal attention under context parallelism: keys and values are gathered, queries stay local.

Ring attention would overlap communication with computation. This form is exact, short, and the same
on CPU and CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from r3.layers.attention import CausalAttention, Packed, causal_varlen
from r3.layers.layout import zigzag_rows


class ContextParallelAttention(CausalAttention):
    """Packed attention over the zigzag layout of `r3.layers.layout`. All ranks of cp must call."""

    context_parallel = True

    def __init__(self, config: Any, *, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.cp_group = pg_collection.cp

    def _plan(self, params: Packed) -> tuple[torch.Tensor, list[int], list[int]]:
        """Select the gathered keys that each of this rank's chunks attends to.

        A rank has two chunks of every sequence; chunk c attends to chunks 0 .. c. Gathered rows are
        ordered by rank.

        Returns:
            Rows of the gathered keys, and the query and key lengths of each chunk.
        """
        size, rank = self.cp_group.size(), self.cp_group.rank()
        local_tokens = sum(params.lengths) // size
        rows, query_lengths, key_lengths, done = [], [], [], 0
        for length in params.lengths:
            chunk = length // (2 * size)
            offsets = torch.arange(chunk)
            where = torch.empty(2 * size, chunk, dtype=torch.long)
            for holder in range(size):
                start = holder * local_tokens + done
                where[holder] = start + offsets
                where[2 * size - 1 - holder] = start + chunk + offsets
            for number in (rank, 2 * size - 1 - rank):
                rows.append(where[: number + 1].reshape(-1))
                query_lengths.append(chunk)
                key_lengths.append((number + 1) * chunk)
            done += 2 * chunk
        return torch.cat(rows), query_lengths, key_lengths

    def _positions(self, packed: Packed) -> torch.Tensor:
        rows = zigzag_rows(packed.cu_seqlens_q.tolist(), self.cp_group.rank(), self.cp_group.size())
        return super()._positions(packed)[rows]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Packed
    ) -> torch.Tensor:
        rows, query_lengths, key_lengths = self._plan(packed)
        rows = rows.to(query.device)
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)[rows]
            for x in (key, value)
        )
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            borders_q, borders_k = (
                torch.tensor([0, *lengths], device=query.device).cumsum(0).to(torch.int32)
                for lengths in (query_lengths, key_lengths)
            )
            lengths = (borders_q, borders_k, max(query_lengths), max(key_lengths))
            return causal_varlen(query, key, value, *lengths, scale=self.scale)
        out = []
        for q, k, v in zip(
            query.split(query_lengths),
            key.split(key_lengths),
            value.split(key_lengths),
            strict=True,
        ):
            # From one chunk to itself and all before it: causal, aligned at the end.
            mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
            attended = F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q, k, v)),
                attn_mask=mask.tril(len(k) - len(q)),
                scale=self.scale,
                enable_gqa=q.shape[-2] != k.shape[-2],
            )
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)
