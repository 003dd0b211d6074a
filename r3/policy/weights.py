"""Where every weight of the policy lives: this rank's Megatron tensors, the HF tensors they are parts of, and how to cut them.

One table (`Slot`s, made from the family's rules) serves loading, weight sync and export.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from r3.policy.families.family import Family, Kind, Rule
from r3.runtime.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """What interleaving q, k and v needs: query heads per key-value group, size of a head."""

    queries_per_group: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One Megatron tensor of this rank, or one expert's slice of a stacked one.

    Attributes:
        name: Megatron's name, made global (layer and expert numbers of the whole model).
        hf: the HF tensors it is made of, in the order they are joined.
        kind: how it is cut; `index` of `count` says which cut this rank holds.
        tensor: the local tensor itself.
        rows: rows of the joined HF tensors; fewer than the Megatron tensor has where a vocabulary is padded.
        is_expert: whether it belongs to one expert.
    """

    name: str
    hf: tuple[str, ...]
    kind: Kind
    index: int
    count: int
    tensor: torch.Tensor
    rows: int
    is_expert: bool


def views(kind: Kind, tensor: torch.Tensor, heads: HeadLayout) -> list[torch.Tensor]:
    """Where in a Megatron tensor, whole or cut, each HF tensor of it lies: views, of q, k and v `[groups, rows, ...]`."""
    if kind == "gated":
        return list(tensor.chunk(2, 0))
    if kind == "qkv":
        width = [heads.queries_per_group * heads.head_dim, heads.head_dim, heads.head_dim]
        return list(tensor.unflatten(0, (-1, sum(width))).split(width, 1))
    return [tensor]


def split(kind: Kind, full: torch.Tensor, heads: HeadLayout) -> list[torch.Tensor]:
    """The full Megatron tensor -> HF tensors."""
    parts = views(kind, full, heads)
    return [part.flatten(0, 1) for part in parts] if kind == "qkv" else parts


def uncut(kind: Kind, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The full Megatron tensor from the cuts that tensor parallel ranks hold, in rank order."""
    if len(parts) == 1 or kind == "replicated":
        return parts[0]
    if kind == "row":
        return torch.cat(list(parts), -1)
    if kind == "gated":
        halves = [part.chunk(2, 0) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], 0)
    return torch.cat(list(parts), 0)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_STACKED_EXPERTS = {"mlp.experts.w1": "linear_fc1.weight", "mlp.experts.w2": "linear_fc2.weight"}


def slots(
    chunks: Iterable[Any],
    family: Family,
    mesh: Mesh,
    *,
    hf_shapes: Mapping[str, tuple[int, ...]],
    tied: bool,
) -> list[Slot]:
    """All tensors of this rank's model chunks, in layer order.

    Raises:
        KeyError: Megatron built a tensor that the family's table does not know.
    """
    found: list[Slot] = []

    def add(
        name: str, rule: Rule, tensor: torch.Tensor, *, expert: int | None = None, prefix: str = ""
    ) -> None:
        axis = mesh.tp if expert is None else mesh.etp
        hf = tuple(prefix + piece.format(e=expert) for piece in rule.hf)
        found.append(
            Slot(
                name=name,
                hf=hf,
                kind=rule.kind,
                index=0 if rule.kind == "replicated" else axis.rank,
                count=1 if rule.kind == "replicated" else axis.size,
                tensor=tensor.detach(),
                rows=sum(hf_shapes[piece][0] for piece in hf)
                if all(piece in hf_shapes for piece in hf)
                else 0,
                is_expert=expert is not None,
            )
        )

    for chunk in chunks:
        layer_numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, tensor in _tensors(chunk, family):
            if name in family.top:
                rule = family.top[name]
                if (
                    tied and name == "output_layer.weight"
                ):  # the last pipeline stage's copy of the embedding
                    rule = family.top["embedding.word_embeddings.weight"]
                add(name, rule, tensor)
                continue
            match = _LAYER.fullmatch(name)
            if match is None:
                raise KeyError(
                    f"Megatron parameter {name} is not in the table of {family.model_type}"
                )
            local, suffix = int(match[1]), match[2]
            layer = layer_numbers[local]
            where, prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            if suffix in _STACKED_EXPERTS:
                suffix_of_one = _STACKED_EXPERTS[suffix]
                for i in range(tensor.shape[0]):
                    expert = mesh.ep.rank * tensor.shape[0] + i
                    add(
                        f"{where}mlp.experts.{expert}.{suffix_of_one}",
                        family.expert[suffix_of_one],
                        tensor[i],
                        expert=expert,
                        prefix=prefix,
                    )
            elif expert_match := _LOCAL_EXPERT.fullmatch(suffix):
                per_rank = chunk.decoder.layers[local].mlp.num_local_experts
                expert = mesh.ep.rank * per_rank + int(expert_match[1])
                add(
                    f"{where}mlp.experts.{expert}.{expert_match[2]}",
                    family.expert[expert_match[2]],
                    tensor,
                    expert=expert,
                    prefix=prefix,
                )
            elif suffix in family.layer:
                add(where + suffix, family.layer[suffix], tensor, prefix=prefix)
            else:
                raise KeyError(
                    f"Megatron parameter {name} is not in the table of {family.model_type}"
                )
    return found


def _tensors(chunk: Any, family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then the buffers that the family's table names: those that belong to the checkpoint."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        match = _LAYER.fullmatch(name)
        if match is not None and match[2] in family.layer:
            yield name, buffer


@torch.no_grad()
def load(slots_: Iterable[Slot], read: Callable[..., torch.Tensor], heads: HeadLayout) -> None:
    """Fill this rank's tensors from a checkpoint; the host holds one cut of one HF tensor at a time.

    Args:
        read: `read(name, dim, index, count)` gives cut `index` of `count` along `dim` of an HF tensor. Interleaved and
            gated tensors are cut part by part: rank i's key-value groups, or its rows of gate and of up, are cut i of each.
    """
    for slot in slots_:
        dim = -1 if slot.kind == "row" else 0
        for part, name in zip(views(slot.kind, slot.tensor, heads), slot.hf, strict=True):
            piece = read(name, dim, slot.index, slot.count)
            if slot.kind == "qkv":
                piece = piece.view(part.shape)
            part[: len(piece)].copy_(piece)
            part[len(piece) :].zero_()  # rows of a vocabulary padded to the ranks
