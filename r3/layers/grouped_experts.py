"""Experts of a MoE layer as two three-dimensional parameters, run by torch's grouped product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Biases(nn.Module):
    """Biases of all experts, [E, width].

    Megatron knows a bias by its name or as a vector. Any other parameter has weight decay.
    """

    def __init__(self, experts: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(experts, width, dtype=dtype))


class GroupedExperts(MegatronModule):
    """This rank's experts as two three-dimensional parameters, run by torch's grouped product.

    `w1` [E, 2F/etp, D] is gate over up, `w2` [E, D, F/etp] is down. One launch for all experts, the
    same bits as Megatron's SequentialMLP on CPU, interchangeable checkpoints.

    Attributes:
        recomputes_activation: backward computes the activation again from w1's outputs.
    """

    recomputes_activation = False

    def __init__(
        self, num_local_experts: int, config: Any, *, pg_collection: Any, **_: Any
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
        biases: list[tuple[nn.Parameter, int]] = []
        if config.add_bias_linear:
            assert tp == 1, "experts with biases are whole on a rank"
            self.linear_fc1 = _Biases(num_local_experts, 2 * ffn, config.params_dtype)
            self.linear_fc2 = _Biases(num_local_experts, hidden, config.params_dtype)
            biases = [(self.linear_fc1.bias, 1), (self.linear_fc2.bias, 1)]
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
                out = out + 0.0 * (self.linear_fc1.bias.sum() + self.linear_fc2.bias.sum())
            return out, None
        # The counts are on the host: a blocking copy would wait for all queued work, per layer.
        ends = tokens_per_expert.to(tokens_ND.device, non_blocking=True).cumsum(0).to(torch.int32)
        both = F.grouped_mm(tokens_ND, self.w1.transpose(1, 2), offs=ends)
        if self.config.add_bias_linear:
            # One-hot rows: the biases' gradients are products too, the same in every run.
            rows_N = torch.arange(len(both), dtype=ends.dtype, device=both.device)
            expert_N = torch.searchsorted(ends, rows_N, right=True)
            chosen_NE = F.one_hot(expert_N, self.num_local_experts).to(both.dtype)
            both = both + chosen_NE @ self.linear_fc1.bias

        def down(both: torch.Tensor, probs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            gate, up = both.chunk(2, -1)
            if limit := self.config.activation_func_clamp_value:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            if offset := self.config.glu_linear_offset:
                up = up + offset
            inner = (self.config.activation_func(gate) * up * probs.unsqueeze(-1)).to(both.dtype)
            out = F.grouped_mm(inner, self.w2.transpose(1, 2), offs=ends)
            if self.config.add_bias_linear:
                out = out + ((chosen_NE @ self.linear_fc2.bias) * probs.unsqueeze(-1)).to(out.dtype)
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
            f"{prefix}{name}.bias": sharded(
                f"{prefix}experts.{name}.bias", getattr(self, name).bias, replica
            )
            for name in ("linear_fc1", "linear_fc2")
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
