"""Gated delta layers: linear attention with a state of fixed size per head (arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import nn

if TYPE_CHECKING:
    from r3.layers.attention import Packed
    from r3.models.sizes import DeltaSizes

CHUNK = 64
"""Tokens that are computed by products; the state goes from chunk to chunk."""


class GatedDelta(MegatronModule):
    """A gated delta layer in the place of self-attention. It needs tp 1 and cp 1.

    Tokens take part in their sequence only: the convolution sees nothing before its first token,
    and its state starts at zero. Recurrence and decay are computed in float32.

    Attributes:
        sizes: heads and dimensions; `_build_chunk` checks that the model has them.
    """

    def __init__(self, config: Any, submodules: Any = None, *, sizes: DeltaSizes, **_: Any) -> None:
        super().__init__(config=config)
        del submodules
        assert config.tensor_model_parallel_size == config.context_parallel_size == 1, (
            "gated delta layers are not divided over ranks"
        )
        self.sizes = sizes
        for name, shape in sizes.tensor_shapes(config.hidden_size).items():
            # `r3.models.tensors` knows these names.
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            self.register_parameter(name.replace(".", "_"), weight)

    def forward(
        self,
        hidden_states: torch.Tensor,
        _attention_mask: Any = None,
        *,
        packed_seq_params: Packed | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Map packed [t, 1, D], or dense [s, b, D], to the same shape."""
        if packed_seq_params is None:
            length, rows = hidden_states.shape[:2]
            flat_ND = hidden_states.transpose(0, 1).flatten(0, 1)
            out = self._mix(flat_ND, (length,) * rows)
            return out.view(rows, length, -1).transpose(0, 1), None
        return self._mix(hidden_states[:, 0], packed_seq_params.lengths)[:, None], None

    def _mix(self, x_ND: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        sizes = self.sizes
        qkv_NC, z_Nhv, beta_Nh, decay_Nh = self._project(x_ND)
        qkv_NC = F.silu(causal_convolution(qkv_NC, self.conv1d_weight[:, 0], lengths))
        query, key, value = (
            part.unflatten(-1, (-1, size)).float()
            for part, size in zip(
                qkv_NC.split([sizes.keys, sizes.keys, sizes.values], -1),
                (sizes.key_size, sizes.key_size, sizes.value_size),
                strict=True,
            )
        )
        repeats = sizes.value_heads // sizes.key_heads
        query, key = (unit(x).repeat_interleave(repeats, 1) for x in (query, key))
        beta_Nh = beta_Nh.float().sigmoid()
        decay_Nh = -self.A_log.float().exp() * F.softplus(decay_Nh.float() + self.dt_bias.float())
        out_Nhv = gated_delta(query, key, value, decay_Nh, beta_Nh, lengths).to(x_ND.dtype)
        normed = F.rms_norm(
            out_Nhv.float(), (sizes.value_size,), eps=self.config.layernorm_epsilon
        ).to(x_ND.dtype)
        gated = (self.norm_weight * normed).float() * F.silu(z_Nhv.float())
        return gated.to(x_ND.dtype).flatten(1) @ self.out_proj_weight.t()

    def _project(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v [N, C], the output's gate [N, h, v], and beta and decay [N, h]."""
        sizes = self.sizes
        if not sizes.interleaved:
            weights = (getattr(self, f"in_proj_{part}_weight") for part in ("qkv", "z", "b", "a"))
            qkv, z, beta, decay = (x_ND @ weight.t() for weight in weights)
            return qkv, z.unflatten(-1, (-1, sizes.value_size)), beta, decay
        # Each key head has its rows of q, k, v and gate together, and those of beta and decay.
        repeats = sizes.value_heads // sizes.key_heads
        widths = [sizes.key_size] * 2 + [repeats * sizes.value_size] * 2
        *qkv, z = (
            (x_ND @ self.in_proj_qkvz_weight.t())
            .unflatten(-1, (sizes.key_heads, -1))
            .split(widths, -1)
        )
        beta, decay = (
            (x_ND @ self.in_proj_ba_weight.t()).unflatten(-1, (sizes.key_heads, -1)).chunk(2, -1)
        )
        return (
            torch.cat([part.flatten(1) for part in qkv], -1),
            z.flatten(1).unflatten(-1, (-1, sizes.value_size)),
            beta.flatten(1),
            decay.flatten(1),
        )


def unit(x: torch.Tensor) -> torch.Tensor:
    """Divide by the length over the last dimension; a length of zero divides by 1e-3."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_convolution(
    x_NC: torch.Tensor, weight_CK: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Weighted sum of each channel's last K values, within a sequence of the packed tokens.

    Args:
        weight_CK: the last column is that of the token itself.
        lengths: tokens of each sequence.
    """
    taps = weight_CK.shape[1]
    position_N1 = torch.cat([torch.arange(length) for length in lengths])[:, None]
    position_N1 = position_N1.to(x_NC.device, non_blocking=True)
    out = x_NC * weight_CK[:, -1]
    for back in range(1, min(taps, max(lengths))):
        earlier = F.pad(x_NC, (0, 0, back, 0))[:-back]
        out = out + (earlier * weight_CK[:, -1 - back]).masked_fill(position_N1 < back, 0.0)
    return out


def gated_delta(
    query_Nhk: torch.Tensor,
    key_Nhk: torch.Tensor,
    value_Nhv: torch.Tensor,
    decay_Nh: torch.Tensor,
    beta_Nh: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """Run the gated delta rule over packed sequences, all in float32. Returns [N, h, v].

    With S [k, v] from zero, per token and head: S = exp(decay) S; S = S + k (beta (v - S^T k))^T;
    out = S^T q / sqrt(size of a key).

    Within a chunk the corrections u = beta (v - S^T k) depend on each other by a triangular system,
    which is solved; the state is carried from chunk to chunk, of all sequences at once.

    Args:
        decay_Nh: at most 0.
        beta_Nh: from 0 to 1.
        lengths: tokens of each sequence.

    Source: arXiv 2412.06464, section 3.3.
    """
    scale = query_Nhk.shape[-1] ** -0.5
    chunks = -(-max(lengths) // CHUNK)
    # Rows of sequences, [sequences, heads, chunks, CHUNK, ...]. What is added changes no state: its
    # key, beta and decay are zero.
    q, k, v, decay, beta = (
        _rows(x, lengths, chunks)
        for x in (query_Nhk * scale, key_Nhk, value_Nhv, decay_Nh[..., None], beta_Nh[..., None])
    )
    total = decay.cumsum(-2)  # of a chunk's tokens up to each
    between = total - total.transpose(-1, -2)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # exp only where it is used: above the diagonal it could overflow.
    between = between.masked_fill(~lower, -torch.inf).exp()
    system = (beta * (k @ k.transpose(-1, -2)) * between).tril(-1)
    both = torch.cat([beta * v, beta * total.exp() * k], -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    fresh, of_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * between
    entering = q * total.exp()
    leaving = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
    kept = total[..., -1:, :].exp()
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for i in range(chunks):
        correction = fresh[:, :, i] - of_state[:, :, i] @ state
        out.append(entering[:, :, i] @ state + within[:, :, i] @ correction)
        state = kept[:, :, i] * state + leaving[:, :, i] @ correction
    rows = torch.cat(out, -2).transpose(1, 2)  # [sequences, tokens, heads, v]
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


def _rows(x_Nhd: torch.Tensor, lengths: Sequence[int], chunks: int) -> torch.Tensor:
    padded = torch.stack(
        [
            F.pad(part, (0, 0, 0, 0, 0, chunks * CHUNK - len(part)))
            for part in x_Nhd.split(list(lengths))
        ]
    )
    return padded.transpose(1, 2).unflatten(2, (chunks, CHUNK))
