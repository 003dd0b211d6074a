"""Where checkpoint tensors lie in vLLM's parameters, and weights copied straight to that place.

vLLM's reload takes every module apart and puts it together again, and loads each tensor twice, once
to count its elements: about 0.3 ms of Python per tensor. Layers whose parameters are laid out
plainly need none of that. On CPU they are packed anew, by vLLM's own functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from r3.engine.experts import ExpertBlock, StackedExperts, expert_matrices, plain_experts

if TYPE_CHECKING:
    from r3.models.shape import ModelShape

# vLLM's fused linear layers -> the checkpoint's layers that they join, in order.
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# Made by latent attention from kv_b_proj at the end of a load.
DERIVED = ("W_UV", "W_UK", "W_UK_T")
# Classes of `quant_method` of layers that multiply by their parameters as these are; norms have
# none.
_PLAIN_METHODS = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows `start .. start + rows` of an engine parameter, which one checkpoint tensor fills."""

    parameter: str
    start: int
    rows: int


def pieces_of(name: str, rows: int, module: Any, shape: ModelShape) -> Iterator[tuple[str, Piece]]:
    """Yield what a parameter of the engine is made of: (checkpoint tensor, its place).

    Args:
        name: of the parameter in the engine's model.
        rows: of the parameter.
        module: the layer that has it.
    """
    path, _, leaf = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    joined = _JOINED.get(last, (last,))
    sizes = getattr(module, "output_partition_sizes", [])
    if len(sizes) != len(joined):
        sizes = [rows]
    start = 0
    for piece, count in zip(joined, sizes, strict=True):
        source = f"{parent}.{piece}.{leaf}" if parent else f"{piece}.{leaf}"
        if source == "lm_head.weight" and shape.tied:
            source = "model.embed_tokens.weight"
        yield source, Piece(parameter=name, start=start, rows=count)
        start += count


def part_of_rank(full: torch.Tensor, size: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a full tensor.

    Args:
        size: shape of the rows that the part fills. A vocabulary is padded with rows that are no
            tokens, so that the part may have fewer.
    """
    if len(size) > 1 and full.shape[1] > size[1]:  # columns are divided over the ranks
        full = full.narrow(1, rank * size[1], size[1])
    if len(full) > size[0]:  # rows are; key and value heads may be held by several ranks each
        shards = -(-len(full) // size[0])
        start = (rank * shards // ranks) * size[0]
        full = full[start : start + size[0]]
    return full


@dataclass(kw_only=True)
class _Target:
    """A parameter of the engine that checkpoint tensors fill.

    Attributes:
        name, module, leaf: the parameter, its layer, and its name there.
        like: the parameter, or where vLLM packed it and dropped it, its metadata.
        is_dropped: it has to be made anew to be packed.
        missing: tensors that have not come.
        filling: what they are copied into; None before the first.
    """

    name: str
    module: Any
    leaf: str
    like: torch.Tensor
    is_dropped: bool
    missing: int = 0
    filling: torch.Tensor | None = None

    def fill(self, full: torch.Tensor, piece: Piece, rank: int, ranks: int) -> None:
        """Copy a rank's part of a checkpoint tensor; pack the layer after the last one."""
        if self.filling is None:
            self.filling = (
                torch.empty(self.like.shape, dtype=self.like.dtype)
                if self.is_dropped
                else self.like.data
            )
        rows = self.filling.narrow(0, piece.start, piece.rows)
        part = part_of_rank(full, rows.shape, rank, ranks)
        rows[: len(part)].copy_(part)
        self.missing -= 1
        if self.missing == 0:
            if self.is_dropped:
                weight = torch.nn.Parameter(self.filling)
                setattr(self.module, self.leaf, weight.requires_grad_(False))
            self.filling = None
            if self.leaf == "weight" and hasattr(self.module, "cpu_linear"):
                self.module.quant_method.process_weights_after_loading(self.module)


@dataclass(frozen=True, kw_only=True)
class DirectWeights:
    """All parameters of an engine whose layers are laid out plainly.

    Attributes:
        targets: every parameter but those of experts.
        places: checkpoint tensor -> the parameters that it fills, and where.
        experts: decoder layer -> name of its experts, their module, and their stacked tensors.
        shape: sizes of the model.
        rank, ranks: this rank among those of the engine.
    """

    targets: list[_Target] = field(default_factory=list)
    places: dict[str, list[tuple[_Target, Piece]]] = field(default_factory=dict)
    experts: dict[int, tuple[str, Any, StackedExperts]] = field(default_factory=dict)
    shape: ModelShape
    rank: int
    ranks: int

    def load(self, weights: Iterable[tuple[str, torch.Tensor] | ExpertBlock]) -> set[str]:
        """Copy full tensors and blocks of experts; return the parameters that are incomplete."""
        matrices = expert_matrices(self.shape)
        for item in weights:
            if isinstance(item, ExpertBlock):
                self.experts[item.layer][2].copy_block(item)
                continue
            name, full = item
            if name in matrices:
                layer, expert, part = matrices[name]
                self.experts[layer][2].copy(expert, part, full.detach())
            for target, piece in self.places.get(name, ()):
                target.fill(full.detach(), piece, self.rank, self.ranks)
        missing = {target.name for target in self.targets if target.missing}
        for name, module, stacked in self.experts.values():
            if not stacked.is_complete:
                missing |= {f"{name}.{leaf}" for leaf in ("w13_weight", "w2_weight")}
            if stacked.w13.device.type == "cpu":
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
        return missing


def direct_weights(model: Any, shape: ModelShape, rank: int, ranks: int) -> DirectWeights | str:
    """Return where the weights of a model go, or why they need vLLM's reload.

    Args:
        model: the engine's, with its parameters in memory.
        rank, ranks: this rank among those of the engine.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = DirectWeights(shape=shape, rank=rank, ranks=ranks)
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            own = {leaf: getattr(module, leaf) for leaf in ("w13_weight", "w2_weight")}
            stacked = plain_experts(module, own, shape)
            if isinstance(stacked, str):
                return f"{path}: {stacked}"
            found.experts[int(path.split(".layers.")[1].split(".")[0])] = path, module, stacked
            continue
        for leaf, live in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}"
            method = type(getattr(module, "quant_method", None)).__name__
            if leaf in DERIVED or method not in _PLAIN_METHODS:
                return f"{name} is made from other weights, or has a layout of its own"
            dropped = live.numel() == 0
            like = get_layerwise_info(module).restore_metadata[0][leaf] if dropped else live
            target = _Target(name=name, module=module, leaf=leaf, like=like, is_dropped=dropped)
            found.targets.append(target)
            for source, piece in pieces_of(name, len(like), module, shape):
                if source not in shape.tensor_shapes:
                    return f"the checkpoint has no {source}, which {name} is made of"
                found.places.setdefault(source, []).append((target, piece))
                target.missing += 1
    return found
