"""This rank's weights: its Megatron tensors, the HF tensors they are shards of, and conversion.

One table of `Slot`s, made from the conversion rules, serves loading, weight sync and export.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from r3.models.shape import ModelShape
from r3.models.tensors import Experts, Kind, Rule, Shard, conversion_rules
from r3.runtime.mesh import Axis, Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot(Shard):
    """One Megatron tensor of this rank, or that of neighbouring experts.

    Attributes:
        tensor: the local tensor itself.
    """

    tensor: torch.Tensor


def views(kind: Kind, tensor: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """Return a view of each HF tensor inside a Megatron tensor, full or sharded.

    Views of q, k and v are `[groups, rows per group, ...]`. With an output gate each query head is
    followed by its gate, which Megatron has after all query heads of the group: the view of q is
    `[groups, heads, 2, rows per head, ...]`.
    """
    if kind == "gated":
        return list(tensor.chunk(2, 0))
    if kind == "qkv":
        heads, size = shape.num_heads // shape.num_kv_heads, shape.head_dim
        width = [(2 if shape.output_gate else 1) * heads * size, size, size]
        q, k, v = tensor.unflatten(0, (-1, sum(width))).split(width, 1)
        if shape.output_gate:
            q = q.unflatten(1, (2, heads, size)).transpose(1, 2)
        return [q, k, v]
    return [tensor]


def split(kind: Kind, full: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """Split a full Megatron tensor into its HF tensors."""
    parts = views(kind, full, shape)
    if kind != "qkv":
        return parts
    return [part.flatten(0, part.dim() - full.dim()) for part in parts]


def named(
    shard: Shard, full: torch.Tensor, shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the HF tensors that the full tensor of a shard is made of, by their names."""
    parts = (part for one in _single(shard, full) for part in split(shard.kind, one, shape))
    yield from zip(shard.hf, parts, strict=True)


def _single(shard: Shard, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    return tensor if shard.experts else [tensor]


def join_shards(kind: Kind, shards: Sequence[torch.Tensor], rows: int = 0) -> torch.Tensor:
    """Make the full Megatron tensor of the shards of all tensor-parallel ranks, in rank order.

    Args:
        rows: dimension of the rows: 1 where the tensors of experts are stacked.
    """
    if len(shards) == 1 or kind == "replicated":
        return shards[0]
    if kind == "row":
        return torch.cat(list(shards), -1)
    if kind == "gated":
        halves = [shard.chunk(2, rows) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], rows)
    return torch.cat(list(shards), rows)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_STACKED_EXPERTS = {
    f"mlp.experts.{ours}": f"linear_fc{number}.{part}"
    for number in (1, 2)
    for ours, part in ((f"w{number}", "weight"), (f"linear_fc{number}.bias", "bias"))
}


def slots(chunks: Iterable[Any], shape: ModelShape, mesh: Mesh) -> list[Slot]:
    """List all tensors of this rank's model chunks, in layer order.

    Raises:
        KeyError: Megatron built a tensor that has no conversion rule.
    """
    rules = conversion_rules(shape)

    def slot(
        name: str,
        rule: Rule,
        tensor: torch.Tensor,
        axis: Axis = mesh.tp,
        *,
        layer: int = -1,
        experts: Experts | None = None,
    ) -> Slot:
        prefix = f"model.layers.{layer}." if layer >= 0 else ""
        is_sharded = rule.kind != "replicated"
        return Slot(
            name=name,
            hf=experts.names(shape) if experts else tuple(prefix + part for part in rule.hf),
            kind=rule.kind,
            index=axis.rank if is_sharded else 0,
            count=axis.size if is_sharded else 1,
            shape=tuple(tensor.shape),
            rows=sum(size[0] for size in rule.hf.values()),
            item_size=tensor.element_size(),
            layer=layer,
            experts=experts,
            tensor=tensor.detach(),
        )

    def slots_of(chunk: Any, name: str, tensor: torch.Tensor) -> Iterator[Slot]:
        if name in rules.top:
            yield slot(name, rules.top[name], tensor)
            return
        match = _LAYER.fullmatch(name)
        if match is None:
            raise KeyError(_no_rule(name, shape))
        layer, suffix = chunk.decoder.layers[int(match[1])], match[2]
        number = layer.layer_number - 1
        if rule := rules.layers[number].get(suffix):
            yield slot(f"decoder.layers.{number}.{suffix}", rule, tensor, layer=number)
            return
        if suffix in _STACKED_EXPERTS:
            part, first = _STACKED_EXPERTS[suffix], mesh.ep.rank * len(tensor)
        elif local_expert := _LOCAL_EXPERT.fullmatch(suffix):  # a tensor of its own
            part, tensor = local_expert[2], tensor[None]
            first = mesh.ep.rank * layer.mlp.num_local_experts + int(local_expert[1])
        else:
            raise KeyError(_no_rule(name, shape))
        own = range(first, first + len(tensor))
        for experts in Experts.within(shape, number, part, own, tensor.element_size()):
            start = experts.first - first
            piece = tensor[start : start + experts.count]
            rule = rules.expert[part]
            yield slot(experts.name, rule, piece, mesh.etp, layer=number, experts=experts)

    return [
        each
        for chunk in chunks
        for name, tensor in _tensors(chunk)
        for each in slots_of(chunk, name, tensor)
    ]


def _no_rule(name: str, shape: ModelShape) -> str:
    return (
        f"Megatron parameter {name} of {shape.model_type} has no conversion rule: "
        "add one in r3/models/tensors.py"
    )


def _tensors(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, then the buffers that belong to the checkpoint (expert biases)."""
    # Adapters (r3/lora/adapters.py) are parameters that the checkpoint does not have.
    yield from (each for each in chunk.named_parameters() if not each[0].startswith("lora."))
    yield from (each for each in chunk.named_buffers() if each[0].endswith(".router.expert_bias"))


@torch.no_grad()
def load(slots_: Iterable[Slot], read: Callable[..., torch.Tensor], shape: ModelShape) -> None:
    """Load this rank's tensors from a checkpoint, one slice of one HF tensor at a time.

    Args:
        slots_: the tensors to fill.
        read: `read(name, dim, index, count)` returns slice `index` of `count` along `dim` of an HF
            tensor. Interleaved and gated tensors are filled part by part: rank i takes slice i of
            q, of k and of v, or of gate and of up.
        shape: the model's.
    """
    for slot in slots_:
        dim = -1 if slot.kind == "row" else 0
        own = (part for one in _single(slot, slot.tensor) for part in views(slot.kind, one, shape))
        for part, name in zip(own, slot.hf, strict=True):
            piece = read(name, dim, slot.index, slot.count)
            if slot.kind == "qkv":
                piece = piece.view(part.shape)
            part[: len(piece)].copy_(piece)
            part[len(piece) :].zero_()  # rows of a vocabulary padded to the ranks
