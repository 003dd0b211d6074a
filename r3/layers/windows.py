"""Attention with sliding windows and learned sinks, for packed sequences.

    p_ij = exp(s_ij) / (exp(sink) + sum_j' exp(s_ij')),   out_i = sum_j p_ij v_j

A sink is one more logit per head: a key that every token sees, whose value is zero. Kernels without
sinks compute the rest: with l' = ln(exp(l) + exp(sink)), l their log-sum-exp, the output is theirs
times exp(l - l'), and their backward is right if it gets this output and l' in place of l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch


class Attention(torch.autograd.Function):
    """Attention of a kernel, with sinks [h]; -inf is none."""

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
        found = []
        for q, k, v in self._runs(query, key, value):
            scores = self._scores(q, k)
            sums = scores.logsumexp(-1, keepdim=True)
            found.append(((scores - sums).exp() @ v, sums))
        out, sums = (
            torch.cat([_packed(part) for part in parts]) for parts in zip(*found, strict=True)
        )
        return out, sums[..., 0]

    def backward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return gradients of q, k, v, given that of the output, q, k, v, output, log-sum-exp."""
        *rest, sums_th = tensors
        found = []
        for d_out, q, k, v, out, sums in self._runs(*rest, sums_th[..., None]):
            shares = (self._scores(q, k) - sums).exp()
            inner = (d_out * out).sum(-1, keepdim=True)
            d_scores = shares * (d_out @ v.mT - inner) * self.scale
            found.append((d_scores @ k, d_scores.mT @ q, shares.mT @ d_out))
        dq, dk, dv = (
            torch.cat([_packed(part) for part in parts]) for parts in zip(*found, strict=True)
        )
        return dq, dk, dv

    def _runs(self, *tensors: torch.Tensor) -> Any:
        """Yield all tensors of sequences of one length, [sequences, h, length, d]."""
        runs = [(length, len(list(run))) for length, run in groupby(self.lengths)]
        parts = (x.split([length * count for length, count in runs]) for x in tensors)
        for (length, count), *each in zip(runs, *parts, strict=True):
            yield [x.unflatten(0, (count, length)).transpose(1, 2) for x in each]

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
