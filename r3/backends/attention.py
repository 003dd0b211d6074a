"""Attention in sliding windows, with learned sinks, and over parts of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from r3.layers.attention import CausalAttention, Packed, causal_varlen
from r3.layers.layout import zigzag_rows


class ContextParallelAttention(CausalAttention):
    """Packed attention over the zigzag layout of `r3.layers.layout`. All ranks of cp must call.

    Keys and values are gathered, queries stay local. Ring attention would overlap communication
    with computation. This form is exact, short, and the same on CPU and CUDA.
    """

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


def attend_in_windows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: Packed,
    *,
    sinks_h: torch.Tensor | None,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Run causal attention with a window or sinks over packed [t, h, d].

    Args:
        packed: the sequences.
        sinks_h: one more logit per head; None = none.
        scale: factor on the scores.
        window: tokens that a token sees, itself included; 0 = all before it.
    """
    groups, dtype = query.shape[-2] // key.shape[-2], query.dtype
    key, value = (x.repeat_interleave(groups, -2) for x in (key, value))
    if sinks_h is None:
        sinks_h = torch.full(query.shape[1:2], -torch.inf, device=query.device)
    kernel: Plain | Flash
    if query.is_cuda and dtype in (torch.float16, torch.bfloat16):
        borders, longest = packed.cu_seqlens_device, int(packed.max_seqlen_q)
        kernel = Flash(borders=borders, longest=longest, scale=scale, window=window)
    else:
        kernel = Plain(lengths=packed.lengths, scale=scale, window=window)
        wide = torch.promote_types(dtype, torch.float32)
        query, key, value = (x.to(wide) for x in (query, key, value))
    return Attention.apply(query, key, value, sinks_h, kernel).to(dtype)


class Attention(torch.autograd.Function):
    """Attention of a kernel, with sinks [h]; -inf is none.

        p_ij = exp(s_ij) / (exp(sink) + sum_j' exp(s_ij')),   out_i = sum_j p_ij v_j

    A sink is one more logit per head: a key that every token sees, whose value is zero. Kernels
    without sinks compute the rest: with l' = ln(exp(l) + exp(sink)), l their log-sum-exp, the
    output is theirs times exp(l - l'), and their backward is right if it gets this output and l'
    in place of l.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_h: torch.Tensor,
        kernel: Plain | Flash,
    ) -> torch.Tensor:
        out, sums_th = kernel.forward(query, key, value)
        whole_th = torch.logaddexp(sums_th, sinks_h.to(sums_th.dtype))
        out = out * (sums_th - whole_th).exp().to(out.dtype)[..., None]
        ctx.save_for_backward(query, key, value, out, whole_th, sinks_h)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *qkv, out, whole_th, sinks_h = ctx.saved_tensors
        gradients = ctx.kernel.backward(upstream[0].contiguous(), *qkv, out, whole_th)
        # The sink's value is zero: its gradient is -p_sink <d_out, out>, as of a softmax.
        inner_th = (upstream[0].to(whole_th.dtype) * out.to(whole_th.dtype)).sum(-1)
        share_th = (sinks_h.to(whole_th.dtype) - whole_th).exp()
        return *gradients, -(share_th * inner_th).sum(0).to(sinks_h.dtype), None


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Causal attention over packed [t, h, d] by products of torch, neighbours of equal length at
    once. There are as many key heads as query heads.

    Attributes:
        lengths: of the sequences.
        window: tokens that a token sees, itself included; 0 = all before it.
    """

    lengths: Sequence[int]
    scale: float
    window: int

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the log-sum-exp of the scores, float32 or wider, [t, h]."""
        results = []
        for q, k, v in self._runs(query, key, value):
            scores = self._scores(q, k)
            sums = scores.logsumexp(-1, keepdim=True)
            results.append(((scores - sums).exp() @ v, sums))
        out, sums = (
            torch.cat([_packed(part) for part in parts]) for parts in zip(*results, strict=True)
        )
        return out, sums[..., 0]

    def backward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return gradients of q, k, v, given that of the output, q, k, v, output, log-sum-exp."""
        *rest, sums_th = tensors
        gradients = []
        for d_out, q, k, v, out, sums in self._runs(*rest, sums_th[..., None]):
            shares = (self._scores(q, k) - sums).exp()
            inner = (d_out * out).sum(-1, keepdim=True)
            d_scores = shares * (d_out @ v.mT - inner) * self.scale
            gradients.append((d_scores @ k, d_scores.mT @ q, shares.mT @ d_out))
        dq, dk, dv = (
            torch.cat([_packed(part) for part in parts]) for parts in zip(*gradients, strict=True)
        )
        return dq, dk, dv

    def _runs(self, *tensors: torch.Tensor) -> Any:
        """Yield all tensors of sequences of one length, [sequences, h, length, d]."""
        runs = [(length, len(list(run))) for length, run in groupby(self.lengths)]
        parts = (x.split([length * count for length, count in runs]) for x in tensors)
        for (length, count), *of_run in zip(runs, *parts, strict=True):
            yield [x.unflatten(0, (count, length)).transpose(1, 2) for x in of_run]

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        sees = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
        if self.window:
            sees = sees.triu(1 - self.window)
        return (q @ k.mT * self.scale).masked_fill(~sees, -torch.inf)


@dataclass(frozen=True, kw_only=True)
class Flash:
    """The same by torch's flash attention, in half precision on CUDA.

    Attributes:
        borders: of the sequences, int32 on the device.
        longest: tokens of the longest sequence.
        window: as of `Plain`.
    """

    borders: torch.Tensor
    longest: int
    scale: float
    window: int

    def _options(self) -> dict[str, Any]:
        left = self.window - 1 if self.window else -1
        return dict(scale=self.scale, window_size_left=left, window_size_right=0)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Plain`."""
        where = self.borders, self.borders, self.longest, self.longest, 0.0, not self.window
        out, sums_ht, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *where, False, **self._options()
        )
        return out, sums_ht.t()

    def backward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Plain`."""
        *rest, sums_th = tensors
        where = self.borders, self.borders, self.longest, self.longest, 0.0, not self.window
        state = torch.zeros(2, dtype=torch.uint64, device=sums_th.device)  # of a dropout
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *rest, sums_th.t().contiguous(), *where, state, state.new_empty(0), **self._options()
        )
        return dq, dk, dv


def _packed(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(1, 2).flatten(0, 1)
