"""Copy weights directly into vLLM's parameters, past its reload.

vLLM's reload takes every module apart and puts it together again, and loads each tensor twice, once
to count its elements: about 0.3 ms of Python per tensor. Layers with a plain parameter layout need
none of that. On CPU vLLM's own functions pack each layer again, as its processor wants it. All
experts of a layer that one policy rank has are one copy, where the reload would take the 18,432
matrices of a model of 48 layers and 128 experts one by one: 5 to 7 seconds per weight sync.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from r3.models.tensors import Experts

if TYPE_CHECKING:
    from r3.models.shape import ModelShape

# vLLM's fused linear layers -> the checkpoint's layers that they join, in order.
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# What vLLM calls otherwise in gpt-oss and Ling 2.0.
_OTHER_NAMES = (
    (r"^model\.(word_embeddings|embedding)\.", "model.embed_tokens."),
    (r"(\.\d+)\.(attn|attention)\.", r"\1.self_attn."),
    (r"\.self_attn\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
)
# Made by latent attention from kv_b_proj at the end of a load.
DERIVED = ("W_UV", "W_UK", "W_UK_T")
# Classes of `quant_method` of layers that multiply by their parameters as these are; norms have
# none.
_PLAIN_METHODS = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
# Kernels that read experts as they are loaded, and whose weights the copy below therefore makes.
_PLAIN_KERNELS = ("TRITON", "CPU")


class WeightMismatch(RuntimeError):
    """The tensors for the engine are not exactly those of the model."""


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
    name_in_checkpoint = name
    for pattern, other in _OTHER_NAMES:
        name_in_checkpoint = re.sub(pattern, other, name_in_checkpoint)
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
    """Return a tensor-parallel rank's part of a full tensor; all of it if it has no such part.

    Args:
        size: shape of the rows that the part fills. A vocabulary is padded with rows that are no
            tokens, so that the part may have fewer.
    """
    # Columns are divided over the ranks.
    if len(size) > 1 and full.shape[1] == ranks * size[1] and ranks > 1:
        full = full.narrow(1, rank * size[1], size[1])
    shards = -(-len(full) // size[0])
    if 1 < shards <= ranks:  # rows are; key and value heads may be held by several ranks each
        start = (rank * shards // ranks) * size[0]
        full = full[start : start + size[0]]
    return full


def as_made(module: Any, leaf: str, live: torch.Tensor) -> torch.Tensor:
    """Return a parameter of the engine as vLLM's loaders fill it, without values if it differs."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    made = get_layerwise_info(module).restore_metadata[0].get(leaf, live)
    return live if made.shape == live.shape else made


@dataclass(kw_only=True)
class Target:
    """A parameter of the engine that checkpoint tensors fill.

    Attributes:
        name, module, leaf: the parameter, its layer, and its name there.
        like: the parameter, or where vLLM packed it, its metadata before that.
        is_packed: it must be allocated again, and packed.
        pieces: number of tensors that fill it.
        missing: those of them that have not come.
        filling: what they are copied into; None before the first.
    """

    name: str
    module: Any
    leaf: str
    like: torch.Tensor
    is_packed: bool
    pieces: int = 0
    missing: int = 0
    filling: torch.Tensor | None = None

    def fill(self, full: torch.Tensor, piece: Piece, rank: int, ranks: int) -> None:
        """Copy a rank's part of a checkpoint tensor; pack the layer after the last one."""
        if self.filling is None:
            self.filling = (
                torch.empty(self.like.shape, dtype=self.like.dtype)
                if self.is_packed
                else self.like.data
            )
        rows = self.filling.narrow(0, piece.start, piece.rows)
        part = part_of_rank(full[piece.first : piece.end], rows.shape, rank, ranks)
        rows[: len(part)].copy_(part)  # fewer in a padded vocabulary
        self.missing -= 1
        if self.missing == 0:
            if self.is_packed:
                getattr(self.module, self.leaf).data = self.filling
            self.filling = None
            # What vLLM makes of a weight differs from processor to processor.
            is_processed = self.leaf == "weight" and getattr(self.module, "quant_method", None)
            if is_processed and self.like.device.type in ("cpu", "meta"):
                self.module.quant_method.process_weights_after_loading(self.module)

    def refuse_unfit(self, source: str, shape: Sequence[int], piece: Piece, ranks: int) -> None:
        """Raise `WeightMismatch` unless the first rank's part of a tensor fills its place."""
        size = torch.Size((piece.rows, *self.like.shape[1:]))
        full = torch.empty(shape, device="meta")[piece.first : piece.end]
        part = part_of_rank(full, size, 0, ranks).shape if len(shape) == len(size) else full.shape
        if hasattr(self.module, "org_vocab_size"):  # it may be padded
            part = torch.Size((max(part[0], size[0]), *part[1:]))
        if part != size:
            raise WeightMismatch(
                f"nothing was loaded: the engine's parameter {self.name} has the shape "
                f"{tuple(self.like.shape)} for {source} {tuple(shape)}, a layout that R3 does not "
                "know. Report it with the processor and the version of vLLM"
            )


def expert_leaves(shape: ModelShape) -> dict[str, str]:
    """The parameters in vLLM that hold the experts of a layer, by the part that fills them."""
    leaves = {"linear_fc1.weight": "w13_weight", "linear_fc2.weight": "w2_weight"}
    biases = {"linear_fc1.bias": "w13_bias", "linear_fc2.bias": "w2_bias"}
    return leaves | biases if shape.has_biases else leaves


@cache
def expert_layers(shape: ModelShape) -> dict[str, int]:
    """Map the name of every tensor of an expert in the checkpoint to its decoder layer."""
    return {
        name: layer
        for layer in shape.moe_layers
        for part in expert_leaves(shape)
        for name in Experts(layer=layer, first=0, count=shape.num_experts, part=part).names(shape)
    }


def matrices(
    experts: Experts, full: torch.Tensor, shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of single experts, as the checkpoint has them."""
    names = experts.names(shape)
    per_expert = len(names) // experts.count
    yield from zip(names, (part for one in full for part in one.chunk(per_expert)), strict=True)


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """The routed experts of one MoE layer on one rank of the engine.

    Attributes:
        held: by part: `[E, 2F/tp, D]`, this rank's rows of gate over its rows of up; `[E, D,
            F/tp]`, its columns of down; and where experts have biases, `[E, 2F/tp]` and `[E, D]`,
            of which the first rank adds the second.
        rank: number of this rank among the tp ranks of the engine.
        alternates: rows of gate and up alternate.
        copied: what was copied, (part, expert).
    """

    held: Mapping[str, torch.Tensor]
    rank: int
    alternates: bool = False
    copied: set[tuple[str, int]] = field(default_factory=set)

    def copy(self, experts: Experts, full: torch.Tensor) -> None:
        """Copy this rank's part of a full tensor."""
        stop = experts.first + experts.count
        target = self.held[experts.part][experts.first : stop]
        if experts.part.startswith("linear_fc1"):
            split = (-1, 2) if self.alternates else (2, -1)
            target = target.unflatten(1, split)
            target = target.transpose(1, 2) if self.alternates else target
        target.copy_(self._own(experts.part, full))
        self.copied.update((experts.part, e) for e in range(experts.first, stop))

    def rows(self, part: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor as it lies in `held`."""
        own = self._own(part, full)
        if part.startswith("linear_fc1"):
            own = (own.transpose(1, 2) if self.alternates else own).flatten(1, 2)
        return own

    def _own(self, part: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part: `[n, 2, F/tp, ...]` of gate and up, `[n, D, F/tp]`, `[n, D]`."""
        if part == "linear_fc2.bias":
            return full if self.rank == 0 else torch.zeros_like(full)
        if part.startswith("linear_fc1"):
            full = full.unflatten(1, (2, -1))
        width = self.held["linear_fc2.weight"].shape[-1]
        return full.narrow(2, self.rank * width, width)

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of every expert was copied."""
        return len(self.copied) == sum(map(len, self.held.values()))


def plain_experts(
    module: Any, shape: ModelShape, tensors: Mapping[str, torch.Tensor] | None = None
) -> StackedExperts | str:
    """The stacked tensors of vLLM's `RoutedExperts` if they have a plain layout, else why not.

    Args:
        tensors: the parameters that the kernels of `module` read, by their names there; None: those
            that it has.
    """
    if tensors is None:
        tensors = {leaf: getattr(module, leaf) for leaf in expert_leaves(shape).values()}
    method = module.quant_method
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "unknown")
    if backend not in _PLAIN_KERNELS:
        return f"{type(method).__name__} with kernel {backend} has a weight layout of its own"
    parallel = module.moe_config.moe_parallel_config
    width = shape.moe_ffn_size // parallel.tp_size
    expected: dict[str, tuple[int, ...]] = {
        "w13_weight": (shape.num_experts, 2 * width, shape.hidden_size),
        "w2_weight": (shape.num_experts, shape.hidden_size, width),
    }
    if shape.has_biases:
        expected |= {
            "w13_bias": (shape.num_experts, 2 * width),
            "w2_bias": (shape.num_experts, shape.hidden_size),
        }
    # The router's bias is the gate's parameter, which is loaded there.
    own = {name: tensor for name, tensor in tensors.items() if name != "e_score_correction_bias"}
    actual = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if actual != expected:
        return f"its parameters are {actual}, not {expected}"
    if not all(tensor.is_contiguous() for tensor in own.values()):
        return "its parameters are not contiguous"
    return StackedExperts(
        held={part: tensors[leaf].data for part, leaf in expert_leaves(shape).items()},
        rank=parallel.tp_rank,
        alternates=shape.moe_names.alternates,
    )


@dataclass(kw_only=True)
class DirectWeights:
    """The plan of one load: all parameters of an engine whose layers have a plain layout.

    Attributes:
        targets: every parameter but those of experts.
        places: checkpoint tensor -> the parameters that it fills, and where.
        experts: decoder layer -> name of its experts, and their module.
        layers: checkpoint tensor of an expert -> decoder layer.
        shape: sizes of the model.
        rank, ranks: this rank among those of the engine.
    """

    targets: list[Target] = field(default_factory=list)
    places: dict[str, list[tuple[Target, Piece]]] = field(default_factory=dict)
    experts: dict[int, tuple[str, Any]] = field(default_factory=dict)
    layers: Mapping[str, int]
    shape: ModelShape
    rank: int
    ranks: int

    def beside(self, names: Collection[str]) -> set[str]:
        """Return these checkpoint tensors and all that fill the same parameters or experts."""
        tensors, before = set(names), 0
        while len(tensors) > before:
            before = len(tensors)
            targets = {id(target) for name in tensors for target, _ in self.places.get(name, ())}
            layers = {self.layers[name] for name in tensors if name in self.layers}
            tensors |= {name for name, layer in self.layers.items() if layer in layers}
            tensors |= {
                name
                for name, places in self.places.items()
                if not targets.isdisjoint(id(target) for target, _ in places)
            }
        return tensors

    def load(
        self,
        weights: Iterable[tuple[str | Experts, torch.Tensor]],
        only: Collection[str] | None = None,
    ) -> set[str]:
        """Copy full tensors; return the parameters that are incomplete.

        Args:
            only: names of tensors, as `beside` returns them: other parameters keep their values.
        """
        names = self.places.keys() | self.layers.keys() if only is None else only
        for name in names:
            for target, _ in self.places.get(name, ()):
                target.missing = target.pieces
        layers = {self.layers[name] for name in names if name in self.layers}
        stacked = {layer: self._stacked(layer) for layer in sorted(layers)}
        for key, full in weights:
            if not isinstance(key, Experts):
                for target, piece in self.places.get(key, ()):
                    target.fill(full.detach(), piece, self.rank, self.ranks)
                continue
            stacked[key.layer].copy(key, full.detach())
            if stacked[key.layer].is_complete:
                _, module = self.experts[key.layer]
                if module.w13_weight.device.type == "cpu":
                    kernel = module.quant_method.moe_kernel.fused_experts
                    kernel.process_weights_after_loading(module)
                del stacked[key.layer]  # and what was packed, before the next layer
        missing = {target.name for target in self.targets if target.missing}
        for layer in stacked:
            path, leaves = self.experts[layer][0], expert_leaves(self.shape).values()
            missing |= {f"{path}.{leaf}" for leaf in leaves}
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

    Raises:
        WeightMismatch: a parameter has a layout in which the checkpoint's tensors have no place.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    direct = DirectWeights(layers=expert_layers(shape), shape=shape, rank=rank, ranks=ranks)
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            stacked = plain_experts(module, shape)
            if isinstance(stacked, str):
                return f"{path}: {stacked}"
            direct.experts[int(path.split(".layers.")[1].split(".")[0])] = path, module
            continue
        for leaf, live in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}"
            method = type(getattr(module, "quant_method", None)).__name__
            if leaf in DERIVED or method not in _PLAIN_METHODS:
                return f"{name} is made from other weights, or has a layout of its own"
            like = live if method == "NoneType" else as_made(module, leaf, live)
            packed = like is not live
            if packed and live.device.type != "cpu":
                return f"{name} has a layout of its own"
            target = Target(name=name, module=module, leaf=leaf, like=like, is_packed=packed)
            direct.targets.append(target)
            for source, piece in pieces_of(name, len(like), module, shape):
                if source not in shape.tensor_shapes:
                    return f"the checkpoint has no {source}, which {name} is made of"
                target.refuse_unfit(source, shape.tensor_shapes[source], piece, ranks)
                direct.places.setdefault(source, []).append((target, piece))
                target.pieces += 1
    return direct
