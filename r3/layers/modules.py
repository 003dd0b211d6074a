"""Modules for Megatron's layer spec, in place of TransformerEngine's: the same on CPU and CUDA."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

from r3.kernels import rows  # noqa: F401  (defines torch.ops.r3)
from r3.layers.rope import Rotation
from r3.layers.windows import Attention, Flash, Kernel, Plain
from r3.runtime.mesh import Axis


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


class RMSNorm(nn.Module):
    """Root-mean-square norm with float32 statistics.

    It supports sequence parallelism, which Megatron's torch norm refuses.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # finalize_model_grads sums this gradient over tp if tp ranks had slices of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dimension."""
        return _Norm.apply(x, self.weight, self.eps)


class _Norm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps), with a backward that saves only its inputs.

    Rows of the last dimension are normed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out_ND, scale_N = torch.ops.r3.norm(x.flatten(0, -2), weight, eps)
        ctx.save_for_backward(x, weight, scale_N)
        return out_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale_N = ctx.saved_tensors
        of_rows = x.flatten(0, -2), weight, scale_N, upstream[0].flatten(0, -2)
        d_x_ND, d_weight = torch.ops.r3.norm_backward(*of_rows)
        return d_x_ND.view(x.shape), d_weight, None


class CentredNorm(RMSNorm):
    """Norm that multiplies by 1 + weight, in float32 before the result is rounded (Qwen3-Next)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dimension."""
        return _Norm.apply(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)


class LatentNorm(RMSNorm):
    """Norm of the compressed queries, keys and values of latent attention.

    DeepSeek's own code leaves epsilon at 1e-6 whatever rms_norm_eps is. (Moonlight has 1e-5, which
    vLLM uses here too: on latents of usual size the difference is below bfloat16 rounding.)
    """

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class AllHeadsNorm(nn.Module):
    """Root-mean-square norm over all heads together, [..., heads, d]. All ranks of tp must call.

    Each tensor-parallel rank has some of the heads. Every rank has the full weight and uses the
    part of its own heads: Megatron sums the gradients of q_layernorm and k_layernorm over tp, by
    their names, and the gradients of the other parts are zero.
    """

    heads = ""  # field of Megatron's config that counts them

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(getattr(config, self.heads) * hidden_size, dtype=config.params_dtype)
        )
        self.tp: Axis | None = None  # Megatron gives norms no process group; build_chunks does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last two dimensions of all tensor parallel ranks."""
        assert self.tp is not None, "build_chunks gives the norm its axis"
        x32 = x.flatten(-2).float()
        squares, weight = x32.pow(2).sum(-1, keepdim=True), self.weight
        if self.tp.size > 1:
            # Summed in forward and backward: every rank's output depends on every rank's input.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp.group)
            weight = weight.chunk(self.tp.size)[self.tp.rank]
        x32 = x32 * torch.rsqrt(squares / self.weight.numel() + self.eps)
        return (weight * x32.to(x.dtype)).view_as(x)


class QueryHeadsNorm(AllHeadsNorm):
    """Over all query heads."""

    heads = "num_attention_heads"


class KeyHeadsNorm(AllHeadsNorm):
    """Over all key heads."""

    heads = "num_query_groups"


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
            return self._attend_in_windows(query, key, value, packed)
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

    def _attend_in_windows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Packed
    ) -> torch.Tensor:
        groups, dtype = query.shape[-2] // key.shape[-2], query.dtype
        key, value = (x.repeat_interleave(groups, -2) for x in (key, value))
        sinks_h = self.sinks
        if sinks_h is None:
            sinks_h = torch.full(query.shape[1:2], -torch.inf, device=query.device)
        kernel: Kernel
        if query.is_cuda and dtype in (torch.float16, torch.bfloat16):
            borders, longest = packed.cu_seqlens_device, int(packed.max_seqlen_q)
            kernel = Flash(borders=borders, longest=longest, scale=self.scale, window=self.window)
        else:
            kernel = Plain(lengths=packed.lengths, scale=self.scale, window=self.window)
            wide = torch.promote_types(dtype, torch.float32)
            query, key, value = (x.to(wide) for x in (query, key, value))
        return Attention.apply(query, key, value, sinks_h, kernel).to(dtype)


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


class GroupedExperts(MegatronModule):
    """This rank's experts as two three-dimensional parameters, run by torch's grouped product.

    `w1` [E, 2F/etp, D] is gate over up, `w2` [E, D, F/etp] is down. One launch for all experts, the
    same bits as Megatron's SequentialMLP on CPU, interchangeable checkpoints.

    Attributes:
        recomputes_activation: backward computes the activation again from w1's outputs.
    """

    recomputes_activation = False

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        *,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.gated_linear_unit, "experts are gated"
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = (
            pg_collection.ep,
            pg_collection.expt_tp,
            pg_collection.expt_dp,
        )
        tp, hidden, ffn = self.tp_group.size(), config.hidden_size, config.moe_ffn_hidden_size
        self.w1 = nn.Parameter(
            torch.empty(num_local_experts, 2 * ffn // tp, hidden, dtype=config.params_dtype)
        )
        self.w2 = nn.Parameter(
            torch.empty(num_local_experts, hidden, ffn // tp, dtype=config.params_dtype)
        )
        if config.perform_initialization:
            config.init_method(self.w1)
            config.output_layer_init_method(self.w2)
        biases: list[tuple[nn.Parameter, int]] = []
        if config.add_bias_linear:
            assert tp == 1, "experts with biases are whole on a rank"
            for name, width in (("b1", 2 * ffn), ("b2", hidden)):
                bias = nn.Parameter(
                    torch.zeros(num_local_experts, width, dtype=config.params_dtype)
                )
                self.register_parameter(name, bias)
                biases.append((bias, 1))
        for weight, dim in ((self.w1, 1), (self.w2, 2), *biases):
            # False sends the gradient to the expert data-parallel group. Upstream checks ep > 1
            # only, which is wrong if experts are sharded differently from the rest (etp != tp).
            weight.allreduce = (
                config.expert_model_parallel_size == 1 and tp == config.tensor_model_parallel_size
            )
            # True even for etp = 1: otherwise the gradient norm leaves these out on tp rank > 0.
            weight.tensor_model_parallel = True
            weight.partition_dim, weight.partition_stride = dim, 1

    def forward(
        self, tokens_ND: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Map tokens sorted by expert [N, D] with gate weights [N] to outputs [N, D]."""
        if tokens_ND.shape[0] == 0:  # keep all parameters in the graph
            out = (tokens_ND @ self.w1[0].t()).chunk(2, -1)[0] @ self.w2[0].t()
            if self.config.add_bias_linear:
                out = out + 0.0 * (self.b1.sum() + self.b2.sum())
            return out, None
        # The counts are on the host: a blocking copy would wait for all queued work, per layer.
        ends = tokens_per_expert.to(tokens_ND.device, non_blocking=True).cumsum(0).to(torch.int32)
        both = F.grouped_mm(tokens_ND, self.w1.transpose(1, 2), offs=ends)
        if self.config.add_bias_linear:
            # One-hot rows: the biases' gradients are products too, the same in every run.
            rows_N = torch.arange(len(both), dtype=ends.dtype, device=both.device)
            expert_N = torch.searchsorted(ends, rows_N, right=True)
            chosen_NE = F.one_hot(expert_N, self.num_local_experts).to(both.dtype)
            both = both + chosen_NE @ self.b1

        def down(both: torch.Tensor, probs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            gate, up = both.chunk(2, -1)
            if limit := self.config.activation_func_clamp_value:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            if offset := self.config.glu_linear_offset:
                up = up + offset
            inner = (self.config.activation_func(gate) * up * probs.unsqueeze(-1)).to(both.dtype)
            out = F.grouped_mm(inner, self.w2.transpose(1, 2), offs=ends)
            if self.config.add_bias_linear:
                out = out + ((chosen_NE @ self.b2) * probs.unsqueeze(-1)).to(out.dtype)
            return out

        if self.recomputes_activation:
            # It stops before the product, whose inputs are all that the recomputation is for.
            return checkpoint(
                down, both, probs, ends, use_reentrant=False, preserve_rng_state=False
            ), None
        return down(both, probs, ends), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed with the others."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the keys and global layout of Megatron's SequentialMLP: [E, 2F, D], [E, D, F]."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        axis = len(sharded_offsets)
        ep, ep_rank = self.ep_group.size(), self.ep_group.rank()
        tp, tp_rank = self.tp_group.size(), self.tp_group.rank()
        replica = (0, 0, self.dp_group.rank())

        def sharded(
            key: str, tensor: torch.Tensor, replica_id: Any, *shards: tuple[int, int, int]
        ) -> ShardedTensor:
            offsets = [
                (axis, ep_rank, ep),
                *((axis + 1 + dim, index, count) for dim, index, count in shards),
            ]
            return ShardedTensor.from_rank_offsets(
                key,
                tensor,
                *sharded_offsets,
                *offsets,
                replica_id=replica_id,
                prepend_axis_num=axis,
            )

        def gate_and_up(
            key: str, tensor: torch.Tensor, replica_id: Any, _flattened_range: Any
        ) -> list[ShardedTensor]:
            gate, up = tensor.chunk(2, 1)
            return [
                sharded(key, gate, replica_id, (0, tp_rank, 2 * tp)),
                sharded(key, up, replica_id, (0, tp + tp_rank, 2 * tp)),
            ]

        biases = {
            f"{prefix}{name}": sharded(f"{prefix}experts.{key}.bias", getattr(self, name), replica)
            for name, key in (("b1", "linear_fc1"), ("b2", "linear_fc2"))
            if self.config.add_bias_linear
        }
        return biases | {
            f"{prefix}w1": ShardedTensorFactory(
                f"{prefix}experts.linear_fc1.weight",
                self.w1,
                gate_and_up,
                lambda parts: torch.cat(parts, 1),
                replica,
            ),
            f"{prefix}w2": sharded(
                f"{prefix}experts.linear_fc2.weight", self.w2, replica, (1, tp_rank, tp)
            ),
        }


def _scaled_addition(factor: float) -> Callable[..., Any]:
    """Return what adds `factor` times the output of attention or MLP to the residual stream.

    Source: megatron/core/fusions/fused_bias_dropout.py, without bias and dropout.
    """

    def add(
        output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, _dropout: float
    ) -> torch.Tensor:
        output, bias = output_with_bias
        assert bias is None, "output projections have no bias"
        return residual + output * factor

    return lambda _training, _fused: add


def decoder_spec(
    config: Any,
    *,
    experts: type[MegatronModule] | None,
    attention: type[CausalAttention] = CausalAttention,
    replaced: Mapping[str, type] | None = None,
    residual_multiplier: float = 1.0,
    norm: type[RMSNorm] = RMSNorm,
    mixers: Mapping[int, ModuleSpec] | None = None,
    vp_stage: int | None = None,
) -> Any:
    """Return Megatron's local decoder spec with R3's norm, attention and, if asked, experts.

    Args:
        config: Megatron's TransformerConfig.
        experts: class of a MoE layer's experts; None = Megatron's own.
        attention: class of the core attention.
        replaced: parts of self-attention, by field name, that are other modules in this model.
        residual_multiplier: factor on what attention and MLP add to the residual stream.
        norm: class of the norms.
        mixers: number of a layer among those of this chunk -> what it has instead of attention.
        vp_stage: number of the model chunk on this pipeline rank; None without virtual stages.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = norm
    for layer in block.layer_specs:
        parts = layer.submodules
        if residual_multiplier != 1:
            parts.self_attn_bda = parts.mlp_bda = _scaled_addition(residual_multiplier)
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        projections = parts.self_attention.submodules
        projections.core_attention = attention
        if config.qk_layernorm and not config.multi_latent_attention:
            projections.q_layernorm = projections.k_layernorm = norm
        for name, module in (replaced or {}).items():
            setattr(projections, name, module)
        # Megatron 0.16 describes the layer by a ModuleSpec, from 0.18 on by functools.partial.
        is_spec = isinstance(parts.mlp, ModuleSpec)
        if experts and (parts.mlp.module if is_spec else parts.mlp.func) is MoELayer:
            holder = parts.mlp.submodules if is_spec else parts.mlp.keywords["submodules"]
            holder.experts = ModuleSpec(module=experts) if is_spec else experts
    for number, mixer in (mixers or {}).items():
        # A copy: layers of one kind share their spec.
        layer = copy(block.layer_specs[number])
        layer.submodules = replace(layer.submodules, self_attention=mixer)
        block.layer_specs[number] = layer
    return block
