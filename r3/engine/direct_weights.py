"""Copy weights directly into vLLM's parameters, past its reload.

vLLM's reload takes every module apart and puts it together again, and loads each tensor twice, once
to count its elements: about 0.3 ms of Python per tensor. Layers with a plain parameter layout need
none of that. On CPU vLLM's own functions repack them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from r3.engine.experts import (
    ExpertBlock,
    StackedExperts,
    expert_matrices,
    plain_experts,
)

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
_EXPERTS = ("w13_weight", "w2_weight")
# Classes of `quant_method` of layers that multiply by their parameters as these are; norms have
# none.
_PLAIN_METHODS = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows `start .. start + rows` of an engine parameter, which one checkpoint tensor fills.

    Attributes:
        first, end: rows of the checkpoint's tensor, of which each rank has its part.
    """

    parameter: str
    start: int
    rows: int
    first: int = 0
    end: int | None = None


def pieces_of(name: str, rows: int, module: Any, shape: ModelShape) -> Iterator[tuple[str, Piece]]:
    """Yield what a parameter of the engine is made of: (checkpoint tensor, its place).

    Args:
        name: of the parameter in the engine's model.
        rows: of the parameter.
        module: the layer that has it.
    """
    # gpt-oss has names of its own in vLLM.
    name_in_checkpoint = re.sub(r"^model\.embedding\.", "model.embed_tokens.", name)
    name_in_checkpoint = re.sub(r"(\.\d+)\.attn\.", r"\1.self_attn.", name_in_checkpoint)
    path, _, leaf = name_in_checkpoint.rpartition(".")
    parent, _, last = path.rpartition(".")
    if parts := _delta_parts(last, shape):
        ranks, start = sum(count for _, _, count in parts) // rows, 0
        for piece, first, count in parts:
            own = count // ranks
            yield (
                f"{parent}.{piece}.{leaf}",
                Piece(parameter=name, start=start, rows=own, first=first, end=first + count),
            )
            start += own
        return
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


def _delta_parts(layer: str, shape: ModelShape) -> list[tuple[str, int, int]]:
    """What vLLM divides over ranks part by part in a layer of gated delta layers.

    Returns:
        The checkpoint's layer, first row and number of rows of each; empty for other layers.
    """
    sizes = shape.delta
    if sizes is None:
        return []
    mixed = [(0, sizes.keys), (sizes.keys, sizes.keys), (2 * sizes.keys, sizes.values)]
    if layer == "conv1d":
        return [(layer, *rows) for rows in mixed]
    if sizes.interleaved:
        return []
    heads = sizes.value_heads
    return {
        "in_proj_qkvz": [
            *(("in_proj_qkv", *rows) for rows in mixed),
            ("in_proj_z", 0, sizes.values),
        ],
        "in_proj_ba": [("in_proj_b", 0, heads), ("in_proj_a", 0, heads)],
    }.get(layer, [])


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
        is_dropped: it must be allocated again to be packed.
        pieces: number of tensors that fill it.
        missing: those of them that have not come.
        filling: what they are copied into; None before the first.
    """

    name: str
    module: Any
    leaf: str
    like: torch.Tensor
    is_dropped: bool
    pieces: int = 0
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
        full = full[piece.first : piece.end]
        part = full if ranks == 1 else part_of_rank(full, rows.shape, rank, ranks)
        if part.shape != rows.shape:  # a padded vocabulary
            rows = rows[: len(part)]
        rows.copy_(part)
        self.missing -= 1
        if self.missing == 0:
            if self.is_dropped:
                getattr(self.module, self.leaf).data = self.filling
            self.filling = None
            if self.leaf == "weight" and hasattr(self.module, "cpu_linear"):
                self.module.quant_method.process_weights_after_loading(self.module)


@dataclass(kw_only=True)
class DirectWeights:
    """The plan of one load: all parameters of an engine whose layers have a plain layout.

    Attributes:
        targets: every parameter but those of experts.
        places: checkpoint tensor -> the parameters that it fills, and where.
        experts: decoder layer -> name of its experts, and their module.
        matrices: name of an expert's weight -> (decoder layer, expert, part).
        shape: sizes of the model.
        rank, ranks: this rank among those of the engine.
    """

    targets: list[_Target] = field(default_factory=list)
    places: dict[str, list[tuple[_Target, Piece]]] = field(default_factory=dict)
    experts: dict[int, tuple[str, Any]] = field(default_factory=dict)
    matrices: dict[str, tuple[int, int, int]]
    shape: ModelShape
    rank: int
    ranks: int

    def beside(self, names: Collection[str]) -> set[str]:
        """Return these checkpoint tensors and all that fill the same parameters or experts."""
        found, before = set(names), 0
        while len(found) > before:
            before = len(found)
            targets = {id(target) for name in found for target, _ in self.places.get(name, ())}
            layers = {self.matrices[name][0] for name in found if name in self.matrices}
            found |= {name for name, (layer, _, _) in self.matrices.items() if layer in layers}
            found |= {
                name
                for name, places in self.places.items()
                if not targets.isdisjoint(id(target) for target, _ in places)
            }
        return found

    def load(
        self,
        weights: Iterable[tuple[str, torch.Tensor] | ExpertBlock],
        only: Collection[str] | None = None,
    ) -> set[str]:
        """Copy full tensors and blocks of experts; return the parameters that are incomplete.

        Args:
            only: names of tensors, as `beside` returns them: other parameters keep their values.
        """
        names = self.places.keys() | self.matrices.keys() if only is None else only
        for name in names:
            for target, _ in self.places.get(name, ()):
                target.missing = target.pieces
        layers = {self.matrices[name][0] for name in names if name in self.matrices}
        stacked = {layer: self._stacked(layer) for layer in sorted(layers)}
        for item in weights:
            if isinstance(item, ExpertBlock):
                layer = item.layer
                stacked[layer].copy_block(item)
            else:
                name, full = item
                for target, piece in self.places.get(name, ()):
                    target.fill(full.detach(), piece, self.rank, self.ranks)
                if name not in self.matrices:
                    continue
                layer, expert, part = self.matrices[name]
                stacked[layer].copy(expert, part, full.detach())
            if stacked[layer].is_complete:
                _, module = self.experts[layer]
                if module.w13_weight.device.type == "cpu":
                    kernel = module.quant_method.moe_kernel.fused_experts
                    kernel.process_weights_after_loading(module)
                del stacked[layer]  # and what was packed, before the next layer
        missing = {target.name for target in self.targets if target.missing}
        for layer in stacked:
            missing |= {f"{self.experts[layer][0]}.{leaf}" for leaf in _EXPERTS}
        return missing

    def _stacked(self, layer: int) -> StackedExperts:
        path, module = self.experts[layer]
        stacked = plain_experts(module, self.shape)
        assert isinstance(stacked, StackedExperts), f"{path}: {stacked}"
        return stacked


def direct_weights(model: Any, shape: ModelShape, rank: int, ranks: int) -> DirectWeights | str:
    """Return where the weights of a model go, or why they need vLLM's reload.

    Args:
        model: the engine's, with its parameters in memory.
        rank, ranks: this rank among those of the engine.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = DirectWeights(matrices=expert_matrices(shape), shape=shape, rank=rank, ranks=ranks)
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            stacked = plain_experts(module, shape)
            if isinstance(stacked, str):
                return f"{path}: {stacked}"
            found.experts[int(path.split(".layers.")[1].split(".")[0])] = path, module
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
                target.pieces += 1
    return found
