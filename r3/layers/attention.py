"""Causal attention over whole packed sequences, in place of TransformerEngine's.

`r3.backends.attention` has that of parts of sequences, of sliding windows and of learned sinks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import nn

from r3 import extras
from r3.layers.norms import Rotation


@dataclass
class Packed(PackedSeqParams):
    """Megatron's description of a packed batch, with lengths on the host as well.

    Reading lengths must not wait for the device. The first layer makes the rotation of all layers.
    """

    lengths: tuple[int, ...] = ()
    cu_seqlens_device: torch.Tensor | None = None
    rotation: Rotation | None = None


def packed_params(cu_seqlens: Sequence[int], device: torch.device) -> Packed:
    """Describe sequences packed end to end. `cu_seqlens` are the borders, starting with 0."""
    host = torch.tensor(cu_seqlens, dtype=torch.int32)
    lengths = tuple(int(n) for n in host.diff())
    return Packed(
        qkv_format="thd",
        cu_seqlens_q=host,
        cu_seqlens_kv=host,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
        cu_seqlens_device=host.to(device),
    )


class CausalAttention(MegatronModule):
    """Causal core attention, packed [t, h, d] or dense [s, b, h, d].

    Tokens attend within their sequence only. Queries and keys are rotated here, except those of
    latent attention. CUDA half precision uses torch's variable-length flash attention. Elsewhere
    torch's attention runs once for all neighbours of equal length, which `r3.algo.packing` puts
    next to each other, without padding or copies.

    Attributes:
        inverse_frequencies: of the rotation, float32 [d / 2]; None: Megatron rotates.
        interleaved_rope: it turns neighbours.
        window: tokens that a token sees, itself included; 0 = all before it.
        sinks: one more logit per head, with the value zero, [h]; None = none.
    """

    context_parallel = False  # whether sequences may be divided over ranks
    inverse_frequencies: torch.Tensor | None = None
    interleaved_rope = False
    window = 0
    sinks: nn.Parameter | None

    def __init__(
        self,
        config: Any,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert (config.context_parallel_size > 1) == self.context_parallel, (
            f"{type(self).__name__} under context_parallel_size {config.context_parallel_size}"
        )
        assert not (attention_dropout or config.attention_dropout), (
            "reinforcement learning runs without dropout"
        )
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.register_parameter("sinks", None)
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            self.sinks.tensor_model_parallel = True
            self.sinks.partition_dim, self.sinks.partition_stride = 0, 1

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sinks, which tensor-parallel ranks share out."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(own, prefix, {"sinks": 0}, sharded_offsets)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _attention_mask: Any = None,
        packed_seq_params: Packed | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return attention output with heads flattened: packed [t, 1, h*d], dense [s, b, h*d]."""
        if packed_seq_params is None:
            assert not self.context_parallel, "context parallelism runs on packed sequences"
            length, rows = query.shape[:2]
            params = packed_params(range(0, length * rows + 1, length), query.device)
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            return self.forward(q, k, v, None, params).view(rows, length, -1).transpose(0, 1)
        if self.inverse_frequencies is not None:
            if packed_seq_params.rotation is None:
                # A blocking copy would wait for all queued work.
                positions_N, inverse = (
                    values.to(query.device, non_blocking=True)
                    for values in (self._positions(packed_seq_params), self.inverse_frequencies)
                )
                packed_seq_params.rotation = Rotation(
                    positions_N, inverse, query.dtype, interleaved=self.interleaved_rope
                )
            query, key = packed_seq_params.rotation(query), packed_seq_params.rotation(key)
        out = self._attend(query, key, value, packed_seq_params)
        return out.reshape(out.shape[0], 1, -1)

    def _positions(self, packed: Packed) -> torch.Tensor:
        """Position of each of this rank's tokens in its sequence, [t]."""
        return torch.cat([torch.arange(length) for length in packed.lengths])

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Packed
    ) -> torch.Tensor:
        if self.window or self.sinks is not None:
            return extras.attention().attend_in_windows(
                query, key, value, packed, sinks_h=self.sinks, scale=self.scale, window=self.window
            )
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            borders, longest = packed.cu_seqlens_device, int(packed.max_seqlen_q)
            return causal_varlen(
                query, key, value, borders, borders, longest, longest, scale=self.scale
            )
        grouped = query.shape[-2] != key.shape[-2]
        # The processor's bfloat16 attention rounds more, and is slower for short sequences.
        dtype = torch.promote_types(query.dtype, torch.float32)
        runs = [(length, len(list(run))) for length, run in groupby(packed.lengths)]
        sizes = [length * count for length, count in runs]
        parts = (x.to(dtype).split(sizes) for x in (query, key, value))
        out = [
            F.scaled_dot_product_attention(
                *(x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv),
                is_causal=True,
                scale=self.scale,
                enable_gqa=grouped,
            )
            .transpose(1, 2)
            .flatten(0, 1)
            for (length, count), *qkv in zip(runs, *parts, strict=True)
        ]
        return torch.cat(out).to(query.dtype)


def causal_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders_q: torch.Tensor,
    borders_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Run torch's variable-length flash attention over packed [t, h, d]. CUDA only.

    The causal mask is aligned at the end.
    """
    from torch.nn.attention.varlen import varlen_attn

    width = value.shape[-1]
    if width != query.shape[-1]:  # flash attention has one head size
        value = F.pad(value, (0, query.shape[-1] - width))
    # The kernel lets queries share key heads. torch 2.13 wants to be told, 2.11 cannot be.
    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options = {"enable_gqa": query.shape[-2] != key.shape[-2]} if asked else {}
    lengths = (borders_q, borders_k, longest_q, longest_k)
    out = varlen_attn(query, key, value, *lengths, scale=scale, window_size=(-1, 0), **options)
    return out[..., :width]
